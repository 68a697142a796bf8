"""The HTTP face for agents: authenticate, find the turn, deliver its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiohttp import web

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Dialect, ModelRequest, TokenText
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.server.bodies import read_body
from gyre_sdk.harness.proxy.server.conduct import LiveCall, Services
from gyre_sdk.harness.proxy.server.prepare import (
    OFF_LOOP,
    close_attempts,
    new_turn,
    prepare,
    revive,
    track,
)
from gyre_sdk.harness.proxy.server.state import OPEN, Lane, Orphan, Registry, body_digest
from gyre_sdk.harness.proxy.server.turns import Turn, repeated

_JSON = {"Content-Type": "application/json"}
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Agents:
    """Handlers under `/v1`."""

    def __init__(self, services: Services, registry: Registry) -> None:
        self._services = services
        self._registry = registry
        self._chat = ChatCompletions()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [web.post("/v1/chat/completions", self.chat), web.get("/v1/models", self.models)]

    async def models(self, request: web.Request) -> web.Response:
        """List the one model."""
        await self._registry.lane(bearer(request))
        model = {"id": self._services.settings.model_name, "object": "model", "created": 0, "owned_by": "gyre"}
        return web.json_response({"object": "list", "data": [model]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Serve `POST /v1/chat/completions`."""
        return await self._serve(request, self._chat)

    async def _serve(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        lane = (await self._registry.lane(bearer(request))).serving
        body = await read_body(request, self._services.settings.max_body)
        turn = await self._turn(request, lane, dialect, body)
        turn.connections.add(request.transport)
        try:
            await turn.ready.wait()
            if turn.problem is not None:
                raise turn.problem
            if turn.request.stream:
                return await self._stream(request, dialect, turn)
            return await self._whole(request, dialect, turn)
        finally:
            turn.connections.discard(request.transport)

    # -- turns -------------------------------------------------------------------------------------------------------

    async def _turn(self, request: web.Request, lane: Lane, dialect: Dialect, body: bytes) -> Turn:
        run, digest = lane.run, body_digest(body)
        parsed = await asyncio.to_thread(dialect.parse, body) if len(body) > OFF_LOOP else dialect.parse(body)
        place = (lane.record.lane, digest)
        token = request.headers.get("Idempotency-Key")
        keyed = run.keyed.get((lane.record.lane, token)) if token else None
        turns = run.turns[place]
        self._adopt(lane, place, parsed)
        count = request.headers.get("x-stainless-retry-count", "0")
        same_key = keyed is not None and keyed in turns
        turn = repeated([keyed] if same_key and keyed else turns, retry=same_key or count not in ("0", ""))
        if turn is not None:
            self._resume(lane, turn)
            return turn
        if run.closed:
            raise ProtocolError("the run is closed: it takes no more calls", status=403, code="run_closed")
        turn = new_turn(parsed)
        turn.connections.add(request.transport)
        turns.append(turn)
        if token:
            run.keyed[(lane.record.lane, token)] = turn
        try:
            await prepare(self._services, lane, turn, digest, len(body))
        except ProtocolError as error:
            turn.problem = error
            turns.remove(turn)
        else:
            for call in turn.calls:
                self._start(lane, call)
        turn.ready.set()
        return turn

    def _adopt(self, lane: Lane, place: tuple[str, str], request: ModelRequest) -> None:
        """Make turns of what a process that died left for this body."""
        groups: dict[str, list[Orphan]] = {}
        for orphan in lane.run.orphans.pop(place, []):
            groups.setdefault(orphan.request.turn, []).append(orphan)
        for group in groups.values():
            lane.run.turns[place].append(revive(self._services, request, group))

    def _resume(self, lane: Lane, turn: Turn) -> None:
        """Start the open calls of a turn that another process left."""
        for call in turn.calls:
            if call.exchange.resumed and call.exchange.status in OPEN and not call.started:
                close_attempts(self._services, call)
                self._start(lane, call)

    def _start(self, lane: Lane, call: LiveCall) -> None:
        run = lane.run
        track(run, call)
        run.live.add(call)
        call.start(lambda: run.live.discard(call))

    # -- delivery ----------------------------------------------------------------------------------------------------

    async def _whole(self, request: web.Request, dialect: Dialect, turn: Turn) -> web.StreamResponse:
        for call in turn.calls:
            await call.ended()
        _raise_failure(turn.calls)
        choices = [call.choice() for call in turn.calls]
        body = dialect.body(turn.request, turn.name, turn.at, choices, turn.calls[0].prompt_tokens)
        response = web.Response(body=body, headers=_JSON)
        await response.prepare(request)
        await response.write_eof()
        self._note_delivery(request, turn)
        return response

    async def _stream(self, request: web.Request, dialect: Dialect, turn: Turn) -> web.StreamResponse:
        stream = dialect.stream(turn.request, turn.name, turn.at)
        response = web.StreamResponse(headers=_SSE)
        for call in turn.calls:
            call.watchers += 1
        try:
            await self._wait_for_start(request, response, turn)
            await response.write(stream.start(turn.calls[0].prompt_tokens))
            if await self._relay(response, stream, turn):
                self._note_delivery(request, turn)
        except ConnectionError:
            pass  # the agent went away; its calls go on
        finally:
            for call in turn.calls:
                call.watchers -= 1
        return response

    async def _wait_for_start(self, request: web.Request, response: web.StreamResponse, turn: Turn) -> None:
        """Hold the status line back until there is something to say, so that early failures are plain HTTP errors."""
        deadline = time.monotonic() + self._services.settings.heartbeat
        while not any(call.exchange.released or call.done for call in turn.calls):
            if time.monotonic() >= deadline or not await self._change(turn, deadline - time.monotonic()):
                break
        _raise_failure(turn.calls)
        await response.prepare(request)

    async def _relay(self, response: web.StreamResponse, stream: AnswerStream, turn: Turn) -> bool:
        """Send what the calls release until all have ended; True for a good end."""
        shown, tokens, finished = [0] * len(turn.calls), [0] * len(turn.calls), [False] * len(turn.calls)
        while True:
            changed = [call.changes() for call in turn.calls]
            out: list[bytes] = []
            for index, call in enumerate(turn.calls):
                if call.error is not None:
                    await response.write(b"".join(out) + stream.error(call.error))
                    await response.write_eof()
                    return False
                if finished[index]:
                    continue
                call.advance()
                fresh, shown[index] = call.deltas[shown[index] :], len(call.deltas)
                if call.done:
                    finished[index] = True
                    rest = self._tokens(call, tokens[index], len(call.exchange.ids))
                    out.append(stream.deltas(index, fresh) + stream.finish(index, call.choice(), rest))
                elif fresh:
                    out.append(stream.deltas(index, fresh, self._tokens(call, tokens[index], call.parsed)))
                    tokens[index] = call.parsed
            if all(finished):
                sampled = sum(len(call.exchange.ids) for call in turn.calls)
                out.append(stream.end(turn.calls[0].prompt_tokens, sampled))
                await response.write(b"".join(out))
                await response.write_eof()
                return True
            if any(out):
                await response.write(b"".join(out))
            if not await _first(changed, self._services.settings.heartbeat):
                await response.write(stream.heartbeat())

    def _tokens(self, call: LiveCall, start: int, end: int) -> tuple[TokenText, ...]:
        return call.token_texts(start, end) if call.request.logprobs and end > start else ()

    async def _change(self, turn: Turn, seconds: float) -> bool:
        return await _first([call.changes() for call in turn.calls], seconds)

    def _note_delivery(self, request: web.Request, turn: Turn) -> None:
        transport = request.transport
        if transport is None or transport.is_closing():
            return
        turn.delivered = True
        for call in turn.calls:
            call.delivered()


async def _first(events: Sequence[asyncio.Event], seconds: float) -> bool:
    """Wait for any of several events; False when none came in time."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            if len(events) == 1:
                await events[0].wait()
                return True
            tasks = [asyncio.ensure_future(event.wait()) for event in events]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            return True
    except TimeoutError:
        return False


def bearer(request: web.Request) -> str:
    """Return the key that a request carries, or an empty string."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return request.headers.get("x-api-key") or request.headers.get("api-key") or ""


def _raise_failure(calls: Sequence[LiveCall]) -> None:
    for call in calls:
        if call.error is not None:
            raise call.error
