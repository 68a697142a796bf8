"""What a report says of runs: counts, rewards by task, lengths, groups without contrast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from gyre_sdk.credit import group_credit, scored, tally
from gyre_sdk.records import RunRecord, RunStatus
from gyre_sdk.view.report.facts import Facts
from gyre_sdk.view.report.problems import Problems, problems
from gyre_sdk.view.report.training import FULL, Evaluation, Training, deviation, split_of, training
from gyre_sdk.view.state import TRAIN

_SLOWEST = 10
_INFRASTRUCTURE = ("infrastructure", RunStatus.WORKSPACE_ERROR, RunStatus.SCORER_ERROR)
"""Causes of missing rewards that are not the agent's."""


@dataclass(frozen=True, slots=True)
class Head:
    """The store at a glance."""

    began: float | None
    """First run's start, seconds since the epoch."""
    ended: float | None
    """When the last run, call or step ended; None while nothing has."""
    statuses: dict[str, int]
    """Runs by state, the most frequent first."""
    rewards: str
    """How many ended runs have a reward, in words."""
    mean: float | None
    """Mean reward of the evaluated runs."""
    calls: int
    sampled: int
    """Tokens, those of hosted models included."""
    versions: tuple[int, int] | None
    """Oldest and newest policy version that sampled."""
    hosted: int
    """Calls that hosted models answered."""
    dollars: float
    """Known cost of them."""
    unpriced: int
    """Those of which nobody knows the cost."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """The runs of a task."""

    task: str
    split: str
    """`train`, or the name of an evaluation."""
    runs: int
    going: int
    scored: int
    mean: float | None
    std: float | None
    """Population standard deviation."""
    best: float | None
    solved: int
    """Runs with full reward."""
    placeholders: int
    infrastructure: int
    """Without a reward through no fault of the agent."""
    unscored: int
    """Without a reward for another reason."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a number is spread over ended runs."""

    name: str
    p50: float
    p90: float
    most: float
    values: tuple[float, ...]
    """Ascending."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as shown among others."""

    run: str
    task: str
    status: str
    reward: float | None
    placeholder: bool
    seconds: float
    calls: int
    sampled: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group whose rewards say nothing about its runs."""

    group: str
    task: str
    runs: int
    scored: int
    reason: str
    """`flat` or `too_small`."""
    reward: float | None
    """Mean of those that vote."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All that a report says."""

    name: str
    head: Head
    read_at: float | None
    """When the store was read, seconds since the epoch."""
    rewards: tuple[float, ...]
    """Of the evaluated runs, evaluations left out, ascending."""
    tasks: tuple[TaskRow, ...]
    """Those with the lowest mean reward first."""
    lengths: tuple[Spread, ...]
    slowest: tuple[RunRow, ...]
    groups: int
    """Groups in which nothing is going on."""
    without_contrast: tuple[GroupRow, ...]
    untrained: dict[str, int]
    """What was not trained, by the reasons that `gyre samples` gives."""
    evaluations: tuple[Evaluation, ...]
    training: Training | None
    problems: Problems


def figures(facts: Facts) -> Figures:
    """Fold facts into figures."""
    calls, sampled = Counter[str](), Counter[str]()
    for call in facts.calls:
        calls[call.run] += 1
        sampled[call.run] += call.sampled
    for one in facts.spent:
        sampled[one.run] += one.sampled
    rows = [_run(run, calls, sampled) for run in facts.runs if run.ended_at is not None]
    flat = tuple(_without_contrast(facts))
    found = training(facts)
    return Figures(
        name=facts.name,
        head=_head(facts, calls.total(), sampled.total()),
        read_at=facts.read_at,
        rewards=tuple(sorted(_rewards(run for run in facts.runs if split_of(run) == TRAIN))),
        tasks=_tasks(facts.runs),
        lengths=_lengths(rows),
        slowest=tuple(sorted(rows, key=lambda row: -row.seconds)[:_SLOWEST]),
        groups=len(facts.groups),
        without_contrast=flat,
        untrained=_untrained(facts, flat),
        evaluations=found.evaluations,
        training=found if found.steps else None,
        problems=problems(facts),
    )


