"""The control API under `/gyre/v1`, for SDKs and the trainer, guarded by the service key."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from gyre_sdk.errors import JournalError, ProtocolError, SettingsError
from gyre_sdk.harness.proxy.lanes.loading import load_classifier
from gyre_sdk.harness.proxy.recorder import durable
from gyre_sdk.harness.proxy.server.agents import bearer
from gyre_sdk.harness.proxy.server.bodies import read_struct
from gyre_sdk.harness.proxy.server.budgets import Limits, Prices, Spent, final_status
from gyre_sdk.harness.proxy.server.conduct import Services
from gyre_sdk.harness.proxy.server.lane_states import LaneOpened, LaneReleased, RunClosed, write_event
from gyre_sdk.harness.proxy.server.model_call import OPEN
from gyre_sdk.harness.proxy.server.orphans import abort_orphan
from gyre_sdk.harness.proxy.server.registry import Registry
from gyre_sdk.harness.proxy.server.replicas import ReplicaControl, describe
from gyre_sdk.harness.proxy.server.settings import new_key
from gyre_sdk.harness.proxy.server.state import Lane, RunState, key_digest, new_lane_id, new_run_id
from gyre_sdk.records import MAIN, SUBAGENT, GroupId, LaneId, LaneRecord, RunId, RunRecord, RunStatus
from gyre_sdk.settings import SERVICE_KEY
from gyre_sdk.steering import HEADER, Steering

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/runs`."""

    task: str
    group: str | None = None
    member: int = 0
    split: str = "train"
    metadata: dict[str, Any] = {}
    owner: str = ""
    dispatch_version: int | None = None
    """None takes the newest version that a replica serves."""
    limits: Limits = Limits()
    classifier: str = ""
    """Preset or import path that tells the lanes of an agent with one key for everything; empty: one lane per key."""


class OpenLane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/runs/{run}/lanes`."""

    role: str = SUBAGENT
    name: str = ""
    parent: str | None = None
    takes_over: bool = False
    """Send calls made with the parent's key to this lane until it is released."""
    limits: Limits = Limits()
    """Budgets of the lane with all lanes below it; a call beyond one is refused, and the run goes on."""


class CloseRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/runs/{run}/close`."""

    seconds: float = 0.0
    """How long calls in flight may go on."""


class FinishRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/runs/{run}/finish`."""

    status: RunStatus = RunStatus.COMPLETED
    reward: float | None = None
    """None: the run is unscored, which is not 0."""
    parts: dict[str, float] = {}
    error: str | None = None
    placeholder: bool = False
    seconds: float = 0.0
    """How long calls in flight may go on."""


class EndRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/runs/{run}/end`."""

    status: RunStatus
    reward: float | None = None
    parts: dict[str, float] = {}
    error: str | None = None
    placeholder: bool = False


class Control:
    """Handlers under `/gyre/v1`."""

    def __init__(self, services: Services, registry: Registry, service_key: str) -> None:
        self._services = services
        self._registry = registry
        self._service_key = service_key
        self._steering = Steering()
        self.url = ""
        """Base address that agents are given."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/gyre/v1/runs", self.guarded(self.open_run)),
            web.get("/gyre/v1/runs/{run}", self.guarded(self.show_run)),
            web.post("/gyre/v1/runs/{run}/lanes", self.guarded(self.open_lane)),
            web.post("/gyre/v1/runs/{run}/lanes/{lane}/release", self.guarded(self.release_lane)),
            web.post("/gyre/v1/runs/{run}/lanes/{lane}/revoke", self.guarded(self.revoke_lane)),
            web.post("/gyre/v1/runs/{run}/close", self.guarded(self.close_run)),
            web.post("/gyre/v1/runs/{run}/end", self.guarded(self.end_run)),
            web.post("/gyre/v1/runs/{run}/finish", self.guarded(self.finish_run)),
            web.get("/gyre/v1/status", self.guarded(self.status)),
            *ReplicaControl(self._services.fleet, self.guarded).routes(),
            web.get("/gyre/v1/calls", self.guarded(self.calls)),
        ]

    async def open_run(self, request: web.Request) -> web.Response:
        """Open a run and its main lane; both are durable before the answer."""
        given = await self._body(request, OpenRun)
        settings = self._services.settings
        self._check(given.limits)
        classifier, named = None, given.classifier or settings.classifier
        if named:
            try:
                classifier = load_classifier(named)
            except SettingsError as error:
                raise ProtocolError(str(error), param="classifier") from error
        now, run, lane, key = time.time(), new_run_id(settings), new_lane_id(), new_key()
        version = self._services.fleet.routes.version if given.dispatch_version is None else given.dispatch_version
        limits = {name: value for name, value in msgspec.structs.asdict(given.limits).items() if value is not None}
        record = RunRecord(
            run=run,
            task=given.task,
            created_at=now,
            group=GroupId(given.group) if given.group is not None else None,
            member=given.member,
            dispatch_version=version,
            owner=given.owner,
            metadata={
                **given.metadata,
                "split": given.split,
                **({"limits": limits} if limits else {}),
                **({"classifier": named} if named else {}),
            },
        )
        main = LaneRecord(lane=lane, run=run, role=MAIN, name=MAIN, parent=None, created_at=now)
        await durable(self._services.journal.open_run(record, main, key_digest(key)))
        state = RunState(run, now, given.limits, training=given.group is not None, classifier=classifier)
        self._registry.open_run(state)
        self._registry.open_lane(state, main, key_digest(key))
        return _json({"run": run, "version": version, **self._access(lane, key)})

    async def open_lane(self, request: web.Request) -> web.Response:
        """Open a further lane of a run."""
        given = await self._body(request, OpenLane)
        state = await self._state(request)
        if state.closed:
            raise ProtocolError(f"run {state.run} is closed: it takes no more lanes", status=409, code="run_closed")
        if given.parent is not None and given.parent not in state.lanes:
            raise ProtocolError(f"parent lane {given.parent!r} is not a lane of run {state.run}", param="parent")
        if given.takes_over and given.parent is None:
            raise ProtocolError("a lane that takes over needs a parent", param="parent")
        self._check(given.limits)
        lane, key = new_lane_id(), new_key()
        record = LaneRecord(
            lane=lane,
            run=state.run,
            role=given.role,
            name=given.name or given.role,
            parent=LaneId(given.parent) if given.parent else None,
            created_at=time.time(),
        )
        await durable(self._services.journal.open_lane(record, key_digest(key)))
        more = LaneOpened(lane, given.limits, given.takes_over)
        plain = more == LaneOpened(lane)
        if not plain:
            await durable(write_event(self._services.journal, state.run, more, record.created_at))
        self._registry.open_lane(state, record, key_digest(key))
        if not plain:
            self._registry.take(state, more)
        return _json(self._access(lane, key))

    async def release_lane(self, request: web.Request) -> web.Response:
        """Give a parent's key back to the parent."""
        state = await self._state(request)
        lane = self._lane(state, request)
        if any(lane in other.diverted for other in state.lanes.values()):
            event = LaneReleased(lane.record.lane)
            await durable(write_event(self._services.journal, state.run, event, time.time()))
            self._registry.take(state, event)
        return _json({})

    async def close_run(self, request: web.Request) -> web.Response:
        """Refuse new calls, let those in flight end within a bound, abort the rest."""
        given = await self._body(request, CloseRun)
        state = await self._state(request)
        if not state.closed:
            state.closed = True
            await durable(write_event(self._services.journal, state.run, RunClosed(), time.time()))
        await self._close(state, given.seconds)
        done = await asyncio.to_thread(self._totals, state.run)
        return _json(done)

    async def end_run(self, request: web.Request) -> web.Response:
        """Record the terminal state of a run; its keys open nothing any more."""
        given = await self._body(request, EndRun)
        return _json({"status": await self._end(RunId(request.match_info["run"]), given, 0.0)})

    async def finish_run(self, request: web.Request) -> web.Response:
        """Close and end a run in one step; tell what it used."""
        given = await self._body(request, FinishRun)
        run = RunId(request.match_info["run"])
        end = EndRun(given.status, given.reward, given.parts, given.error, given.placeholder)
        status = await self._end(run, end, given.seconds)
        return _json({"status": status, **await asyncio.to_thread(self._totals, run)})

    async def _end(self, run: RunId, given: EndRun, seconds: float) -> RunStatus:
        if given.status is RunStatus.RUNNING:
            raise ProtocolError("status must be a terminal state of a run", param="status")
        if given.reward is not None and not math.isfinite(given.reward):
            raise ProtocolError(f"reward is {given.reward}; give a finite number, or null for unscored", param="reward")
        state = await self._registry.run(run)
        if state is not None:
            await self._close(state, seconds)
            spent = state.spent
        else:
            if await asyncio.to_thread(self._services.journal.run, run) is None:
                raise ProtocolError(f"run {run!r} is not in the store", status=404, code="no_such_run")
            found = await asyncio.to_thread(self._services.journal.spent, run)
            spent = Spent(*found) if found else None
        status = final_status(given.status, spent)
        error = given.error or (str(spent.refusal()) if spent is not None and status is spent.status else None)
        try:
            await durable(
                self._services.journal.end_run(
                    run,
                    status,
                    at=time.time(),
                    reward=given.reward,
                    parts=given.parts,
                    error=error,
                    placeholder=given.placeholder,
                )
            )
        except JournalError as problem:
            raise ProtocolError(str(problem), status=409, code="run_ended") from problem
        self._registry.drop(run)
        self._services.fleet.routes.forget(run)
        return status

    async def show_run(self, request: web.Request) -> web.Response:
        """Tell what is on record of a run, and what it has spent."""
        run = RunId(request.match_info["run"])
        record = await asyncio.to_thread(self._services.journal.run, run)
        if record is None:
            raise ProtocolError(f"run {run!r} is not in the store", status=404, code="no_such_run")
        lanes = await asyncio.to_thread(self._services.journal.lanes, run)
        state = await self._registry.run(run)
        now: dict[str, Any] = {"open": state is not None and not state.closed}
        if state is not None:
            now |= {"in_flight": len(state.live), "usage": state.usage, "spent": state.spent and state.spent.what}
            now |= {"budgets": state.budgets.shown()}
        totals = await asyncio.to_thread(self._totals, run)
        return _json({**msgspec.to_builtins(record), "lanes": msgspec.to_builtins(lanes), **totals, **now})

    async def revoke_lane(self, request: web.Request) -> web.Response:
        """Make a lane's key open nothing, for good; its calls in flight go on."""
        lane = self._lane(await self._state(request), request)
        self._registry.revoke(lane)
        await durable(self._services.journal.revoke_lane(lane.record.lane))
        return _json({})

    async def status(self, request: web.Request) -> web.Response:
        """Tell what is going on."""
        routes = self._services.fleet.routes
        runs = self._registry.runs
        return _json(
            {
                "version": routes.version,
                "replicas": describe(self._services.fleet),
                "calls_in_flight": self._registry.calls_in_flight(),
                "runs_open": len(runs),
                "store": str(self._services.settings.store),
            }
        )

    async def calls(self, request: web.Request) -> web.Response:
        """List calls after a sequence number, without tokens."""
        text = request.query.get("after", "0")
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise ProtocolError(f"after is {text!r}; it must be a sequence number", param="after")
        run = request.query.get("run")
        return _json({"calls": await asyncio.to_thread(self._services.journal.call_summaries, int(text), run)})

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _close(self, state: RunState, seconds: float) -> None:
        state.closed = True
        if state.live and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    while state.live:
                        await next(iter(state.live)).stopped()
            except TimeoutError:
                pass
        while state.live:
            calls = list(state.live)
            for call in calls:
                call.cancel("the run was closed while the call was in flight")
            for call in calls:
                await call.stopped()
        for orphans in state.orphans.values():
            for orphan in orphans:
                if orphan.record.status in OPEN:
                    abort_orphan(self._services, orphan)
        state.orphans.clear()

    def _check(self, limits: Limits) -> None:
        settings = self._services.settings
        if limits.cost is not None and settings.prices == Prices() and not settings.hosted:
            raise ProtocolError(
                "limits.cost needs prices: gyre serve --price-prompt USD --price-sampled USD, or ProxySettings(prices=...)",
                param="limits.cost",
            )

    def _totals(self, run: RunId) -> dict[str, int]:
        calls, sampled = self._services.journal.run_totals(run)
        return {"calls": calls, "sampled_tokens": sampled}

    async def _state(self, request: web.Request) -> RunState:
        run = RunId(request.match_info["run"])
        state = await self._registry.run(run)
        if state is None:
            record = await asyncio.to_thread(self._services.journal.run, run)
            if record is None:
                raise ProtocolError(f"run {run!r} is not in the store", status=404, code="no_such_run")
            raise ProtocolError(f"run {run} already ended as {record.status}", status=409, code="run_ended")
        return state

    def _lane(self, state: RunState, request: web.Request) -> Lane:
        name = request.match_info["lane"]
        lane = state.lanes.get(name)
        if lane is None:
            raise ProtocolError(f"lane {name!r} is not a lane of run {state.run}", status=404, code="no_such_lane")
        return lane

    async def _body(self, request: web.Request, kind: type[T]) -> T:
        return await read_struct(request, kind, self._services.settings.max_body)

    def _access(self, lane: LaneId, key: str) -> dict[str, str]:
        """Return what an agent needs: a key, and a base URL for OpenAI's clients and one for Anthropic's."""
        return {"lane": lane, "api_key": key, "base_url": f"{self.url}/v1", "anthropic_base_url": self.url}

    def guarded(self, handler: Handler) -> Handler:
        """Make a handler ask for the service key, and refuse a trainer that has a successor."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            if not hmac.compare_digest(bearer(request).encode(), self._service_key.encode()):
                raise ProtocolError(
                    f"the control API needs the service key, `Authorization: Bearer KEY`: the service's {SERVICE_KEY}, else"
                    " what is in the file `service-key` beside its store",
                    status=401,
                    code="invalid_service_key",
                )
            self._steering.check(request.headers.get(HEADER))
            return await handler(request)

        return guarded


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
