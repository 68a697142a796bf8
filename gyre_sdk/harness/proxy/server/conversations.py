"""Answers by name, for the protocol that refers to earlier ones: in flight, or recorded.

Names open within their run. Those of requests with `store: false` open nothing: these calls are on record, and retries
find them, but agents may not refer to them, as with other services.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import Answer, Choice, ModelRequest
from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.dialects.responses import Earlier, complete, from_fields, needs, response_id
from gyre_sdk.harness.proxy.dialects.responses.answer import item_status
from gyre_sdk.harness.proxy.server.hosted import spent_by
from gyre_sdk.harness.proxy.server.model_call import OPEN
from gyre_sdk.harness.proxy.server.protocols import RESPONSES
from gyre_sdk.harness.proxy.server.state import RequestRecord, RunState
from gyre_sdk.harness.proxy.server.turns import Turn
from gyre_sdk.journal import Journal, RecordedExchange
from gyre_sdk.records import CallRecord, CallStatus

_CANCELLED = "the response was cancelled"


class Conversations:
    """Finds the answers that `/v1/responses` refers to."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def complete(self, run: RunState, request: ModelRequest) -> ModelRequest:
        """Return a request with the conversation that it continues.

        Raises:
            ProtocolError: an answer that it names is not one of the run's.
        """
        names = needs(request)
        if not names:
            return request
        earlier: dict[str, Earlier] = {}
        for name in names:
            if name in run.named:
                await _over(run.named[name])
            found = await asyncio.to_thread(self._recorded, run, name)
            if found is not None and found[1].answer is not None:
                earlier[name] = Earlier(_request(found[1]), _choice(*found))
        return complete(request, earlier)

    async def show(self, run: RunState, name: str) -> bytes:
        """Return a response as it is now.

        Raises:
            ProtocolError: 404 when the run has no such response.
        """
        turn = run.named.get(name)
        if turn is not None and turn.calls and _kept(turn.request.fields):
            return in_progress(turn)
        found = await asyncio.to_thread(self._recorded, run, name)
        if found is None:
            raise ProtocolError(f"no response {response_id(name)!r} in this run", status=404, code="response_not_found")
        call, exchange = found
        request, at = _request(exchange), call.received_at
        if exchange.answer is not None:
            choice = _choice(call, exchange)
            return RESPONSES.snapshot(request, name, at, item_status(choice), [choice], None, len(call.prompt_ids))
        status = _STATUS.get(call.status, "in_progress")
        problem = ProtocolError(call.error or status, status=500, code="server_error") if status == "failed" else None
        return RESPONSES.snapshot(request, name, at, status, None, problem, 0)

    async def cancel(self, run: RunState, name: str) -> bytes:
        """End a response that is in flight; return it as it is then."""
        turn = run.named.get(name)
        if turn is not None and _kept(turn.request.fields):
            for call in turn.calls:
                call.cancel(_CANCELLED, "cancelled")
                await call.stopped()
        return await self.show(run, name)

    def _recorded(self, run: RunState, name: str) -> tuple[CallRecord, RecordedExchange] | None:
        call, exchange = self._journal.call(f"c-{name}"), self._journal.exchange(f"c-{name}")
        if call is None or exchange is None or call.run != run.run or exchange.request.get("dialect") != RESPONSES.name:
            return None
        return (call, exchange) if _kept(exchange.request["body"]) else None


def in_progress(turn: Turn) -> bytes:
    """Return a turn of this process as a response."""
    [call] = turn.calls
    if call.error is not None:
        cancelled = call.error.code == "cancelled"
        status, problem = ("cancelled", None) if cancelled else ("failed", call.error)
        return RESPONSES.snapshot(turn.request, turn.name, turn.at, status, None, problem, 0)
    if not call.done:
        return RESPONSES.snapshot(turn.request, turn.name, turn.at, "in_progress", None, None, 0)
    choice = call.choice()
    return RESPONSES.snapshot(turn.request, turn.name, turn.at, item_status(choice), [choice], None, turn.prompt_tokens)


_STATUS = {CallStatus.ABORTED: "cancelled", CallStatus.FAILED: "failed", **dict.fromkeys(OPEN, "in_progress")}


def _kept(fields: dict[str, Any]) -> bool:
    return fields.get("store") is not False


async def _over(turn: Turn) -> None:
    await turn.ready.wait()
    for call in turn.calls:
        await call.ended()


def _request(exchange: RecordedExchange) -> ModelRequest:
    record = msgspec.convert(exchange.request, RequestRecord)
    messages = tuple(msgspec.convert(exchange.messages, list[Message]))
    return replace(from_fields(record.body, exchange.raw), messages=messages, continues=None)


def _choice(call: CallRecord, exchange: RecordedExchange) -> Choice:
    said = msgspec.convert(exchange.answer, Message)
    answer = Answer(said.content, said.reasoning, said.tool_calls)
    return Choice(answer, call.finish_reason or "stop", len(call.sampled_ids) or spent_by(said)[1])