def _head(facts: Facts, calls: int, sampled: int) -> Head:
    rewards = _rewards(facts.runs)
    versions = [call.version for call in facts.calls if call.version >= 0]
    known = [one.dollars for one in facts.spent if one.dollars is not None]
    ends = [run.ended_at for run in facts.runs if run.ended_at is not None]
    ends += [call.ended_at for call in facts.calls if call.ended_at is not None]
    ends += [step.at for step in facts.steps]
    return Head(
        began=min((run.created_at for run in facts.runs), default=None),
        ended=max(ends, default=None),
        statuses=dict(Counter(str(run.status) for run in facts.runs).most_common()),
        rewards=str(tally(facts.runs)),
        mean=fsum(rewards) / len(rewards) if rewards else None,
        calls=calls,
        sampled=sampled,
        versions=(min(versions), max(versions)) if versions else None,
        hosted=len(facts.spent),
        dollars=fsum(known),
        unpriced=len(facts.spent) - len(known),
    )


def _rewards(runs: Iterable[RunRecord]) -> list[float]:
    return [run.reward for run in runs if scored(run) and run.reward is not None]


def _tasks(runs: Sequence[RunRecord]) -> tuple[TaskRow, ...]:
    by_task: dict[tuple[str, str], list[RunRecord]] = {}
    for run in runs:
        by_task.setdefault((run.task, split_of(run)), []).append(run)
    rows = [_task(task, split, members) for (task, split), members in by_task.items()]
    # What has no reward yet stands after what has one.
    return tuple(
        sorted(
            rows,
            key=lambda row: (
                row.split != TRAIN,
                row.split,
                row.mean is None,
                0.0 if row.mean is None else row.mean,
                row.task,
            ),
        )
    )


def _task(task: str, split: str, runs: Sequence[RunRecord]) -> TaskRow:
    rewards = _rewards(runs)
    mean = fsum(rewards) / len(rewards) if rewards else None
    counted = tally(runs)
    infrastructure = sum(counted.causes.get(str(cause), 0) for cause in _INFRASTRUCTURE)
    return TaskRow(
        task=task,
        split=split,
        runs=len(runs),
        going=len(runs) - counted.started,
        scored=len(rewards),
        mean=mean,
        std=None if mean is None else deviation(rewards, mean),
        best=max(rewards, default=None),
        solved=sum(reward >= FULL for reward in rewards),
        placeholders=counted.placeholders,
        infrastructure=infrastructure,
        unscored=counted.unscored - infrastructure,
    )


def _run(run: RunRecord, calls: Mapping[str, int], sampled: Mapping[str, int]) -> RunRow:
    return RunRow(
        run=run.run,
        task=run.task,
        status=str(run.status),
        reward=run.reward,
        placeholder=run.placeholder,
        seconds=max(0.0, (run.ended_at or 0.0) - run.created_at),
        calls=calls.get(run.run, 0),
        sampled=sampled.get(run.run, 0),
    )


def _lengths(rows: Sequence[RunRow]) -> tuple[Spread, ...]:
    wanted: dict[str, Callable[[RunRow], float]] = {
        "seconds": lambda row: row.seconds,
        "calls": lambda row: float(row.calls),
        "sampled tokens": lambda row: float(row.sampled),
    }
    return tuple(_spread(name, [of(row) for row in rows]) for name, of in wanted.items()) if rows else ()


def _spread(name: str, values: Sequence[float]) -> Spread:
    ordered = tuple(sorted(values))
    return Spread(name, quantile(ordered, 0.5), quantile(ordered, 0.9), ordered[-1], ordered)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of ascending values that at least a share of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _without_contrast(facts: Facts) -> Iterator[GroupRow]:
    by_name = {str(run.run): run for run in facts.runs}
    for group, names in facts.groups.items():
        members = [by_name[name] for name in names if name in by_name]
        credit = group_credit(members)
        if members and credit.dropped is not None:
            task, dropped = members[0].task, str(credit.dropped)
            yield GroupRow(group, task, credit.started, credit.scored, dropped, credit.mean)


def _untrained(facts: Facts, flat: Sequence[GroupRow]) -> dict[str, int]:
    """Count what the steps of a training left out; where there was none, what could not be trained."""
    found: Counter[str] = Counter()
    if facts.steps:
        for step in facts.steps:
            for name, value in step.metrics.items():
                if name.startswith("untrained/"):
                    found[name.removeprefix("untrained/")] += int(value)
        return dict(found.most_common())
    for group in flat:
        found[f"group_{group.reason}"] += 1
    compared = {name for names in facts.groups.values() for name in names}
    found["run_unscored"] = tally(run for run in facts.runs if run.run in compared).unscored
    return dict((+found).most_common())
