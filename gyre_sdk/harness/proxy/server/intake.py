"""From a request to its turn: an earlier one that it repeats, or a new one with fresh calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Dialect, ModelRequest
from gyre_sdk.harness.proxy.server.conduct import LiveCall, Services
from gyre_sdk.harness.proxy.server.conversations import Conversations
from gyre_sdk.harness.proxy.server.model_call import ModelCall
from gyre_sdk.harness.proxy.server.orphans import close_attempts, revive
from gyre_sdk.harness.proxy.server.prepare import OFF_LOOP, new_turn, prepare, track
from gyre_sdk.harness.proxy.server.protocols import RESPONSES
from gyre_sdk.harness.proxy.server.state import Lane, Orphan, RunState, body_digest
from gyre_sdk.harness.proxy.server.turns import Turn, repeated


class Asked(msgspec.Struct, frozen=True):
    """A request as it came."""

    lane: Lane
    """That the key opens."""
    dialect: Dialect
    body: bytes
    """Decompressed."""
    connection: object
    """Transport that waits for the answer."""
    retry: bool = False
    """Whether the client says that it repeats an earlier request."""
    key: str | None = None
    """`Idempotency-Key`."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """As sent, keys included."""


class Intake:
    """Finds or makes turns."""

    def __init__(self, services: Services, conversations: Conversations) -> None:
        self._services = services
        self._conversations = conversations

    async def turn(self, asked: Asked) -> Turn:
        """Return the turn of a request; its calls run.

        Raises:
            ProtocolError: the request cannot be honoured.
        """
        request = await self.parse(asked.dialect, asked.body)
        lane, run = asked.lane, asked.lane.run
        place = (lane.record.lane, f"{asked.dialect.name}:{body_digest(asked.body)}")
        turns = run.turns[place]
        self._adopt(lane, place, request)
        key = body_digest(asked.key.encode(errors="surrogateescape")) if asked.key else ""
        keyed = run.keyed.get((lane.record.lane, key)) if key else None
        same_key = keyed is not None and keyed in turns
        turn = repeated([keyed] if same_key and keyed else turns, retry=same_key or asked.retry)
        if turn is not None:
            self._resume(lane, turn)
            how = "replayed" if turn.calls and all(call.done for call in turn.calls) else "coalesced"
            self._services.metrics.retries.add(how)
            return turn
        if run.closed:
            _forget(run, place)
            raise run.refusal()
        turn = new_turn(request)
        turn.key = key
        turn.connections.add(asked.connection)
        turns.append(turn)
        if key:
            run.keyed[(lane.record.lane, key)] = turn
        try:
            if asked.dialect is RESPONSES:
                turn.request = await self._conversations.complete(run, request)
            await prepare(self._services, lane, turn, place[1], len(asked.body), asked.headers)
            if run.closed:
                raise run.refusal()  # it was closed meanwhile: nothing would end these calls
        except ProtocolError as error:
            turn.problem = error
            _forget(run, place, turn)
        except BaseException:
            turn.problem = ProtocolError("internal error", status=500, code="internal_error", retryable=True)
            _forget(run, place, turn)
            turn.ready.set()  # whoever repeats the request meanwhile must not wait for ever
            raise
        else:
            run.named[turn.name] = turn
            for call in turn.calls:
                self._start(lane, call)
        turn.ready.set()
        return turn

    async def parse(self, dialect: Dialect, body: bytes) -> ModelRequest:
        """Return a body's request; large bodies are parsed in a thread."""
        return await asyncio.to_thread(dialect.parse, body) if len(body) > OFF_LOOP else dialect.parse(body)

    def _adopt(self, lane: Lane, place: tuple[str, str], request: ModelRequest) -> None:
        """Make turns of what a process that died left for this body."""
        groups: dict[str, list[Orphan]] = {}
        for orphan in lane.run.orphans.pop(place, []):
            groups.setdefault(orphan.request.turn, []).append(orphan)
        for group in groups.values():
            turn = revive(self._services, request, group)
            lane.run.turns[place].append(turn)
            lane.run.named[turn.name] = turn
            if turn.key:
                lane.run.keyed[(lane.record.lane, turn.key)] = turn

    def _resume(self, lane: Lane, turn: Turn) -> None:
        """Start the open calls of a turn that another process left."""
        for call in turn.calls:
            if call.left_open:
                if isinstance(call, LiveCall):
                    close_attempts(self._services, call)
                self._start(lane, call)

    def _start(self, lane: Lane, call: ModelCall) -> None:
        run = lane.run
        track(run, call)
        run.live.add(call)
        call.start(lambda: run.live.discard(call))


def _forget(run: RunState, place: tuple[str, str], turn: Turn | None = None) -> None:
    """Keep nothing of a request that came to nothing: an agent may send any number of them."""
    turns = run.turns[place]
    if turn is not None:
        turns.remove(turn)
        run.keyed = {key: kept for key, kept in run.keyed.items() if kept is not turn} if turn.key else run.keyed
    if not turns:
        del run.turns[place]
