"""Any model's own chat template as a renderer: messages to ids exactly as the template writes them.

Templates differ in how they want tool calls. What this one wants is found out once, by rendering a tiny conversation in
each way until one shows everything. Text of messages never becomes a control token: where a message holds the text
of one, it is rendered a second time with marks in its place, which tells where in the output it went.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.answers import WAYS, Format
from gyre_sdk.harness.proxy.render.formats import AnswerFormat, ReadAnswer
from gyre_sdk.harness.proxy.render.tokenizer import Codec, Span

Wire = Mapping[str, Any]
"""A message or a tool as protocols write it: a JSON object."""

PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "gyre_tool",
        "description": "gyre",
        "parameters": {"type": "object", "properties": {"gyre_key": {"type": "string"}}, "required": []},
    },
}
_CALL = {
    "id": "call_gyre0",
    "type": "function",
    "function": {"name": "gyre_tool", "arguments": '{"gyre_key": "gyre_value"}'},
}
_CALLING: list[Wire] = [
    {"role": "user", "content": "gyre_question"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "gyre_result", "tool_call_id": "call_gyre0"},
]
_MARKS = tuple(map(chr, itertools.chain(range(0xE000, 0xE100), range(0xF0000, 0xF0100))))
_PROMPT_END = 256


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as text."""

    text: str
    blocked: tuple[Span, ...]
    """Stretches that came from messages and read like control tokens."""

    def after(self, start: int) -> Rendering:
        """Return what follows a place."""
        return Rendering(
            self.text[start:], tuple((left - start, right - start) for left, right in self.blocked if left >= start)
        )


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template wants tool calls."""

    parsed: bool = True
    """Arguments as an object; else as JSON text."""
    empty: str | None = ""
    """Content of a message that holds calls and no text."""
    short_ids: bool = False
    """Ids of nine letters and digits, made from the real ones."""
    named: bool = False
    """Results tell the tool's name."""


