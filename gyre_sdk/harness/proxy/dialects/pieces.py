"""Answers that agents send back in other pieces than they were recorded in.

An answer may continue text of the assistant's that the request ended with: a prefill, which opens no turn of its own,
or a message, which does. Agents keep the two as two messages, as blocks of one, or put them together. All of these are
the same answer, so they lead to what was recorded of it; a text that was cut anywhere else leads nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import Message, identity, split_thinking
from gyre_sdk.harness.proxy.dialects.message_trie import Cut, Node
from gyre_sdk.harness.proxy.dialects.prefill import continuable

T = TypeVar("T")
Reached = dict[Node[T], tuple[int, int, Cut[T]]]
"""Answers that a request holds in other pieces, and in which of its messages: `[start, end)`."""


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


def reach(reached: Reached[T], nodes: Sequence[Node[T]], messages: Sequence[Message], at: int, lenient: bool) -> None:
    """Add the answers that the messages from `at` on hold in other pieces than they are recorded in."""
    cuts = [cut for node in nodes for cut in node.cut]
    texts: list[str] = []
    for upto, message in enumerate(messages[at:] if cuts else (), at + 1):
        if message.role != "assistant":
            return
        texts.append(message.content)
        for cut in cuts:
            said = cut.end.message
            if said is None or texts == [node.message.content for node in cut.nodes if node.message is not None]:
                continue  # as recorded
            if not lenient and not len(texts) == len(cut.nodes) == 1:
                continue  # what the model is shown is divided otherwise
            whole = msgspec.structs.replace(message, content=said.content)
            if _in_pieces(texts, cut.texts) and _alike(cut.end, said, whole, lenient):
                reached[cut.end] = (at, upto, cut)
        if not continuable(message):
            return


def _alike(node: Node[T], known: Message, message: Message, lenient: bool) -> bool:
    reasoning, _ = split_thinking(message)
    thought = reasoning == split_thinking(known)[0] or (lenient and not reasoning)
    return thought and identity(message) == node.key


def divided(known: Sequence[Node[T]], messages: Sequence[Message], reached: Reached[T]) -> list[Message]:
    """Return messages divided as the path that they follow is."""
    done = list(messages)
    for node in reversed(known):
        if node in reached:
            start, end, cut = reached[node]
            above = [item.message for item in cut.nodes[:-1] if item.message is not None]
            said = node.message.content if node.message is not None else ""
            done[start:end] = [*above, msgspec.structs.replace(messages[end - 1], content=said)]
    return done


__all__ = ["Reached", "divided", "note_cuts", "reach"]
