"""Answers that agents send back in other pieces than they were recorded in.

An answer may continue text of the assistant's that the request ended with: a prefill, which opens no turn of its own,
or a message, which does. Agents keep the two as two messages, as blocks of one, or put them together. All of these are
the same answer, so they lead to what was recorded of it; a text that was cut anywhere else leads nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import Message, identity, split_thinking
from gyre_sdk.harness.proxy.dialects.message_trie import Cut, Node
from gyre_sdk.harness.proxy.dialects.prefill import continuable

T = TypeVar("T")


def _in_pieces(given: Sequence[str], texts: Sequence[str]) -> bool:
    """Return whether messages hold recorded texts one behind the other, cut nowhere but where two of these meet.

    Args:
        given: texts of messages.
        texts: as recorded. Within a message a line feed may stand between two of them, as between blocks of text.
    """
    states = {(0, 0)}
    for place, text in enumerate(texts):
        starts = set(states)
        for at, end in states if place else ():
            if text and given[at].startswith("\n", end):
                starts.add((at, end + 1))
            if end == len(given[at]) and at + 1 < len(given):
                starts.add((at + 1, 0))
        states = {(at, start + len(text)) for at, start in starts if given[at].startswith(text, start)}
        if not states:
            return False
    return (len(given) - 1, len(given[-1])) in states


def note_cuts(end: Node[T], answer: Message, prefill: str) -> bool:
    """Have an answer found also in other pieces, where it continues text; return whether it does."""
    above = end.parent
    nodes: tuple[Node[T], ...] = (end,)
    assert above is not None
    texts: tuple[str, ...] = (answer.content,)
    if prefill:
        earlier = (cut.texts for cut in above.cut if cut.nodes == (cut.end,) and "".join(cut.texts) == prefill)
        texts = (*next(earlier, (prefill,)), answer.content.removeprefix(prefill))
    noted = False
    while True:
        if len(texts) > 1:
            cut, noted = Cut(end, texts, nodes), True
            if cut not in above.cut:
                above.cut.append(cut)
        said = above.message
        if above.parent is None or said is None or not (said.content and continuable(said)):
            return noted
        texts, nodes, above = (said.content, *texts), (above, *nodes), above.parent


@dataclass(slots=True)
class Reached(Generic[T]):
    """Answers that a request holds in other pieces than they are recorded in."""

    _ends: dict[Node[T], tuple[int, int, Cut[T]]] = field(default_factory=dict)
    """And in which of its messages: `[start, end)`."""
    _due: dict[int, list[Node[T]]] = field(default_factory=dict)
    """By how many messages lead to them, those that are not yet taken."""

    def __bool__(self) -> bool:
        return bool(self._ends)

    @property
    def more(self) -> bool:
        """Whether later messages lead to any."""
        return bool(self._due)

    def take(self, upto: int, besides: Sequence[Node[T]]) -> list[Node[T]]:
        """Return those that so many messages lead to, without what these lead to as it is recorded."""
        return [node for node in self._due.pop(upto, ()) if node not in besides]

    def look(self, nodes: Sequence[Node[T]], messages: Sequence[Message], at: int, lenient: bool) -> None:
        """Find what the messages from `at` on lead to from nodes."""
        cuts = [cut for node in nodes for cut in node.cut]
        texts: list[str] = []
        for upto in range(at + 1, len(messages) + 1 if cuts else 0):
            message = messages[upto - 1]
            if message.role != "assistant":
                return
            texts.append(message.content)
            for cut in cuts:
                if (lenient or len(texts) == len(cut.nodes) == 1) and _holds(cut, texts, message, lenient):
                    self._ends[cut.end] = (at, upto, cut)
                    self._due.setdefault(upto, []).append(cut.end)
            if not continuable(message):
                return

    def divided(self, known: Sequence[Node[T]], messages: Sequence[Message]) -> list[Message]:
        """Return messages divided as the path that they follow is."""
        done = list(messages)
        for node in reversed(known):
            if node in self._ends and node.message is not None:
                start, end, cut = self._ends[node]
                above = [item.message for item in cut.nodes[:-1] if item.message is not None]
                done[start:end] = [*above, msgspec.structs.replace(messages[end - 1], content=node.message.content)]
        return done


def _holds(cut: Cut[T], texts: Sequence[str], last: Message, lenient: bool) -> bool:
    """Return whether messages, of which these are the texts and the last one, are an answer, divided otherwise."""
    said = cut.end.message
    if said is None or texts == [node.message.content for node in cut.nodes if node.message is not None]:
        return False
    if not _in_pieces(texts, cut.texts):
        return False
    whole = msgspec.structs.replace(last, content=said.content)
    reasoning, _ = split_thinking(whole)
    if reasoning != split_thinking(said)[0] and (reasoning or not lenient):
        return False
    same = (whole.tool_calls, whole.sealed) == (said.tool_calls, said.sealed)
    return same or identity(whole) == cut.end.key


__all__ = ["Reached", "note_cuts"]