class ChatTemplate:
    """A renderer over a chat template.

    Args:
        codec: the model's tokenizer.
        plain: renders the template with keyword variables.
        tooled: the template for requests with tools, where the model has one of its own for them.
        variables: what the template may refer to besides messages and tools.
        form: how this model writes answers.
        stop_ids: where its answers end.
    """

    def __init__(
        self,
        codec: Codec,
        plain: Callable[..., str],
        tooled: Callable[..., str],
        variables: Mapping[str, Any],
        form: AnswerFormat,
        stop_ids: Sequence[int],
    ) -> None:
        self.codec, self.form = codec, form
        self._plain, self._tooled = plain, tooled
        self._variables = dict(variables)
        self._stop_ids = list(stop_ids)
        self._own = frozenset(form.markers())
        self.style, self.shows_calls = self._find_style()
        self.shows_tools = self._try(_CALLING[:1], [PROBE_TOOL], CallStyle()).count("gyre_tool") > 0
        spoken = [_CALLING[0], {**_CALLING[1], "content": "gyre_words"}, _CALLING[2]]
        shown = self._try(spoken, [], self.style)
        self.shows_both = "gyre_words" in shown and "gyre_value" in shown

    def get_stop_token_ids(self) -> list[int]:
        """Return the ids that end an answer."""
        return list(self._stop_ids)

    def render_ids(
        self, messages: Sequence[Wire], *, tools: Sequence[Wire] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of a conversation.

        Raises:
            RenderError: the template cannot show it.
        """
        if not messages:
            raise RenderError("there are no messages")
        self.check(messages, tools or ())
        shown = self.show(messages, tools or (), opened=add_generation_prompt)
        return self.codec.encode(shown.text, shown.blocked)

    def check(self, messages: Sequence[Wire], tools: Sequence[Wire]) -> None:
        """Refuse what the template would leave out.

        Raises:
            RenderError: with what to do instead.
        """
        if tools and not (self.shows_tools and self.form.calls):
            what = "shows no tools" if not self.shows_tools else "writes tool calls in a way that is not known"
            raise RenderError(
                f"the model's chat template {what}; name a `renderer` that knows this model, or send no tools"
            )
        for message in messages:
            if message.get("tool_calls") and not (self.shows_both if message.get("content") else self.shows_calls):
                raise RenderError(
                    "the model's chat template shows no tool calls"
                    + (" beside text" if self.shows_calls else "")
                    + "; name a `renderer` that knows this model"
                )

    def show(self, messages: Sequence[Wire], tools: Sequence[Wire], *, opened: bool) -> Rendering:
        """Return a conversation as text, with the opening of the model's turn where asked.

        Raises:
            RenderError: the template failed, or does with a control token's text what cannot be followed.
        """
        styled = list(_styled(messages, self.style))
        text = self._render(styled, tools, opened)
        mark = next((mark for mark in _MARKS if mark not in text), None)
        marks = _Marks(self.codec, self._own, mark or "")
        marked = [marks.message(message) for message in styled], [marks.value(tool) for tool in tools]
        if not marks.texts:
            return Rendering(text, ())
        if mark is None:
            raise RenderError("a message holds the text of a control token and every private character")
        restored = marks.restore(self._render(*marked, opened))
        if restored.text != text:
            raise RenderError("a message holds the text of a control token where the chat template changes it")
        return restored

    def live_format(self) -> Format | None:
        """Return the format for a live parser; None where answers must be read whole."""
        way = WAYS.get(self.form.calls or "")
        prompts = [self._try(_CALLING[:1], [], self.style, opened=opened) for opened in (False, True)]
        turn = prompts[1].removeprefix(prompts[0])
        for tag in self.form.think or ():
            turn = turn.replace(tag, "")
        if way is None or not (turn.strip() or self.form.think is None):
            return None
        return replace(way, stop_ids=frozenset(self._stop_ids), think=self.form.think, turn=turn.strip())

    def parse_response(
        self, token_ids: list[int], *, tools: Sequence[Wire] | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ReadAnswer:
        """Return what sampled ids say."""
        stops = set(self._stop_ids)
        end = next((at for at, token in enumerate(token_ids) if token in stops), len(token_ids))
        prompt = self.codec.decode([int(token) for token in (prompt_ids or ())[-_PROMPT_END:]])
        return self.form.read(self.codec.decode(token_ids[:end]), tools or (), thinking=self.thinks(prompt))

    def thinks(self, text: str) -> bool:
        """Return whether a text leaves the model thinking."""
        if self.form.think is None:
            return False
        opening, closing = self.form.think
        rest = text[text.rfind(opening) + len(opening) :] if opening in text else closing
        return closing not in rest and not self.codec.control_in(rest)

    def _render(self, messages: Sequence[Wire], tools: Sequence[Wire], opened: bool) -> str:
        render = self._tooled if tools else self._plain
        try:
            return render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=opened,
                **self._variables,
            )
        except Exception as error:  # boundary: templates raise whatever they like
            raise RenderError(f"the model's chat template refuses: {error}") from error

    def _find_style(self) -> tuple[CallStyle, bool]:
        for named, short, empty, parsed in itertools.product((False, True), (False, True), ("", None), (True, False)):
            style = CallStyle(parsed, empty, short, named)
            text = self._try(_CALLING, [], style)
            parts = ("gyre_tool", "gyre_key", "gyre_value", "gyre_result")
            if all(part in text for part in parts) and "'gyre_key'" not in text and '\\"gyre_key' not in text:
                return style, True
        return CallStyle(), False

    def _try(self, messages: Sequence[Wire], tools: Sequence[Wire], style: CallStyle, *, opened: bool = True) -> str:
        try:
            return self._render(list(_styled(messages, style)), tools, opened)
        except RenderError:
            return ""


class _Marks:
    """Puts marks in the place of control tokens' texts, and finds them again."""

    def __init__(self, codec: Codec, own: frozenset[str], mark: str) -> None:
        self._codec, self._own, self._mark = codec, own, mark
        self.texts: list[str] = []

    def message(self, message: Wire) -> Wire:
        """Return a message with marks. An assistant's own tags are its own, in its text and thinking."""
        own = self._own if message.get("role") == "assistant" else frozenset()
        return {
            key: value
            if key in ("role", "type")
            else self.value(value, own if key in ("content", "reasoning_content", "thinking") else frozenset())
            for key, value in message.items()
        }

    def value(self, value: Any, own: frozenset[str] = frozenset()) -> Any:
        """Return a JSON value with marks in its strings."""
        if isinstance(value, str):
            return self._string(value, own)
        if isinstance(value, Mapping):
            return {self._string(str(key), own): self.value(item, own) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item, own) for item in value]
        return value

    def restore(self, text: str) -> Rendering:
        """Return a rendering with the texts back in their places.

        Raises:
            RenderError: the template cut marks apart.
        """
        out: list[str] = []
        spans: list[Span] = []
        at = length = 0
        while (start := text.find(self._mark, at)) >= 0:
            end = text.find(self._mark, start + 1)
            digits = text[start + 1 : end]
            if end < 0 or not digits.isdecimal() or int(digits) >= len(self.texts):
                raise RenderError("the chat template changes the text of messages in a way that cannot be followed")
            out += [text[at:start], self.texts[int(digits)]]
            length += start - at
            spans.append((length, length + len(out[-1])))
            length, at = spans[-1][1], end + 1
        return Rendering("".join([*out, text[at:]]), tuple(spans))

    def _string(self, text: str, own: frozenset[str]) -> str:
        found = [span for span in self._codec.control_in(text) if text[slice(*span)] not in own]
        if not found:
            return text
        out, at = "", 0
        for start, end in found:
            out += f"{text[at:start]}{self._mark}{len(self.texts)}{self._mark}"
            self.texts.append(text[start:end])
            at = end
        return out + text[at:]


def _styled(messages: Sequence[Wire], style: CallStyle) -> Iterator[dict[str, Any]]:
    names: dict[str, str] = {}
    for message in messages:
        new = dict(message)
        if new.get("reasoning_content"):
            new["thinking"] = new["reasoning_content"]
        if new.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in new["tool_calls"]}
            new["tool_calls"] = [_styled_call(call, style) for call in new["tool_calls"]]
            new["content"] = new["content"] or style.empty
        if new.get("role") == "tool":
            given = new.get("tool_call_id") or ""
            if style.named:
                new["name"] = names.get(given, "tool")
            if style.short_ids:
                new["tool_call_id"] = _short_id(given)
        yield new


def _styled_call(call: Wire, style: CallStyle) -> dict[str, Any]:
    function = dict(call["function"])
    if style.parsed:
        try:
            value = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            function["arguments"] = value
    return {**call, "id": _short_id(call["id"]) if style.short_ids else call["id"], "function": function}


def _short_id(given: str) -> str:
    if len(given) == 9 and given.isalnum() and given.isascii():
        return given
    return hashlib.blake2b(given.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


__all__ = ["PROBE_TOOL", "CallStyle", "ChatTemplate", "Rendering", "Wire"]
