"""What a run has recorded, as an index that new requests are matched against.

The index is a trie of messages over a store of token ids. Messages find the recorded answer that a request
continues; tokens decide. The trie never changes ids, and nothing here decides what is sent to an engine.

Rules for a match: the longest recorded prefix wins; among equal ones an answer of the same lane, then the newest.
An assistant message sent back without its reasoning matches when asked to be `lenient` (history = bridge), else only
as it was. So does an answer that continues text of the assistant's, where the agent sends the two as one message or as
two and they were recorded otherwise (see `pieces`); and one whose text and calls come as several messages (see
`gathered`).

Costs per request: a message that is sent again as it was is compared, not hashed; of the recorded tokens each is
compared with the prompt at most once, however many calls hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from gyre_sdk.errors import TreeError
from gyre_sdk.harness.proxy.dialects.canonical import Message, identity, tools_identity
from gyre_sdk.harness.proxy.dialects.gathered import gather
from gyre_sdk.harness.proxy.dialects.message_trie import Node, descend, path, steps
from gyre_sdk.harness.proxy.dialects.pieces import Reached, note_cuts
from gyre_sdk.records import ForkReason

Ids = npt.NDArray[np.int32]
_LONG = 4096
"""Ids of which the JSON is kept: writing it takes longer than all else that a call's new tokens take."""
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Recorded:
    """A complete call's tokens."""

    call: str
    lane: str
    order: int
    prompt_len: int
    whole: Ids
    """Prompt + sampled ids. Calls of one chain share one buffer, so a chain of T tokens takes O(T) memory."""
    parent: Recorded | None
    shared: int
    """Leading ids that it shares with its parent's `whole`, at least."""
    extends: bool
    """Whether its prompt begins with all of its parent's `whole`."""
    extended: bool = False
    """Whether another call extends it."""
    text: bytes = b""
    """`whole` as JSON without brackets: of long ones, until another call extends it."""


class Match(msgspec.Struct, frozen=True):
    """What a request continues."""

    recorded: Recorded | None
    """The call whose answer the request repeats last, or None."""
    consumed: int
    """Leading `messages` that the recorded path covers, the answer included."""
    messages: tuple[Message, ...]
    """The request's messages, recorded ones in their recorded form (arguments, reasoning, ids, division)."""
    found: int
    """Leading `messages` that any recorded request or answer shares."""


class Origin(msgspec.Struct, frozen=True):
    """Where a prompt's ids come from."""

    parent: Recorded | None
    shared: int
    """Leading tokens shared with the parent's `whole`."""
    fork: ForkReason | None
    prompt: Ids
    """The prompt's ids."""


