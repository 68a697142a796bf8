"""Gives a turn's answer to a connection: whole, or as a stream while it is sampled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from gyre_sdk.harness.proxy.dialects import AnswerStream, Dialect, TokenText
from gyre_sdk.harness.proxy.server.connections import BUFFERED, SlowClient, abort, send, send_end
from gyre_sdk.harness.proxy.server.model_call import ModelCall
from gyre_sdk.harness.proxy.server.turns import Turn

_JSON = {"Content-Type": "application/json"}
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nDate: %s\r\nServer: %s\r\n\r\n"
_SSE = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _OneWrite(web.StreamResponse):
    """A whole JSON answer over a connection that is kept: one write, without the general way's headers and checks."""

    keep_alive = True

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._data: bytes | None = (
            _HEAD % (len(body), rfc822_formatted_time().encode(), SERVER_SOFTWARE.encode()) + body
        )

    async def prepare(self, request: web.BaseRequest) -> None:
        """See `web.StreamResponse`."""
        data, self._data = self._data, None
        if data is None:
            return
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the agent closed the connection")
        request.transport.write(data)

    async def write_eof(self, data: bytes = b"") -> None:
        """See `web.StreamResponse`."""


class Delivery:
    """Sends answers.

    Args:
        heartbeat: seconds of silence after which a streaming agent gets a sign of life.
        patience: seconds that a connection may leave an answer unread.
    """

    def __init__(self, heartbeat: float, patience: float) -> None:
        self._heartbeat = heartbeat
        self._patience = patience

    async def whole(self, request: web.Request, dialect: Dialect, turn: Turn) -> web.StreamResponse:
        """Send the whole answer when all calls have ended.

        Raises:
            ProtocolError: a call failed.
        """
        for call in turn.calls:
            await call.ended()
        _raise_failure(turn.calls)
        choices = [call.choice() for call in turn.calls]
        body = dialect.body(turn.request, turn.name, turn.at, choices, turn.prompt_tokens)
        if request.version == HttpVersion11 and request.keep_alive and len(body) < BUFFERED:
            one = _OneWrite(body)
            await one.prepare(request)
            _note_delivery(request, turn)
            return one
        response = web.Response(body=body, headers=_JSON)
        await response.prepare(request)  # nothing is sent before the end
        try:
            await send_end(response, self._patience)
        except SlowClient:
            abort(request)
        else:
            _note_delivery(request, turn)
        return response

    async def streamed(self, request: web.Request, dialect: Dialect, turn: Turn) -> web.StreamResponse:
        """Send the answer as it comes.

        Raises:
            ProtocolError: a call failed before anything was sent.
        """
        stream = dialect.stream(turn.request, turn.name, turn.at)
        response = web.StreamResponse(headers=_SSE)
        for call in turn.calls:
            call.watchers += 1
        try:
            await self._wait_for_start(turn)
            await response.prepare(request)
            if await self._relay(request, response, stream, turn):
                _note_delivery(request, turn)
        except ConnectionError:
            abort(request)
        finally:
            for call in turn.calls:
                call.watchers -= 1
                if call.done and not call.watchers:
                    call.compact()
        return response

    async def _wait_for_start(self, turn: Turn) -> None:
        """Hold the status line back until there is something to say, so that early failures are plain HTTP errors."""
        deadline = time.monotonic() + self._heartbeat
        while not any(call.begun or call.done for call in turn.calls):
            left = deadline - time.monotonic()
            if left <= 0 or not await _first([call.changes() for call in turn.calls], left):
                return
        _raise_failure(turn.calls)

    async def _relay(
        self, request: web.Request, response: web.StreamResponse, stream: AnswerStream, turn: Turn
    ) -> bool:
        """Send what the calls release until all have ended; True for a good end."""
        head = stream.start(turn.prompt_tokens)
        shown, tokens, finished = [0] * len(turn.calls), [0] * len(turn.calls), [False] * len(turn.calls)
        while True:
            changed = [call.changes() for call in turn.calls]
            out, head = [head], b""
            for index, call in enumerate(turn.calls):
                if call.error is not None:
                    await send(request, response, b"".join(out) + stream.error(call.error), self._patience)
                    await send_end(response, self._patience)
                    return False
                if finished[index]:
                    continue
                call.advance()
                said = call.deltas
                fresh, shown[index] = said[shown[index] :], len(said)
                if call.done:
                    finished[index] = True
                    rest = _tokens(call, tokens[index], call.sampled)
                    out.append(stream.deltas(index, fresh) + stream.finish(index, call.choice(), rest))
                elif fresh:
                    out.append(stream.deltas(index, fresh, _tokens(call, tokens[index], call.heard)))
                    tokens[index] = call.heard
            if all(finished):
                sampled = sum(call.sampled for call in turn.calls)
                out.append(stream.end(turn.prompt_tokens, sampled))
                await send(request, response, b"".join(out), self._patience)
                await send_end(response, self._patience)
                return True
            if any(out):
                await send(request, response, b"".join(out), self._patience)
            if not await _first(changed, self._heartbeat):
                await send(request, response, stream.heartbeat(), self._patience)


def _tokens(call: ModelCall, start: int, end: int) -> tuple[TokenText, ...]:
    return call.token_texts(start, end) if call.request.logprobs and end > start else ()


def _note_delivery(request: web.Request, turn: Turn) -> None:
    transport = request.transport
    if transport is None or transport.is_closing():
        return
    turn.delivered = True
    for call in turn.calls:
        call.delivered()


def _raise_failure(calls: Sequence[ModelCall]) -> None:
    for call in calls:
        if call.error is not None:
            raise call.error


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
