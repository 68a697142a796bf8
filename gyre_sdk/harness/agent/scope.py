"""Blocks in which a further lane is open: a sub-agent, a compaction. Each start has exactly one stop.

The stop is claimed once, by whoever comes first: the end of the block, an error on the way into it, or the end of the run
for a block that is still open then, in another thread or task.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from gyre_sdk.errors import LimitExceeded, ServiceError, Vetoed
from gyre_sdk.events import LaneOpened
from gyre_sdk.harness.agent.waiting import in_thread, to_the_end
from gyre_sdk.harness.hooks import (
    Deny,
    LaneInfo,
    Outcome,
    PostCompact,
    PreCompact,
    SubagentStart,
    SubagentStop,
    telling,
)
from gyre_sdk.harness.limits import Limits, is_limit, is_refused
from gyre_sdk.harness.service import OpenedLane
from gyre_sdk.records import SUBAGENT, SUMMARY_SUFFIX

if TYPE_CHECKING:
    from gyre_sdk.harness.agent.lane import Lane

Child = Callable[[OpenedLane, str, str], "Lane"]
"""Makes a lane below another, from its access, role and name."""


class LaneScope(ABC):
    """A block in which a lane is open; `with` and `async with` give the lane."""

    def __init__(self, parent: Lane, child: Child) -> None:
        self._parent, self._child = parent, child
        self._context = parent.context
        self._lane: Lane | None = None
        self._admitted = False
        """Whether the hooks let it begin."""

    # -- what the kinds differ in ------------------------------------------------------------------------------------

    @abstractmethod
    def _prepare(self) -> None:
        """Do what comes before the start is told."""

    @abstractmethod
    def _start(self) -> LaneInfo:
        """Return the start's payload."""

    @abstractmethod
    def _begin(self, started: Any) -> Lane:
        """Do what comes after the start was told, and return the block's lane."""

    @abstractmethod
    def _stop(self, outcome: Outcome, error: BaseException | None) -> LaneInfo:
        """Return the stop's payload."""

    def _release(self) -> None:  # noqa: B027 - a sub-agent's key stays its own
        """Undo the opening."""

    # -- with --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Lane:
        self._prepare()
        try:
            self._context.hooks.began(self, self.abandon)
            return self._admit(*self._context.hooks.fire(self._start()))
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = self._spent(error)
        self._end(spent or error)
        if spent is not None:
            raise spent from error

    async def __aenter__(self) -> Lane:
        try:
            await in_thread(self._prepare)
            self._context.hooks.began(self, self.abandon)
            started, denied = await self._context.hooks.afire(self._start())
            return await in_thread(self._admit, started, denied)
        except BaseException as error:
            await to_the_end(self._aend(error))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        spent = await to_the_end(self._aclose(error))
        if spent is not None:
            raise spent from error

    def abandon(self) -> None:
        """End it because the run ends."""
        self._end(None, Outcome.ABANDONED)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _admit(self, started: Any, denied: Deny | None) -> Lane:
        if denied is not None:
            raise Vetoed(f"{type(started).__name__} of {started.name!r} was denied: {denied.reason}")
        self._lane = self._begin(started)
        self._admitted = True
        return self._lane

    def _open(self, role: str, name: str, *, takes_over: bool = False, limits: Limits | None = None) -> Lane:
        context, parent = self._context, self._parent
        opened = context.service.open_lane(
            context.run, role=role, name=name, parent=parent.lane, takes_over=takes_over, limits=limits
        )
        context.observer(LaneOpened(context.clock.time(), context.run, opened.lane, role, name))
        return self._child(opened, role, name)

    def _spent(self, error: BaseException | None) -> LimitExceeded | None:
        """Return the lane's own spent budget, where that is what ended the block."""
        if error is None or self._lane is None or isinstance(error, LimitExceeded) or not is_refused(error):
            return None
        return self._context.meter.spent(self._lane.lane)

    def _end(self, error: BaseException | None, outcome: Outcome | None = None) -> None:
        if self._context.hooks.ended(self):
            self._release()
            with telling(error):
                self._context.hooks.fire(self._stop(outcome or self._outcome(error), error))

    async def _aclose(self, error: BaseException | None) -> LimitExceeded | None:
        """End it; return the lane's own spent budget, where that is what ended the block."""
        spent = await asyncio.to_thread(self._spent, error) if error is not None and is_refused(error) else None
        await self._aend(spent or error)
        return spent

    async def _aend(self, error: BaseException | None) -> None:
        if self._context.hooks.ended(self):
            await asyncio.to_thread(self._release)
            with telling(error):
                await self._context.hooks.afire(self._stop(self._outcome(error), error))

    def _outcome(self, error: BaseException | None) -> Outcome:
        if error is None:
            return Outcome.COMPLETED
        if not isinstance(error, Exception):
            return Outcome.CANCELLED
        if not self._admitted:
            return Outcome.DENIED
        return Outcome.LIMIT if is_limit(error) else Outcome.FAILED


class SubagentScope(LaneScope):
    """The block of a sub-agent."""

    def __init__(self, parent: Lane, child: Child, name: str, limits: Limits | None) -> None:
        super().__init__(parent, child)
        self._name, self._limits = name, limits

    def _prepare(self) -> None:
        meter = self._context.meter
        meter.check(self._parent.lane)
        self._lane = self._open(SUBAGENT, self._name, limits=self._limits)
        meter.open(self._lane.lane, self._parent.lane, self._name, self._limits)

    def _start(self) -> SubagentStart:
        return SubagentStart(**self._place())

    def _begin(self, started: SubagentStart) -> Lane:
        assert self._lane is not None
        return self._lane

    def _stop(self, outcome: Outcome, error: BaseException | None) -> SubagentStop:
        assert self._lane is not None
        return SubagentStop(**self._place(), outcome=outcome, error=error, output=self._lane.output)

    def _place(self) -> dict[str, Any]:
        assert self._lane is not None
        return msgspec.structs.asdict(self._lane.info)


class CompactionScope(LaneScope):
    """The block of a compaction. Its lane is opened once the hooks agree; they are told of the lane that is compacted."""

    def __init__(self, parent: Lane, child: Child, messages: Sequence[Any] | None, trigger: str) -> None:
        super().__init__(parent, child)
        self._messages, self._trigger = messages, trigger

    def _prepare(self) -> None:
        self._context.meter.check(self._parent.lane)

    def _start(self) -> PreCompact:
        place = msgspec.structs.asdict(self._parent.info)
        return PreCompact(**place, trigger=self._trigger, messages=self._messages)

    def _begin(self, started: PreCompact) -> Lane:
        parent = self._parent
        role = parent.role if parent.role.endswith(SUMMARY_SUFFIX) else parent.role + SUMMARY_SUFFIX
        name = f"{parent.info.name}{SUMMARY_SUFFIX}"
        self._lane = self._open(role, name, takes_over=True)
        self._context.meter.open(self._lane.lane, parent.lane, name, None)
        self._lane.messages = started.messages
        return self._lane

    def _stop(self, outcome: Outcome, error: BaseException | None) -> PostCompact:
        place, lane = msgspec.structs.asdict(self._parent.info), self._lane
        return PostCompact(
            **place,
            trigger=self._trigger,
            summary_lane=lane.lane if lane else "",
            outcome=outcome,
            error=error,
            output=lane.output if lane else None,
        )

    def _release(self) -> None:
        if self._lane is not None:
            with contextlib.suppress(ServiceError):
                self._context.service.release_lane(self._context.run, self._lane.lane)


__all__ = ["CompactionScope", "LaneScope", "SubagentScope"]
