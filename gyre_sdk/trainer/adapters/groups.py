"""Groups of runs for trainers that have a loop of their own: a thread waits for each run, and seals the group that it ends."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gyre_sdk.errors import GyreError, TrainerError
from gyre_sdk.harness.task import Task
from gyre_sdk.records import RunRecord
from gyre_sdk.trainer.rollouts import told, usable_runs
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.units import SealedGroup, Sealer

WRONG_TEMPERATURE = "target_temperature"
"""Counted targets: sampled at another temperature than the one that TRL's trainer computes with."""

_log = logging.getLogger("gyre.trainer")


@dataclass(frozen=True, slots=True)
class ClosedGroup:
    """A group whose runs have all ended."""

    task: Task
    runs: list[RunRecord]
    """Those that count, one per member."""
    sealed: SealedGroup
    """What of them can be trained."""
    sampled: int
    """Tokens that were sampled in them."""


class Workers:
    """Daemon threads that take jobs from a queue in order."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name} {n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def stop(self, seconds: float) -> bool:
        """Let running jobs end, for at most `seconds`; True when all did."""
        for _ in self._threads:
            self._jobs.put(None)
        give_up = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # boundary: top of a worker's job
                _log.exception("a rollout worker's job failed")


class Groups:
    """Runs groups on a stack, `rollout.concurrency` runs at a time."""

    def __init__(self, stack: Stack, sealer: Sealer) -> None:
        self._stack = stack
        self._sealer = sealer
        self._workers = Workers(stack.config.rollout.concurrency, "rollout")
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def begin(
        self, task: Task, group: str, members: int, done: Callable[[ClosedGroup], None], *, split: str = "train"
    ) -> None:
        """Queue the runs of a new group; `done` is called in the thread of the run that ends last."""
        sampled: list[int] = []

        def member(number: int) -> None:
            tokens = self._run(task, group, number, split)
            with self._lock:
                sampled.append(tokens)
                last = len(sampled) == members
            if last:
                self._close(task, group, sum(sampled), done)

        for number in range(members):
            self._workers.submit(lambda number=number: member(number))  # type: ignore[misc]

    def check(self) -> None:
        """Raise when groups do not close any more.

        Raises:
            TrainerError: a group could not be sealed, or engine or proxy were given up.
        """
        if self._failure is not None:
            raise TrainerError(
                f"a group of runs could not be sealed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure
        self._stack.check()

    def stop(self, seconds: float) -> bool:
        """Let runs in flight end, for at most `seconds`; True when all did. Queued ones are run too."""
        return self._workers.stop(seconds)

    def _run(self, task: Task, group: str, member: int, split: str) -> int:
        try:
            return self._stack.run_session(task, group=group, member=member, split=split).sampled_tokens
        except GyreError as error:
            _log.warning("run %d of %s: %s", member, group, error)
        except Exception as error:  # boundary: the user's agent; it is on record
            _log.info("run %d of %s: %s: %s", member, group, type(error).__name__, error)
        return 0

    def _close(self, task: Task, group: str, sampled: int, done: Callable[[ClosedGroup], None]) -> None:
        try:
            runs = usable_runs(self._stack.journal.runs(group=group))
            sealed = self._sealer.seal(self._stack.journal, group, [run.run for run in runs], lag=self._lag)
            self._stack.observer(told(group, sealed.credit))
            done(ClosedGroup(task, runs, sealed, sampled))
        except Exception as error:  # boundary: top of a group's end; `check` raises it in the trainer's thread
            _log.exception("group %s", group)
            self._failure = error

    def _lag(self, version: int) -> int:
        """Return how many optimizer steps lie between a version and the one that is served."""
        taken = self._stack.ledger.state.versions
        now, then = (
            taken[number][1] if number in taken else 0 for number in (self._stack.publisher.current.version, version)
        )
        return now - then
