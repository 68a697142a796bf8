"""Holds the lanes of a run to their time: their tools to all of it, their calls to working time.

The service enforces the other budgets of runs and lanes on whoever has a lane's key. Working time it does not know of:
clients that a lane makes (`lane.openai()`) ask here before every call; whoever else has the key is looked at a few times a
second, and the key is revoked once that time is spent.
"""

from __future__ import annotations

import logging
import threading

from gyre_sdk.errors import LimitExceeded, ServiceError
from gyre_sdk.harness.agent.accounts import Accounts, Budget
from gyre_sdk.harness.limits import Limits
from gyre_sdk.harness.ports import Clock
from gyre_sdk.harness.service import ServiceClient

_log = logging.getLogger("gyre.session")
_LOOK_SECONDS = 0.2


class Meter:
    """The budgets of one run. Thread-safe.

    Args:
        limits: of the run.
    """

    def __init__(self, service: ServiceClient, run: str, main: str, limits: Limits, clock: Clock) -> None:
        self._service, self._run, self._main, self._clock = service, run, main, clock
        self._accounts = Accounts(parents={main: None})
        self._accounts.budgets[main] = Budget(main, f"run {run}", False, limits, clock.monotonic())
        self._lock = threading.RLock()
        self._over: dict[str, LimitExceeded] = {}
        """Lane -> how its budget ended."""
        self._revoked: set[str] = set()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._watch(limits)

    def begin(self) -> None:
        """Start the run's clock: its block begins."""
        self._accounts.budgets[self._main].opened = self._clock.monotonic()

    def open(self, lane: str, parent: str, name: str, limits: Limits | None) -> None:
        """Take in a lane that was opened, with a budget of its own if it has one."""
        with self._lock:
            self._accounts.parents[lane] = parent
            if limits is None or not limits.any():
                return
            self._accounts.budgets[lane] = Budget(lane, f"lane {name!r}", True, limits, self._clock.monotonic())
            self._watch(limits)

    def metered(self, lane: str) -> bool:
        """Tell whether a lane's calls are to be checked here."""
        with self._lock:
            return any(budget.limits.metered for budget in self._accounts.chain(lane))

    def check(self, lane: str) -> None:
        """Raise when a lane has no time left.

        Raises:
            LimitExceeded: naming the budget.
        """
        with self._lock:
            now = self._clock.monotonic()
            for budget in self._accounts.chain(lane):
                error = budget.out_of_time(now)
                if error is not None:
                    raise self._over.setdefault(budget.lane, error)

    def left_s(self, lane: str) -> float | None:
        """Return how many seconds a tool of a lane may run; None without a limit.

        Raises:
            LimitExceeded: there are none left.
        """
        with self._lock:
            self.check(lane)
            now = self._clock.monotonic()
            left = [seconds for budget in self._accounts.chain(lane) if (seconds := budget.left_s(now)) is not None]
        return max(min(left), 0.001) if left else None

    def over(self) -> LimitExceeded | None:
        """Return how the run's own time was found spent here; None if it was not."""
        with self._lock:
            return self._over.get(self._main)

    def spent(self, lane: str) -> LimitExceeded | None:
        """Return how a lane's own budget was found spent, here or by the service; None if it was not."""
        with self._lock:
            found, budget = self._over.get(lane), self._accounts.budgets.get(lane)
        if found is not None or budget is None:
            return found
        try:
            spent = self._service.spent_budget(self._run, lane)
        except ServiceError as error:
            _log.warning("how lane %s of run %s ended could not be read: %s", lane, self._run, error)
            return None
        return budget.error(spent.limit, spent.what) if spent is not None else None

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _watch(self, limits: Limits) -> None:
        if limits.metered and self._watcher is None:
            self._watcher = threading.Thread(target=self._look, name=f"gyre meter {self._run}", daemon=True)
            self._watcher.start()

    def _look(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                with self._lock:
                    self._read()
                    keys = self._spent_keys(self._clock.monotonic())
                for lane in keys:
                    self._service.revoke_lane(self._run, lane)
            except ServiceError as error:
                _log.debug("working time of run %s could not be looked at: %s", self._run, error)

    def _spent_keys(self, now: float) -> list[str]:
        """Return the lanes whose keys are to open nothing any more, once each."""
        accounts = self._accounts
        accounts.look(now)
        found: list[str] = []
        for lane, budget in accounts.budgets.items():
            error = budget.out_of_work(now)
            if error is not None and lane not in self._revoked:
                self._over.setdefault(lane, error)
                found += accounts.below(lane)
        self._revoked.update(found)
        return found

    def _read(self) -> None:
        """Take in what is new on record."""
        calls = self._service.calls(self._run, after=self._accounts.cursor)
        if self._accounts.unknown(calls):
            self._accounts.adopt(self._service.lane_parents(self._run))
        self._accounts.read(calls)
