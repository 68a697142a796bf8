"""The steps of one run: each is begun, done, scored in its place; the run's score is made of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task import Task, begin_step, below, combine
from gyre_sdk.records import Score

Evaluate = Callable[[Task, Workspace], Score]
"""Scores a step, as a task of its own, in a workspace; a failure is a score without a reward."""


class StepScores:
    """Gives out the steps of a run and keeps their scores."""

    def __init__(self, task: Task, evaluate: Evaluate) -> None:
        self._task = task
        self._evaluate = evaluate
        self._scores: list[Score] = []
        self._open: Task | None = None

    def each(self, workspace: Workspace) -> Iterator[Task]:
        """Yield each step as a task once its files are there; what was done for it is scored before the next one.

        The later steps are left out when one falls below its `min_reward`, or cannot be scored.

        Raises:
            WorkspaceError: a step's setup failed, or the workspace is not healthy for it.
        """
        for number in range(len(self._scores), len(self._task.steps)):
            self._open = begin_step(workspace, self._task, number)
            yield self._open
            self._close(workspace)
            if self._scores[number].reward is None or below(self._task.steps[number], self._scores[number]):
                return

    def result(self, workspace: Workspace) -> Score:
        """Score the step that is still open, and return the score of the whole."""
        if self._open is not None:
            self._close(workspace)
        return combine(self._task, self._scores)

    def _close(self, workspace: Workspace) -> None:
        if self._open is not None:
            open_step, self._open = self._open, None
            self._scores.append(self._evaluate(open_step, workspace))
