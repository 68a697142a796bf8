"""Evaluation: runs of the served policy that are recorded under a name and never trained."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import GyreError, TrainerError
from gyre_sdk.events import EvaluationMeasured, PhaseStarted
from gyre_sdk.harness.hooks import unobserved
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.scoring.policy import stands
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord
from gyre_sdk.trainer.agents.client import packed
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind
from gyre_sdk.trainer.agents.wire import Order
from gyre_sdk.trainer.config import TrainerConfig
from gyre_sdk.trainer.purpose import check_purpose
from gyre_sdk.trainer.slots import End, Slots
from gyre_sdk.trainer.stack import Stack

_log = logging.getLogger("gyre.trainer")
_LOOK = 1.0
_ATTEMPTS = 2
"""Runs of a task at most; so a run that cannot be scored is not repeated later, with other weights."""


class Evaluation(msgspec.Struct, frozen=True):
    """What an evaluation measured."""

    name: str
    runs: int
    """Ended runs, one per task; the unscored ones count as reward 0 and no success."""
    scored: int
    reward: float
    """Mean over `runs`."""
    success: float
    """Fraction of `runs` with full reward."""


def evaluate(
    config: TrainerConfig,
    tasks: Sequence[Task],
    *,
    name: str,
    temperature: float | None = None,
    observer: Observer = unobserved,
    stack: Stack | None = None,
    base: Path | None = None,
) -> Evaluation:
    """Run the agent once on each task against the policy being served now.

    Tasks that have a scored run under this name already are not run again, so a killed evaluation goes on where it was.
    A run without a score is repeated once.

    Args:
        name: what the runs are recorded under (`split`); not `train`.
        temperature: passed to the agent function as `temperature`; None passes nothing.
        stack: running processes to use; None starts and stops its own.

    Raises:
        SettingsError: the name cannot be used.
        TrainerError: no run could be recorded.
    """
    check_purpose(config, name)
    if stack is None:
        with Stack(config, observer, base=base, trains=False) as own:
            return evaluate(config, tasks, name=name, temperature=temperature, stack=own)
    options = {} if temperature is None else {"temperature": temperature}
    missing = unmeasured(stack.journal, name, tasks)
    stack.observer(PhaseStarted(time.time(), name, len(missing)))
    for _ in range(_ATTEMPTS):
        if missing:
            _run_all(stack, missing, name, options)
            missing = unmeasured(stack.journal, name, tasks)
    done = ended(stack.journal, name)
    runs = [done[task.name] for task in tasks if task.name in done]
    if not runs:
        raise TrainerError(f"evaluation {name!r} has no ended run; see {config.output.dir / 'logs'}")
    rewards = [run.reward if run.reward is not None else 0.0 for run in runs]
    found = Evaluation(
        name=name,
        runs=len(runs),
        scored=sum(map(scored, runs)),
        reward=sum(rewards) / len(runs),
        success=sum(reward >= config.rollout.success_at for reward in rewards) / len(runs),
    )
    stack.observer(EvaluationMeasured(time.time(), name, found.runs, found.reward, found.success))
    return found


def ended(journal: Journal, name: str) -> dict[str, RunRecord]:
    """Return the ended runs of an evaluation by task: of each the last that has a score, or else the last."""
    found: dict[str, RunRecord] = {}
    for run in journal.runs():
        if run.metadata.get("split") != name or not stands(run.status):
            continue
        if scored(run) or not scored(found.get(run.task)):
            found[run.task] = run
    return found


def unmeasured(journal: Journal, name: str, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that an evaluation still has to run: without a scored run, and with fewer than `_ATTEMPTS` runs."""
    done = ended(journal, name)
    attempts = Counter(run.task for run in journal.runs() if run.metadata.get("split") == name and stands(run.status))
    return [task for task in tasks if not scored(done.get(task.name)) and attempts[task.name] < _ATTEMPTS]


def scored(run: RunRecord | None) -> bool:
    """Tell whether a run has an evaluated reward."""
    return run is not None and run.reward is not None and not run.placeholder


def _run_all(stack: Stack, tasks: Sequence[Task], name: str, options: dict[str, Any]) -> None:
    finished = threading.Semaphore(0)
    slots = Slots(stack.config.rollout.concurrency)

    def run(task: Task, end: End) -> None:
        def ended(outcome: Outcome) -> None:
            if outcome.kind not in (OutcomeKind.ENDED, OutcomeKind.RAISED):
                _log.warning("%s of %s: %s", name, task.name, outcome)
            end()
            finished.release()

        try:
            stack.agents.begin(task, Order(task.name, split=name, options=packed(options)), ended)
        except GyreError as error:
            ended(Outcome(OutcomeKind.FAILED, str(error), type(error).__name__))

    try:
        for task in tasks:
            slots.submit(lambda end, task=task: run(task, end))  # type: ignore[misc]
        for _ in tasks:
            while not finished.acquire(timeout=_LOOK):
                stack.check()
    finally:
        slots.stop(0.0)
