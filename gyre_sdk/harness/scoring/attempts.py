"""Scores a run: holds what it left, evaluates it, and says what came of it. See the package for the order."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from gyre_sdk.errors import ScoringError, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring.evaluate import OverallLimit, clean, evaluate_scorer, evaluate_tests, upload_tests
from gyre_sdk.harness.scoring.links import take_away
from gyre_sdk.harness.scoring.retained import NOTES, Retained, from_snapshot, retain
from gyre_sdk.harness.scoring.watch import Seal
from gyre_sdk.harness.task import Task
from gyre_sdk.records import Score, ScoreStatus

RETRIES = 2
"""Evaluations after a failed one."""
_SAFE_GIT = {
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "core.fsmonitor",
    "GIT_CONFIG_VALUE_1": "false",
}
"""The repository is another user's than the one who evaluates, which git would refuse; and it names no program to run."""


def score(task: Task, workspace: Workspace, *, seal: Seal | None = None) -> Score:
    """Evaluate a workspace once.

    Args:
        workspace: the agent's; every process in it is killed.
        seal: what `prepare` gave when the run started: what steers the evaluation is then as it was.

    Raises:
        ScoringError: the evaluation failed or gave no number: there is no reward.
        WorkspaceUnavailable: the workspace is dead.
    """
    return score_with_retries(task, workspace, seal=seal, retries=0)


def score_with_retries(task: Task, workspace: Workspace, *, seal: Seal | None = None, retries: int = RETRIES) -> Score:
    """Evaluate a workspace, again after a failure, at most `retries` times more.

    Raises:
        ScoringError: the last failure, with how often it was tried.
        WorkspaceUnavailable: the workspace is dead: nothing is left to evaluate.
    """
    found = evaluate(task, workspace, seal=seal, retries=retries)
    if found.status is ScoreStatus.LOST:
        raise WorkspaceUnavailable(found.explanation)
    if found.reward is None:
        raise ScoringError(found.explanation)
    return found


def evaluate(
    task: Task,
    workspace: Workspace,
    *,
    seal: Seal | None = None,
    retries: int = RETRIES,
    deadline: float | None = None,
    keep: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Score:
    """Evaluate what a run left behind; a failure is a score without a reward.

    Args:
        seal: see `score`.
        retries: evaluations after a failed one.
        deadline: time of `clock` at which the overall limit of the run is reached.
        keep: keep the snapshot, to score again from; `Score.snapshot` names it.
    """
    attempts = _Attempts(task, retries, deadline, clock)
    return attempts.run(lambda: retain(task, workspace, seal, keep=keep), keep=keep)


def score_snapshot(
    task: Task, snapshot: str, *, seal: Seal | None = None, retries: int = RETRIES, engine: str | None = None
) -> Score:
    """Evaluate the kept snapshot of a run again; it stays.

    Args:
        snapshot: `Score.snapshot`.
        seal: that of the run's start.
        engine: URL of the Docker engine; None is $DOCKER_HOST or the default socket.
    """
    attempts = _Attempts(task, retries, None, time.monotonic)
    return attempts.run(lambda: from_snapshot(task, snapshot, seal, engine=engine), keep=True)


class _Attempts:
    """The evaluations of one run."""

    def __init__(self, task: Task, retries: int, deadline: float | None, clock: Callable[[], float]) -> None:
        self._task = task
        self._retries = retries
        self._deadline = deadline
        self._clock = clock

    def run(self, hold: Callable[[], Retained], *, keep: bool) -> Score:
        retained: Retained | None = None
        found = Score(None)
        try:
            for number in range(1, self._retries + 2):
                if (left := self._left()) is not None and left <= 0:
                    found = self._cut_off(number - 1)
                    break
                try:
                    retained = retained or hold()
                    found = msgspec.structs.replace(self._once(retained), evaluations=number)
                    break
                except OverallLimit:
                    found = self._cut_off(number)
                    break
                except WorkspaceUnavailable as error:
                    if retained is None or retained.mode == "shared":
                        found = Score(None, explanation=str(error), status=ScoreStatus.LOST, evaluations=number)
                        break
                    found = self._failed(error, number)
                except (ScoringError, WorkspaceError) as error:
                    found = self._failed(error, number)
        finally:
            if retained is not None:
                retained.close(keep=keep)
        if retained is None:
            return found
        return msgspec.structs.replace(
            found, tampered=_bounded(retained.notes), mode=retained.mode, snapshot=retained.snapshot if keep else None
        )

    def _once(self, retained: Retained) -> Score:
        task = self._task
        with retained.opened() as workspace:
            if task.scorer is not None:
                return evaluate_scorer(task, workspace)
            there = clean(task, workspace)
            if retained.mode == "shared" and not retained.cleaned:
                retained.notes += [f"{path}: there before the evaluation; taken away" for path in there]
            retained.cleaned = True
            upload_tests(task, workspace)
            retained.notes += take_away(task, workspace, retained.seal.leads if retained.seal else ())
            apart = retained.mode == "separate"
            env = {**(_SAFE_GIT if apart else {}), **task.verifier_env}
            return evaluate_tests(task, workspace, apart=apart, env=env, left=self._left)

    def _left(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._clock()

    def _failed(self, error: Exception, number: int) -> Score:
        return Score(
            None, explanation=f"{error} (evaluated {number} times)", status=ScoreStatus.FAILED, evaluations=number
        )

    def _cut_off(self, number: int) -> Score:
        what = f"task {self._task.name!r}: the overall limit of the run was reached before an evaluation ended"
        return Score(None, explanation=what, status=ScoreStatus.CUT_OFF, evaluations=number)


def _bounded(notes: list[str]) -> tuple[str, ...]:
    unique = list(dict.fromkeys(note[:300] for note in notes))
    more = len(unique) - NOTES
    return (*unique[:NOTES], *((f"and {more} more",) if more > 0 else ()))
