"""Scores runs again from the snapshots that were kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_sdk.errors import GyreError, ScoringError, TaskError
from gyre_sdk.harness.scoring.attempts import score_snapshot
from gyre_sdk.harness.scoring.record import RESCORED, Evaluated, append, evaluated, evaluations, tests_digest
from gyre_sdk.harness.task import Task, TaskSet
from gyre_sdk.journal import Journal
from gyre_sdk.records import Score


@dataclass(frozen=True, slots=True)
class Again:
    """What scoring a run again came to."""

    run: str
    task: str
    before: Score
    now: Score | None
    """None when it could not be scored again."""
    said: str = ""
    """Why not, or what is different about it: changed tests."""

    @property
    def same(self) -> bool:
        """Whether the reward and its parts are the same."""
        return self.now is not None and (self.now.reward, self.now.parts) == (self.before.reward, self.before.parts)


def kept(journal: Journal, runs: list[str] | None = None) -> list[Evaluated]:
    """Return the evaluations with a kept snapshot, the last of each run.

    Args:
        runs: only these; None is all.

    Raises:
        ScoringError: a run that was named has none; says what to do.
    """
    found = {entry.run: entry for entry in evaluations(journal) if entry.score.snapshot is not None}
    if runs is None:
        return list(found.values())
    missing = [run for run in runs if run not in found]
    if missing:
        raise ScoringError(
            f"no snapshot of run {missing[0]!r} is on record in {journal.path}; open sessions with keep_snapshots=True"
            " to score their runs again"
        )
    return [found[run] for run in runs]


def rescore(
    store: Path, entries: list[Evaluated], *, tasks: TaskSet | None = None, engine: str | None = None, at: float
) -> Iterator[Again]:
    """Score runs again, one after the other, and put each on record beside the first time.

    Args:
        tasks: where their tasks are; None loads each from the folder that it came from.
        engine: URL of the Docker engine; None is $DOCKER_HOST or the default socket.
        at: time of the record, seconds since the epoch.

    The reward on record of a run never changes: what was found is told, and kept in the stream `scoring`.
    """
    for entry in entries:
        try:
            task = _task(entry, tasks)
            assert entry.score.snapshot is not None
            now = score_snapshot(task, entry.score.snapshot, seal=entry.seal, engine=engine)
        except GyreError as error:
            yield Again(entry.run, entry.task, entry.score, None, str(error))
            continue
        append(store, RESCORED, [evaluated(entry.run, task, now, None)], at=at)
        changed = "" if entry.tests == tests_digest(task) else "the tests are not those of the first time"
        yield Again(entry.run, entry.task, entry.score, now, changed)


def _task(entry: Evaluated, tasks: TaskSet | None) -> Task:
    if tasks is not None:
        return tasks[entry.task]
    if not entry.source:
        raise TaskError(
            f"task {entry.task!r} of run {entry.run} was not loaded from a folder; say where it is: --tasks"
        )
    return Task.load(entry.source)
