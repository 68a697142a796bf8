"""Text to deltas: reasoning, content and tool call blocks, told apart by their tags.

Reasoning is the first thing in an answer, or was opened by the prompt, and its first closing tag ends it for good. A
tool call block that opens inside it counts only if no closing tag follows, so text from there waits. A block becomes
a tool call when its name and the start of its arguments are known; until then it may turn out to be content. A block
that no tag closes ends with its JSON, with the next block or with the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from gyre_sdk.harness.proxy.answers.body import Body, Standing
from gyre_sdk.harness.proxy.answers.deltas import Deltas, Trimmed
from gyre_sdk.harness.proxy.answers.tags import held_from
from gyre_sdk.harness.proxy.dialects.canonical import Part, ToolCall


class Scanner:
    """Reads the text of one answer."""

    def __init__(
        self,
        out: Deltas,
        think: tuple[str, str] | None,
        call: tuple[str, str] | None,
        body: Callable[[], Body],
        *,
        wrap: tuple[str, ...] = (),
        bare: bool = False,
        thinking: bool,
        begun: bool = False,
        name: str,
        parallel: bool,
    ) -> None:
        """Start at the beginning of an answer.

        Args:
            out: where the deltas go.
            think: tags around reasoning; None for a model that writes none.
            call: tags around a tool call block; None leaves all blocks in the text.
            body: makes the reader of a block's body.
            wrap: tags around all blocks, left out of the text.
            bare: whether an answer that begins with a brace is a block without tags.
            thinking: whether the prompt opened reasoning.
            begun: whether the prompt holds the start of the answer's text.
            name: of the answer, for the ids of tool calls.
            parallel: whether tool calls after the first are kept.
        """
        self._out, self._think, self._call, self._new_body = out, think, call, body
        self._wrap, self._bare = wrap if call else (), bare and call is not None
        self._name, self._parallel = name, parallel
        self._reasoning, self._content = Trimmed(Part.REASONING, out), Trimmed(Part.CONTENT, out)
        self._text = ""
        self._draft: list[str] = []
        self._read: Callable[[], bool] = self._read_reasoning if thinking else self._read_start
        if begun:
            self._read = self._read_content
            self._content.resume()
        self._body: Body = body()
        self._block: list[str] = []
        self._calls = 0
        self._begun = False

    def feed(self, text: str) -> None:
        """Read on."""
        self._text += text
        while self._text and self._read():
            pass

    def finish(self) -> None:
        """Settle what is open: the answer ends here."""
        while self._text or self._draft or self._block:
            rest = self._text
            self._text = ""
            if self._draft:  # reasoning without an end: the block inside it counts
                draft = "".join(self._draft)
                self._draft, self._read = [], self._read_content
                self.feed(draft + rest)
            elif self._block:
                body = self._body
                self._to_body(rest)
                if _ended(body):
                    self.feed(body.surplus)
                else:
                    self._end_block(closed=False)
            elif self._read == self._read_reasoning:
                self._reasoning.put(rest)
            else:
                self._content.put(rest)

    def _read_start(self) -> bool:
        head = self._text.lstrip()
        if self._bare and not head:
            return False
        if self._bare and head[0] == "{":
            self._text = head
            self._open_block("")
            return True
        if self._think is None:
            self._read = self._read_content
            return True
        opening = self._think[0]
        if head.startswith(opening):
            self._text, self._read = head[len(opening) :], self._read_reasoning
        elif opening.startswith(head):
            self._text = head
            return False
        else:
            self._read = self._read_content
        return True

    def _read_reasoning(self) -> bool:
        assert self._think is not None
        blocks = (self._call[0], *self._wrap) if self._call else ()
        tag = self._up_to((*self._think, *blocks), self._reasoning.put)
        if tag == self._think[1]:
            self._read = self._read_content
        elif tag in blocks:
            self._draft = [tag]
            self._read = self._read_draft
        return bool(tag)

    def _read_draft(self) -> bool:
        assert self._think is not None
        tag = self._up_to(self._think[1:], self._draft.append)
        if not tag:
            return False
        self._reasoning.put("".join(self._draft).replace(self._think[0], ""))
        self._draft, self._read = [], self._read_content
        return True

    def _read_content(self) -> bool:
        if self._call is None:
            self._content.put(self._text)
            self._text = ""
            return False
        tag = self._up_to((self._call[0], *self._wrap), self._content.put)
        if tag == self._call[0]:
            self._open_block(tag)
        return bool(tag)

    def _open_block(self, tag: str) -> None:
        self._block, self._body, self._begun = [tag], self._new_body(), False
        self._read = self._read_block

    def _read_block(self) -> bool:
        assert self._call is not None
        body, (opening, closing) = self._body, self._call
        tag = self._up_to((closing or opening,), self._to_body)
        if _ended(body):  # on the way here
            self._text = body.surplus + tag + self._text
            return True
        if tag:
            self._end_block(closed=True)
            self._text = self._text if closing else tag + self._text
        return bool(tag)

    def _up_to(self, tags: tuple[str, ...], put: Callable[[str], None]) -> str:
        """Give the text before the next tag away, and return the tag; without one, keep what may become one."""
        found = min(((place, tag) for tag in tags if (place := self._text.find(tag)) >= 0), default=None)
        text = self._text
        end = found[0] if found else held_from(text, tags)
        self._text = text[end + len(found[1]) :] if found else text[end:]
        if end:
            put(text[:end])
        return found[1] if found else ""

    def _to_body(self, text: str) -> None:
        body = self._body
        self._block.append(text)
        arguments = body.feed(text)
        if body.standing is Standing.CALL:
            self._begin_call()
            self._arguments(arguments)
        elif body.standing is Standing.TEXT:
            raw = "".join(self._block)
            self._content.put(raw[: len(raw) - len(body.surplus)])
            self._block, self._read = [], self._read_content
        if body.over:
            self._end_block(closed=True)
            follow = body.follow()
            if follow is not None:
                self._block, self._body, self._begun = [""], follow, False
                self._read = self._read_block

    def _begin_call(self) -> None:
        self._block = self._block[:1]
        if self._begun:
            return
        self._begun = True
        self._content.part_here()
        if self._kept:
            self._out.call(ToolCall(f"call_{self._name}{self._calls}", self._body.name))

    @property
    def _kept(self) -> bool:
        return self._parallel or self._calls == 0

    def _arguments(self, text: str) -> None:
        if self._kept:
            self._out.text(Part.ARGUMENTS, text)

    def _end_block(self, *, closed: bool) -> None:
        arguments = self._body.finish(closed)
        if self._body.standing is Standing.CALL:
            self._begin_call()
            self._arguments(arguments)
            self._calls += 1
        elif self._body.standing is Standing.TEXT:
            assert self._call is not None
            self._content.put("".join(self._block) + (self._call[1] if closed else ""))
        self._block, self._read = [], self._read_content


def _ended(body: Body) -> bool:
    """Tell whether a block ended by itself, as text or behind its last brace."""
    return body.over or body.standing is Standing.TEXT
