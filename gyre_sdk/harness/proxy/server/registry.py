"""Runs and keys of this process: in memory while runs are open, read back from the store when they have to be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.server.budgets import out_of_time
from gyre_sdk.harness.proxy.server.lane_states import LaneEvent, spent_event, write_event
from gyre_sdk.harness.proxy.server.settings import ProxySettings
from gyre_sdk.harness.proxy.server.shards import shard_of
from gyre_sdk.harness.proxy.server.state import Lane, RunState, key_digest
from gyre_sdk.harness.proxy.server.stored_runs import load_run
from gyre_sdk.journal import Journal
from gyre_sdk.records import LaneId, LaneRecord, RunId


class Registry:
    """Runs and keys of this process, and of the store."""

    def __init__(self, journal: Journal, settings: ProxySettings) -> None:
        self._journal = journal
        self._settings = settings
        self._keys: dict[str, Lane] = {}
        self._runs: dict[RunId, RunState] = {}
        self._loading = asyncio.Lock()

    @property
    def runs(self) -> list[RunState]:
        """Runs in memory."""
        return list(self._runs.values())

    def calls_in_flight(self) -> int:
        """Return how many calls are in flight."""
        return sum(len(run.live) for run in self._runs.values())

    def open_run(self, state: RunState) -> None:
        """Keep a run that was just opened, or read back from the store."""
        self._runs[state.run] = state
        state.used_at = time.monotonic()
        if state.limits.seconds is not None and state.spent is None:
            left = state.created_at + state.limits.seconds - time.time()
            state.alarm = asyncio.get_running_loop().call_later(max(left, 0.0), self._time_is_up, state)
        self._watch(state)

    def open_lane(self, state: RunState, record: LaneRecord, digest: str) -> Lane:
        """Keep a lane that was just opened."""
        lane = state.lanes[record.lane] = Lane(record, state)
        return self._remember(digest, lane)

    def take(self, state: RunState, event: LaneEvent) -> None:
        """Bring a lane to an event that was just recorded."""
        state.budgets.take(event)
        self._watch(state)

    def _watch(self, state: RunState) -> None:
        state.budgets.watch(lambda lane: self._lane_is_late(state, lane))

    def _lane_is_late(self, state: RunState, lane: LaneId) -> None:
        [account] = [account for name, account in state.budgets.of(lane) if name == lane]
        if account.spent is None:
            spent = replace(out_of_time(account.limits), who=account.who)
            state.spend_lane(lane, spent)
            write_event(self._journal, state.run, spent_event(lane, spent), time.time())

    def _remember(self, digest: str, lane: Lane) -> Lane:
        lane.run.keys.append(digest)
        return self._keys.setdefault(digest, lane)

    async def release(self, forget: Callable[[RunId], None]) -> None:
        """Let go of runs that nobody asks for, for ever: a run's agent may never come back, and never end it.

        Args:
            forget: called with each of them.
        """
        idle = self._settings.idle
        while True:
            await asyncio.sleep(max(idle / 10, 0.05))
            before = time.monotonic() - idle
            for state in [state for state in self._runs.values() if state.used_at <= before and state.at_rest]:
                self.drop(state.run)
                forget(state.run)

    def drop(self, run: RunId) -> None:
        """Forget a run that ended, or that the store knows all of."""
        state = self._runs.pop(run, None)
        if state is not None and state.alarm is not None:
            state.alarm.cancel()
        if state is not None:
            state.budgets.close()
        for digest in state.keys if state is not None else ():
            self._keys.pop(digest, None)

    def revoke(self, lane: Lane) -> None:
        """Make a lane's keys open nothing."""
        lane.revoked = True

    async def lane(self, key: str) -> Lane:
        """Return the lane that a key opens.

        Raises:
            ProtocolError: 401 for an unknown key, 403 for one of a run that ended.
        """
        digest = key_digest(key)
        lane = self._keys.get(digest)
        if lane is not None:
            if lane.revoked:
                raise ProtocolError("the API key was revoked", status=401, code="invalid_api_key")
            lane.run.used_at = time.monotonic()
            return lane
        record = await asyncio.to_thread(self._journal.lane_of_key, digest) if key else None
        if record is None:
            raise ProtocolError(
                "the API key is missing or opens no run; take the key that `gyre.session` or `POST /gyre/v1/runs` gave",
                status=401,
                code="invalid_api_key",
            )
        state = await self.run(record.run)
        if state is None:
            raise ProtocolError(
                f"run {record.run} has ended; its key opens nothing any more", status=403, code="run_ended"
            )
        lane = state.lanes.get(record.lane)
        return self.open_lane(state, record, digest) if lane is None else self._remember(digest, lane)

    async def run(self, run: RunId) -> RunState | None:
        """Return an open run, from the store if need be; None when it is unknown or has ended."""
        state = self._runs.get(run)
        if state is None:
            if shard_of(run, self._settings.shards) != self._settings.shard:
                problem = f"run {run} belongs to another worker; ask the service's own address"
                raise ProtocolError(problem, status=421, code="wrong_worker")
            async with self._loading:
                state = self._runs.get(run)
                if state is None:
                    state = await asyncio.to_thread(load_run, self._journal, self._settings.prices, run)
                    if state is not None:
                        self.open_run(state)
        if state is not None:
            state.used_at = time.monotonic()
        return state

    def _time_is_up(self, state: RunState) -> None:
        if state.spent is None:
            spent = out_of_time(state.limits)
            state.spend(spent)
            self._journal.spend_run(state.run, spent.status, spent.what)