class History:
    """The recorded exchanges of one run. One thread adds; another may match meanwhile and sees a little less."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node[Recorded]] = {}
        self._calls: dict[str, Recorded] = {}
        self._last: dict[str, dict[bytes, tuple[Message, ...]]] = {}
        """By lane: the last request with each list of tools, the newest last."""
        self._cut = False
        """Whether any answer may come in other pieces."""

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, call: str) -> Recorded | None:
        """Return a recorded call."""
        return self._calls.get(call)

    def match(
        self, lane: str, tools: Sequence[dict[str, object]], messages: Sequence[Message], *, lenient: bool = True
    ) -> Match:
        """Return the longest recorded path that the messages begin with."""
        root = self._roots.get(tools_identity(tools))
        frontier = [root] if root else []
        deepest, best, found = frontier, frontier[:0], 0
        reached: Reached[Recorded] = Reached()
        messages, at = list(messages), 0
        while at < len(messages):
            message = messages[at]
            stepped = [child for node in frontier for child in steps(node, message, lenient)]
            if self._cut:
                if message.role == "assistant":
                    reached.look(frontier, messages, at, lenient)
                stepped += reached.take(at + 1, stepped)
            if not stepped and not reached.more and message.role == "assistant":
                stepped = gather(frontier, messages, at, lenient)
            at, frontier = at + 1, stepped
            if frontier:
                deepest, found = frontier, at
                best = [node for node in frontier if node.answers] or best
            elif not reached.more:
                break
        ends = [(answer.lane == lane, answer.order, answer, node) for node in best for answer in node.answers]
        recorded, end = max(ends, key=lambda item: item[:2])[2:] if ends else (None, None)
        known = path(end if end is not None else max(deepest, key=_newest) if deepest else None)
        shown = reached.divided(known, messages) if reached else messages
        return Match(
            recorded,
            end.depth if end is not None else 0,
            _restored([node.message for node in known if node.message is not None], shown),
            found + len(shown) - len(messages),
        )

    def add(
        self,
        call: str,
        lane: str,
        tools: Sequence[dict[str, object]],
        messages: Sequence[Message],
        answer: Message,
        prompt_ids: Sequence[int] | Ids,
        sampled_ids: Sequence[int],
        parent: str | None,
        shared: int,
        text: bytes = b"",
        prefill: str = "",
    ) -> None:
        """Record a complete call; `messages` in the form that `match` gave, `text` the prompt's if it is worth keeping.

        An answer that continues a prefill begins with it.

        Raises:
            TreeError: the parent is not recorded or does not share that many tokens.
        """
        above = self._calls.get(parent) if parent else None
        if parent and (above is None or shared > len(above.whole)):
            raise TreeError(f"call {call} shares {shared} tokens with call {parent}, which does not have them")
        whole = np.concatenate([np.asarray(prompt_ids, np.int32), np.asarray(sampled_ids, np.int32)])
        extends = above is not None and shared == len(above.whole)
        record = Recorded(call, lane, len(self._calls), len(prompt_ids), whole, above, shared, extends)
        if len(whole) >= _LONG and text:
            record.text = b",".join((text, _encode(sampled_ids)[1:-1])) if len(sampled_ids) else text
        self._calls[call] = record
        key = tools_identity(tools)
        node = self._roots.setdefault(key, Node(None, None, 0))
        for message in (*messages, answer):
            node = descend(node, message)
        node.answers.append(record)
        if prefill or (messages and messages[-1].role == "assistant"):
            self._cut = note_cuts(node, answer, prefill) or self._cut
        seen = self._last.setdefault(lane, {})
        seen.pop(key, None)
        seen[key] = tuple(messages)
        while record.extends and record.parent is not None:
            record = record.parent
            record.extended, record.text = True, b""
            record.whole = whole[: len(record.whole)]

    def origin(
        self,
        lane: str,
        tools: Sequence[dict[str, object]],
        messages: Sequence[Message],
        match: Match,
        prompt_ids: Sequence[int] | Ids,
    ) -> Origin:
        """Return the recorded call that shares most with a prompt, and why the prompt forks from it if it does.

        A prompt that continues its match with messages of others is that call's child. One that holds what the agent
        wrote in the model's place may share more with another call: the one whose answer was edited.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        own_words = any(item.role == "assistant" for item in messages[match.consumed :])
        if match.recorded is not None and not own_words:
            shared = _common(match.recorded.whole, prompt)
            if shared == len(match.recorded.whole):
                return Origin(match.recorded, shared, None, prompt)
        elif match.recorded is None and lane not in self._last:
            return Origin(None, 0, None, prompt)
        shared, nearest = self._nearest(lane, prompt)
        if nearest is None:
            return Origin(None, 0, None, prompt)
        if shared == len(nearest.whole):
            return Origin(nearest, shared, None, prompt)
        return Origin(nearest, shared, self._why(lane, tools, messages, match, own_words), prompt)

    def _nearest(self, lane: str, prompt: Ids) -> tuple[int, Recorded | None]:
        """Return the call that shares most leading tokens with a prompt; its own lane's, then the newest, wins a tie."""
        common: dict[str, int] = {}
        best: tuple[int, bool, int] = (-1, False, 0)
        nearest: Recorded | None = None
        for record in list(self._calls.values()):
            start = 0
            if record.parent is not None:
                start = record.shared
                above = common[record.parent.call]
            if record.parent is not None and above < start:
                common[record.call] = above
            else:
                common[record.call] = start + _common(record.whole[start:], prompt[start:])
            rank = (common[record.call], record.lane == lane, record.order)
            if not record.extended and rank > best:
                best, nearest = rank, record
        if nearest is None:
            return 0, None
        shared = best[0]
        while nearest.extends and nearest.parent is not None and len(nearest.parent.whole) >= shared:
            nearest = nearest.parent
        return shared, nearest

    def _why(
        self,
        lane: str,
        tools: Sequence[dict[str, object]],
        messages: Sequence[Message],
        match: Match,
        own_words: bool,
    ) -> ForkReason:
        key, known = tools_identity(tools), self._last.get(lane, {})
        if match.recorded is not None and not own_words:
            return ForkReason.TEMPLATE
        if not messages:
            return ForkReason.UNKNOWN  # a prompt without messages says nothing about them
        if match.found == len(messages):
            return ForkReason.RETRY
        if known and key not in known:
            return ForkReason.TOOLS_CHANGED
        before = known.get(key, ())
        if not before:
            return ForkReason.UNKNOWN
        systems = [[identity(item) for item in side if item.role == "system"][:1] for side in (before, messages)]
        if systems[0] != systems[1]:
            return ForkReason.SYSTEM_CHANGED
        if len(before) > 2 and len(messages) <= len(before) and _left_out(before, messages, match.found):
            return ForkReason.COMPACTION
        return ForkReason.CLIENT_EDIT


