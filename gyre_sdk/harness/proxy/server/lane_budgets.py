"""What a run's lanes have beside their records: whose key they took over, and budgets that cover the lanes below too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gyre_sdk.harness.proxy.server.budgets import Account, Limits, Spent
from gyre_sdk.harness.proxy.server.lane_states import LaneEvent, LaneOpened, LaneReleased, LaneSpent
from gyre_sdk.records import LaneId, LaneRecord


class _Lane(Protocol):
    @property
    def record(self) -> LaneRecord: ...

    @property
    def diverted(self) -> list[Any]: ...


class LaneBudgets:
    """Accounts by lane.

    Args:
        lanes: of the run, by name; lanes without a parent there are its roots.
    """

    def __init__(self, lanes: Mapping[str, _Lane]) -> None:
        self._lanes = lanes
        self._accounts: dict[LaneId, Account] = {}
        self._alarms: dict[LaneId, asyncio.TimerHandle] = {}

    def take(self, event: LaneEvent) -> None:
        """Bring a lane to what is on record of it."""
        lane = self._lanes[event.lane]
        match event:
            case LaneOpened(limits=limits, takes_over=takes_over):
                if limits != Limits():
                    who = f"the lane {lane.record.name!r}"
                    self._accounts[event.lane] = Account(who, limits, lane.record.created_at)
                if takes_over and lane.record.parent is not None:
                    self._lanes[lane.record.parent].diverted.append(lane)
            case LaneReleased():
                for other in self._lanes.values():
                    if lane in other.diverted:
                        other.diverted.remove(lane)
            case LaneSpent():
                self.spend(event.lane, event.spent)

    def spend(self, lane: LaneId, spent: Spent) -> None:
        """Note that a lane's budget ran out."""
        self._accounts[lane].spent = spent

    def of(self, lane: LaneId) -> list[tuple[LaneId, Account]]:
        """Return the accounts that a lane's calls count against, its own first, with their lanes."""
        found: list[tuple[LaneId, Account]] = []
        name = lane if self._accounts else None
        while name is not None:
            if name in self._accounts:
                found.append((name, self._accounts[name]))
            known = self._lanes.get(name)
            name = known.record.parent if known is not None else None
        return found

    def watch(self, late: Callable[[LaneId], None]) -> None:
        """Call `late` when a lane's wall time is over."""
        for lane, account in self._accounts.items():
            if account.limits.seconds is not None and account.spent is None and lane not in self._alarms:
                left = account.opened_at + account.limits.seconds - time.time()
                self._alarms[lane] = asyncio.get_running_loop().call_later(max(left, 0.0), late, lane)

    @property
    def clocks(self) -> bool:
        """Whether a lane's wall time is still to run out."""
        return any(item.limits.seconds is not None and item.spent is None for item in self._accounts.values())

    def close(self) -> None:
        """Watch no more."""
        for alarm in self._alarms.values():
            alarm.cancel()

    def shown(self) -> dict[str, dict[str, object]]:
        """Return limits, usage and what ran out, in words and as the name of a limit, by lane."""
        return {
            lane: {
                "limits": account.limits,
                "usage": account.usage,
                "spent": account.spent.what if account.spent else None,
                "limit": account.spent.limit if account.spent else None,
            }
            for lane, account in self._accounts.items()
        }


__all__ = ["LaneBudgets"]
