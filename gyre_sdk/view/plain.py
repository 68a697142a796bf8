"""Plain lines for logs and pipes: one per event of interest, and progress at most every five seconds of event time."""

from __future__ import annotations

from gyre_sdk.events import (
    CellMoved,
    EvaluationMeasured,
    Event,
    GroupClosed,
    PhaseStarted,
    ProcessRestarted,
    ReplicaLost,
    RunEnded,
    RunStarted,
    StepSkipped,
    StepTaken,
    SwitchMeasured,
    VersionPublished,
)
from gyre_sdk.view.escape import counted, duration, reward, shortly, visible
from gyre_sdk.view.state import State

_EVERY = 5.0
"""Seconds between two lines of progress."""
_LIMIT = 200


class PlainLines:
    """Turns events into lines. Feed it after the state has taken the event."""

    def __init__(self) -> None:
        self._progress_at = float("-inf")
        self._pending = False

    def lines(self, event: Event, state: State) -> list[str]:
        """Return the lines that an event is worth."""
        if isinstance(event, PhaseStarted):
            self._progress_at = state.now
        said = self._say(event, state)
        if said is not None:
            return [self._stamped(said, state)]
        self._pending = True
        if state.phase is not None and state.now - self._progress_at >= _EVERY:
            return self.progress(state)
        return []

    def progress(self, state: State) -> list[str]:
        """Return a line of progress, or nothing when it would say the same again."""
        if not self._pending:
            return []
        self._pending = False
        self._progress_at = state.now
        phase = state.phase
        done = "" if phase is None or not phase.total else f"{phase.done}/{phase.total}, "
        left = phase.eta(state.now) if phase is not None else None
        name = "" if phase is None else f"{visible(phase.name, 32)}: "
        mean = "" if state.mean_reward is None else f", mean reward {state.mean_reward:.2f}"
        said = (
            f"{name}{done}{counted(len(state.active), 'run')} going, {state.ended.total()} ended ({state.scored} scored{mean}),"
            f" {shortly(state.calls, 'call')}, {shortly(state.sampled_tokens, 'token')} sampled"
            + (f", ETA {duration(left)}" if left is not None else "")
        )
        return [self._stamped(said, state)]

    def _stamped(self, said: str, state: State) -> str:
        started = state.started_at if state.started_at is not None else state.now
        return f"[{duration(state.now - started):>7}] {said}"

    def _say(self, event: Event, state: State) -> str | None:
        match event:
            case PhaseStarted():
                total = f", {counted(event.total, 'step' if event.name == 'train' else 'run')}" if event.total else ""
                return f"{visible(event.name, 32)} starts{total}"
            case StepTaken():
                left = state.phase.eta(state.now) if state.phase is not None else None
                return (
                    f"step {event.step}{f'/{event.steps}' if event.steps else ''}: reward {event.mean_reward:.3f}, full success {event.success:.1%},"
                    f" loss {event.loss:.4g}, grad norm {event.grad_norm:.3g}, {counted(event.runs, 'run')},"
                    f" {counted(event.trained_tokens, 'token')} trained"
                    + (f", ETA {duration(left)}" if left is not None else "")
                )
            case StepSkipped():
                return f"step {event.step} skipped: {visible(event.reason, _LIMIT)}"
            case VersionPublished():
                return f"version {event.version} published in {event.seconds:.2f} s"
            case EvaluationMeasured():
                return (
                    f"evaluation {visible(event.name, 32)}: full success {event.success:.1%}, reward {event.reward:.3f}"
                    f" over {counted(event.runs, 'run')}"
                )
            case ProcessRestarted():
                return f"{visible(event.process, 40)} restarted: {visible(event.reason, _LIMIT)}"
            case ReplicaLost() if not state.cells:
                return f"replica {visible(event.replica, 60)} was lost, and takes no calls"
            case SwitchMeasured():
                phases = ", ".join(f"{visible(name, 20)} {seconds:.2f}" for name, seconds in event.phases.items())
                return (
                    f"cell {visible(event.cell, 40)} went over to {visible(event.to, 20)} in"
                    f" {sum(event.phases.values()):.2f} s ({phases})"
                    + (
                        f", {counted(event.finished, 'request')} ended, {event.moved} moved"
                        if event.finished or event.moved
                        else ""
                    )
                )
            case CellMoved() if event.state in ("failed", "stopped"):
                return f"{'replica' if event.standalone else 'cell'} {visible(event.cell, 40)} {event.state} after {duration(event.seconds)} {visible(event.before, 20)}: {visible(event.reason, _LIMIT)}"
            case GroupClosed() if not event.trainable and event.scored < 2:
                return f"group {visible(event.group, 40)} trains nothing: {event.scored} of {counted(event.started, 'run')} scored"
            case RunStarted() if state.phase is None:
                return f"run {visible(event.run, 40)} of {visible(event.task, 60)} started"
            case RunEnded() if state.phase is None:
                return f"run {visible(event.run, 40)} ended: {event.status}, reward {reward(event.reward, placeholder=event.placeholder)}, {duration(event.seconds)}"
            case _:
                return None