def ids_text(prompt: Ids, parent: Recorded | None = None) -> bytes:
    """Return a prompt's ids as JSON without brackets; what a parent that it extends has of it is copied."""
    if parent is not None and parent.text:
        new = prompt[len(parent.whole) :]
        return b",".join((parent.text, _encode(new.tolist())[1:-1])) if len(new) else parent.text
    return _encode(prompt.tolist())[1:-1]


def _left_out(before: Sequence[Message], messages: Sequence[Message], found: int) -> bool:
    """Return whether messages go on with something other than the model's words, or with later ones of before."""
    if messages[found].role != "assistant":
        return True
    later = {identity(item) for item in before[found + 1 :]}
    return identity(messages[found]) in later


def _restored(known: Sequence[Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages with the recorded ones in their recorded form.

    What was recorded wins, what the agent added stays on record. Where the agent gave tool calls ids of its own, the
    results that follow get the recorded ids back.
    """
    ids: dict[str, str] = {}
    done: list[Message] = []
    for place, message in enumerate(messages):
        result = ids.get(message.tool_call_id, message.tool_call_id)
        if place < len(known):
            old = known[place]
            if old.tool_calls:
                ids |= {new.id: call.id for call, new in zip(old.tool_calls, message.tool_calls, strict=True) if new.id}
            if old.tool_call_id != result or old.extra != message.extra:
                old = msgspec.structs.replace(old, tool_call_id=result, extra=message.extra)
            done.append(old)
        elif result != message.tool_call_id:
            done.append(msgspec.structs.replace(message, tool_call_id=result))
        else:
            done.append(message)
    return tuple(done)


def _newest(node: Node[Recorded]) -> int:
    return max((answer.order for answer in node.answers), default=-1)


def _common(left: Ids, right: Ids) -> int:
    """Return how many leading ids are equal, looking little further than that."""
    size, at, step = min(len(left), len(right)), 0, 256
    while at < size:
        same = left[at : min(at + step, size)] == right[at : min(at + step, size)]
        if not same.all():
            return at + int(np.argmin(same))
        at, step = at + step, step * 4
    return size


__all__ = ["History", "Ids", "Match", "Origin", "Recorded", "ids_text"]
