"""What a report says of a training: its steps, its evaluations, the seconds of each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite, nan, sqrt

from gyre_sdk.credit import scored
from gyre_sdk.records import RunRecord, RunStatus
from gyre_sdk.view.report.facts import Facts, StepFact
from gyre_sdk.view.state import TRAIN

FULL = 1.0
"""Reward from which a run counts as solved."""
_OVER = frozenset({RunStatus.RUNNING, RunStatus.CANCELLED})
"""States in which a run says nothing of a policy."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step. A figure that the store does not hold is NaN."""

    step: int
    at: float
    """Seconds since the epoch."""
    skipped: bool
    runs: int
    """Evaluated ones."""
    reward: float
    """Their mean."""
    std: float
    """Population standard deviation."""
    low: float
    high: float
    """Lowest and highest reward."""
    solved: float
    """Share of them with full reward."""
    tokens: int
    """Targets."""
    loss: float
    grad_norm: float
    entropy: float
    learning_rate: float
    kl: float
    """k3 estimate of KL(behaviour || current), nats."""
    ratio: float
    ratio_min: float
    ratio_max: float
    difference: float
    """Mean |trainer's log-prob - engine's|, nats."""
    difference_p99: float
    difference_max: float
    staleness: float
    """Mean age of the targets, steps."""
    staleness_max: float
    waiting_s: float
    """Without a closed group to train on."""
    training_s: float
    publishing_s: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Runs of the policy that are recorded under a name and never trained."""

    name: str
    step: int | None
    """Optimizer steps behind the policy; None where no training is on record."""
    tasks: int
    scored: int
    reward: float
    """Mean over tasks; one without a score counts 0."""
    solved: float
    """Share of tasks with full reward."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training, with the evaluations before, during and after it; empty where none is on record."""

    steps: tuple[StepRow, ...]
    skipped: int
    tokens: int
    resumed: int
    """How often it was taken up again."""
    evaluations: tuple[Evaluation, ...]


def split_of(run: RunRecord) -> str:
    """Return `train`, or the name of the evaluation that a run belongs to."""
    found = run.metadata.get("split", TRAIN)
    return found if isinstance(found, str) else TRAIN


def training(facts: Facts) -> Training:
    """Fold a store's steps and evaluations."""
    rows = tuple(map(_row, facts.steps))
    return Training(
        steps=rows,
        skipped=sum(row.skipped for row in rows),
        tokens=sum(row.tokens for row in rows),
        resumed=facts.resumed,
        evaluations=_evaluations(facts) if rows else (),
    )


def _row(step: StepFact) -> StepRow:
    rewards, metrics = step.rewards, step.metrics
    mean = fsum(rewards) / len(rewards) if rewards else nan
    spread = deviation(rewards, mean) if rewards else nan
    waiting = _of(metrics.get("seconds_waiting"))
    distance = "sampling/sampling_logp_difference/"
    return StepRow(
        step=step.number,
        at=step.at,
        skipped=not step.units,
        runs=len(rewards),
        reward=mean,
        std=spread,
        low=min(rewards, default=nan),
        high=max(rewards, default=nan),
        solved=sum(reward >= FULL for reward in rewards) / len(rewards) if rewards else nan,
        tokens=step.tokens,
        loss=_of(metrics.get("loss")),
        grad_norm=_of(metrics.get("grad_norm")),
        entropy=_of(metrics.get("entropy")),
        learning_rate=_of(metrics.get("learning_rate")),
        kl=_of(metrics.get("approx_kl")),
        ratio=_of(metrics.get("ratio")),
        ratio_min=_of(metrics.get("ratio/min")),
        ratio_max=_of(metrics.get("ratio/max")),
        difference=_of(metrics.get(f"{distance}mean")),
        difference_p99=_of(metrics.get(f"{distance}p99")),
        difference_max=_of(metrics.get(f"{distance}max")),
        staleness=_of(metrics.get("staleness/mean")),
        staleness_max=_of(metrics.get("staleness/max")),
        waiting_s=waiting,
        training_s=max(0.0, _of(metrics.get("seconds")) - waiting),
        publishing_s=nan if step.publish_s is None else step.publish_s,
    )


def deviation(values: Sequence[float], mean: float) -> float:
    """Return the population standard deviation of some values; 0 exactly where they are equal."""
    if min(values) == max(values):
        return 0.0
    return sqrt(fsum((value - mean) ** 2 for value in values) / len(values))


def _of(value: float | None) -> float:
    return value if value is not None and isfinite(value) else nan


def _evaluations(facts: Facts) -> tuple[Evaluation, ...]:
    """Return evaluations in the order in which they began: of each task the last run that was evaluated, or else the last."""
    named: dict[str, dict[str, RunRecord]] = {}
    for run in facts.runs:
        split = split_of(run)
        if split == TRAIN or run.status in _OVER:
            continue
        tasks = named.setdefault(split, {})
        if scored(run) or run.task not in tasks or not scored(tasks[run.task]):
            tasks[run.task] = run
    return tuple(_evaluation(name, list(tasks.values()), facts) for name, tasks in named.items())


def _evaluation(name: str, runs: Sequence[RunRecord], facts: Facts) -> Evaluation:
    rewards = [run.reward if scored(run) and run.reward is not None else 0.0 for run in runs]
    ((version, _),) = Counter(run.dispatch_version for run in runs).most_common(1)
    return Evaluation(
        name=name,
        step=facts.versions.get(version),
        tasks=len(runs),
        scored=sum(map(scored, runs)),
        reward=fsum(rewards) / len(rewards),
        solved=sum(reward >= FULL for reward in rewards) / len(rewards),
    )
