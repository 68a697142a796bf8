"""What a developer can attach to a session's sub-agents, compactions and tool runs.

Every payload says where in the run it happened. Every start has exactly one stop, also when the block raises.
A hook that raises fails the agent's block like any other code in it: hooks decide, observers only watch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from gyre_sdk.events import Event
from gyre_sdk.harness.ports import Observer
from gyre_sdk.records import ExecResult

_log = logging.getLogger("gyre.observer")


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """Where a hook was called."""

    run: str
    lane: str
    parent: str | None
    """Lane that opened this one; None for the main agent."""
    role: str
    name: str
    depth: int
    """0 for the main agent, 1 for its sub-agents and summaries."""


def _ignore_lane(info: LaneInfo) -> None:
    return None


def _ignore_stop(info: LaneInfo, error: BaseException | None) -> None:
    return None


def _ignore_tool(info: LaneInfo, command: str, result: ExecResult) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Hooks:
    """Callbacks of a session; each has a default that does nothing."""

    subagent_started: Callable[[LaneInfo], None] = _ignore_lane
    subagent_stopped: Callable[[LaneInfo, BaseException | None], None] = _ignore_stop
    compaction_started: Callable[[LaneInfo], None] = _ignore_lane
    compaction_stopped: Callable[[LaneInfo, BaseException | None], None] = _ignore_stop
    tool_ran: Callable[[LaneInfo, str, ExecResult], None] = _ignore_tool


def unobserved(event: Event) -> None:
    """Observe nothing."""


class Fanout:
    """Calls an observer that can never fail a run: one that raises is dropped and said so once."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __call__(self, event: Event) -> None:
        try:
            self._observer(event)
        except Exception:  # boundary: an observer never fails a run
            _log.warning("observer failed on %s and is dropped", type(event).__name__, exc_info=True)
            self._observer = unobserved
