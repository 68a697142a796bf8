"""The scoring of one run, as a session goes through it: begin, evaluate, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gyre_sdk.errors import GyreError, ScoringError, WorkspaceError
from gyre_sdk.harness.ports import Clock, Workspace
from gyre_sdk.harness.scoring import record
from gyre_sdk.harness.scoring.attempts import RETRIES, evaluate
from gyre_sdk.harness.scoring.begin import prepare
from gyre_sdk.harness.scoring.steps import StepScores
from gyre_sdk.harness.scoring.watch import Seal
from gyre_sdk.harness.task import Task
from gyre_sdk.records import Score, ScoreStatus

_log = logging.getLogger("gyre.scoring")


class RunScoring:
    """What a run needs to be scored.

    Args:
        retries: evaluations after a failed one.
        keep: keep the snapshot of what the run left, to score again from (`gyre rescore`).
        deadline: monotonic time of the clock at which the run is dropped, also in the middle of an evaluation.
    """

    def __init__(
        self,
        task: Task,
        clock: Clock,
        *,
        retries: int = RETRIES,
        keep: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._task = task
        self._clock = clock
        self._retries = retries
        self._keep = keep
        self._deadline = deadline
        self._seal: Seal | None = None
        self._steps = StepScores(task, self._evaluate) if task.steps else None

    def begin(self, workspace: Workspace) -> None:
        """Scrub and seal a workspace before its agent begins. See `prepare`."""
        self._seal = prepare(self._task, workspace)

    def steps(self, workspace: Workspace) -> Iterator[Task]:
        """Yield each step of the task, scored when the next one is asked for; the task itself where it has none."""
        yield from self._steps.each(workspace) if self._steps is not None else (self._task,)

    def evaluate(self, workspace: Workspace) -> Score:
        """Evaluate what the agent left; a failure is a score without a reward."""
        if self._steps is not None:
            return self._steps.result(workspace)
        return self._evaluate(self._task, workspace)

    def _evaluate(self, task: Task, workspace: Workspace) -> Score:
        return evaluate(
            task,
            workspace,
            seal=self._seal,
            retries=self._retries,
            deadline=self._deadline,
            keep=self._keep and self._steps is None,  # a step cannot be scored again without the ones before
            clock=self._clock.monotonic,
        )

    def now(self, workspace: Workspace) -> Score:
        """Evaluate at the agent's own request.

        Raises:
            ScoringError: there is no reward.
        """
        found = self.evaluate(workspace)
        if found.reward is None:
            raise ScoringError(found.explanation)
        return found

    def record(self, run: str, score: Score | None, store: Callable[[], str]) -> None:
        """Put on record what there is to say of an evaluation; a store that cannot take it is said, not raised.

        Args:
            store: asks the service where its store is.
        """
        if score is None or not record.worth_recording(score):
            return
        try:
            entry = record.evaluated(run, self._task, score, self._seal)
            record.append(Path(store()), record.EVALUATED, [entry], at=self._clock.time())
        except (GyreError, OSError) as error:
            _log.warning("run %s: its evaluation is not on record: %s", run, error)


def reason(score: Score) -> str | None:
    """Say why there is no reward; None when there is one."""
    if score.status is ScoreStatus.SCORED:
        return None
    what = {
        ScoreStatus.FAILED: "scorer",
        ScoreStatus.LOST: "workspace lost before scoring",
        ScoreStatus.CUT_OFF: "overall limit",
    }
    return f"{what[score.status]}: {score.explanation}"


START_RETRIES = 2
"""Attempts to open a workspace after a failed one."""
_START_SECONDS = 60.0
"""Seconds after which a failed start is not tried again: a build that failed late fails again."""
_PAUSE = 0.2
"""Seconds before the first of them; the next one waits twice as long."""
T = TypeVar("T")


def retried_start(start: Callable[[], T], clock: Clock) -> T:
    """Open a workspace, again after a failure: what the policy retries of a start.

    Raises:
        WorkspaceError: the last failure.
    """
    began = clock.monotonic()
    for attempt in range(START_RETRIES):
        try:
            return start()
        except WorkspaceError as error:
            if clock.monotonic() - began > _START_SECONDS:
                raise
            _log.info("the workspace did not open (%s); trying again", error)
            time.sleep(_PAUSE * 2**attempt)
    return start()
