"""Answers that agents send back as several messages: a text and its tool calls apart, each call with its result.

Many agents keep one message per block, or write a call's result behind it before the next call of the same answer.
Where all of these together are an answer on record, they are put together as it is; where they are not, they stay as
the agent wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import Message, in_call_order, split_thinking
from gyre_sdk.harness.proxy.dialects.message_trie import Node, steps

T = TypeVar("T")


def gather(nodes: Sequence[Node[T]], messages: list[Message], at: int, lenient: bool) -> list[Node[T]]:
    """Return what the answer leads to that messages from `at` on are together, if they are one.

    They are put together in `messages` then: the answer, then the results of its calls in the order of the calls.
    """
    below = [child.message for node in nodes for same in list(node.children.values()) for child in same]
    wanted = [message for message in below if message is not None and message.tool_calls]
    whole, results = Message("assistant"), list[Message]()
    for upto in range(at, len(messages)):
        message = messages[upto]
        if message.role == "tool" and message.tool_call_id in {call.id for call in whole.tool_calls}:
            results.append(message)
            continue
        if message.role != "assistant":
            break
        whole, wanted = _joined(whole, message, wanted)
        if not wanted:
            break
        found = [child for node in nodes for child in steps(node, whole, lenient)] if upto > at else []
        if found:
            end = upto + 1
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            messages[at:end] = in_call_order([whole, *results, *messages[upto + 1 : end]])
            return found
    return []


def _joined(whole: Message, piece: Message, wanted: Sequence[Message]) -> tuple[Message, list[Message]]:
    """Return an answer with one more piece, and those of the wanted ones that it may still become."""
    thought, said = split_thinking(piece)
    together = msgspec.structs.replace(
        whole,
        reasoning=whole.reasoning if thought == whole.reasoning else whole.reasoning + thought,
        tool_calls=whole.tool_calls + piece.tool_calls,
        extra=whole.extra | piece.extra,
        sealed=whole.sealed + piece.sealed,
    )
    for gap in ("", "\n") if whole.content and said else ("",):
        together = msgspec.structs.replace(together, content=whole.content + gap + said)
        left = [message for message in wanted if _begins(message, together)]
        if left:
            return together, left
    return together, []


def _begins(message: Message, start: Message) -> bool:
    names = [call.name for call in start.tool_calls]
    begins = [call.name for call in message.tool_calls[: len(names)]] == names
    return begins and split_thinking(message)[1].startswith(start.content)


__all__ = ["gather"]
