"""Rollouts: plans groups of runs, has the agent run on them, closes groups. No torch.

A group is a task and N runs of it. Groups are planned in a seeded order, durably, each at the next index; the index is
the cursor. Bursts consume groups in that order, mu * B at a time, so fast tasks are not over-represented; within a burst
each step takes the B that close next, so that no step waits for a slow group while others are there.

How far dispatch may run ahead (arXiv:2609.33848): at a burst's boundary, `(phi + mu) * B` groups are in flight for an
allowed staleness of phi steps and bursts of mu steps. So with c groups used by the steps behind the weights being served,
group i may start once i < c + (phi + mu) * B. Training goes on meanwhile.

Runs go on elsewhere, in the agents' process: what is here asks for them, in order, and learns what came of them.
A run that fails never stops the loop: it is recorded, and its group closes with what it has.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gyre_sdk import events
from gyre_sdk.credit import GroupCredit, group_credit
from gyre_sdk.errors import ServiceError, TrainerError
from gyre_sdk.harness.ports import Observer
from gyre_sdk.harness.scoring.policy import stands
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord, RunStatus
from gyre_sdk.trainer.agents.outcome import Outcome, OutcomeKind
from gyre_sdk.trainer.ledger import GroupClosed, GroupPlanned, Ledger
from gyre_sdk.trainer.slots import End, Slots

_log = logging.getLogger("gyre.trainer")
_SERVICE_ATTEMPTS = 3
_LOOK = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How many, how far ahead, in which order."""

    groups_per_step: int
    """B."""
    runs_per_group: int
    """N."""
    staleness: int
    """phi."""
    publish_every: int
    """mu."""
    steps: int
    """Of the whole training; no group is planned that no step will use."""
    seed: int = 0

    def limit(self, published_step: int, used: int) -> int:
        """Return the number of groups that may have been started.

        Args:
            published_step: steps behind the weights being served.
            used: groups that these steps used.
        """
        ahead = min(self.staleness + self.publish_every, self.steps - published_step)
        return used + max(0, ahead) * self.groups_per_step

    def task_at(self, index: int, tasks: int) -> int:
        """Return which task the group at an index is about: every task once per round, each round shuffled anew."""
        around, place = divmod(index, tasks)
        order = list(range(tasks))
        random.Random(f"{self.seed}:{around}").shuffle(order)
        return order[place]


@dataclass(frozen=True, slots=True)
class Flow:
    """What is under way: counters of this process's runs, and times of a few of them."""

    dispatched: int
    """Runs handed out."""
    started: int
    """Runs that began."""
    finished: int
    """Runs that ended."""
    ages: Mapping[tuple[str, int], float]
    """Group and member of the runs under way -> seconds that they have taken so far."""
    durations: tuple[float, ...]
    """Seconds that the last runs to end took."""
    longest: float
    """Seconds that the longest of all runs that ended took; 0 before the first."""
    open: Mapping[str, int]
    """Group in flight -> members that have not ended."""


_NONE: Mapping[tuple[str, int], float] = {}
_REMEMBERED = 256
"""Durations that are kept."""

BeginRun = Callable[[Task, str, int, Callable[[Outcome], None]], None]
"""Task, group, member, who is told -> begins one session and returns; who is told learns the outcome once, in any thread."""


class Rollouts:
    """Keeps groups in flight and hands closed ones to the trainer."""

    def __init__(
        self,
        plan: Plan,
        tasks: Sequence[Task],
        begin: BeginRun,
        *,
        journal: Journal,
        ledger: Ledger,
        observer: Observer,
        concurrency: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`concurrency`: runs at a time. `check` raises when the processes behind the runs were given up."""
        if not tasks:
            raise TrainerError("there are no tasks to train on; check [tasks] in the config")
        self._plan = plan
        self._tasks = tasks
        self._by_name = {task.name: task for task in tasks}
        self._begin = begin
        self._journal = journal
        self._ledger = ledger
        self._observer = observer
        self._slots = Slots(concurrency)
        self._changed = threading.Condition()
        self._open: dict[str, int] = {}
        """Group in flight -> members that have not ended."""
        self._limit = 0
        self._dispatched = 0
        self._finished = 0
        self._began: dict[tuple[str, int], float] = {}
        """Members under way, and when they began."""
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)
        self._longest = 0.0
        self._stopping = False
        self._failure: BaseException | None = None
        """What kept a run from being counted: its group will never close."""
        self._check = check

    # -- the trainer's side ------------------------------------------------------------------------------------------

    def start(
        self, published_step: int, unfinished: Sequence[str] = (), under_way: Mapping[tuple[str, int], float] = _NONE
    ) -> None:
        """Take up groups that an earlier trainer left unfinished, then plan new ones.

        Args:
            under_way: group and member of runs that it asked for and that go on -> seconds that they have taken so far:
                they are waited for, not run again.
        """
        with self._changed:
            for group in unfinished:
                self._dispatch(group, under_way)
        self.advance(published_step)

    def advance(self, published_step: int) -> None:
        """Allow more groups: weights that `published_step` steps are behind are served now."""
        with self._changed:
            steps = self._ledger.state.steps
            used = sum(len(kept.groups) for step, kept in steps.items() if step <= published_step)
            self._limit = max(self._limit, self._plan.limit(published_step, used))
            while not self._stopping and self._ledger.state.next_group < self._limit:
                index = self._ledger.state.next_group
                task = self._tasks[self._plan.task_at(index, len(self._tasks))]
                group = f"group-{index:06d}"
                self._ledger.add(GroupPlanned(group, index, task.name, self._plan.runs_per_group), at=time.time())
                self._dispatch(group)

    def closed(self, groups: Sequence[str], count: int | None = None) -> Iterator[GroupClosed]:
        """Yield these groups as they close, in the order in which they do; of those that have closed, the first one given first.

        Args:
            count: how many to yield; None is all.

        Raises:
            TrainerError: rollouts were stopped or cannot go on.
        """
        waiting = list(groups)
        left = len(waiting) if count is None else count
        while left:
            with self._changed:
                found = next((group for group in waiting if self._ledger.state.groups[group].closed), None)
                if found is None:
                    if self._stopping:
                        raise TrainerError("rollouts were stopped")
                    if self._failure is not None:
                        raise TrainerError(f"a run could not be counted: {self._failure!r}") from self._failure
                    self._changed.wait(_LOOK)
            if found is None:
                self._check()
                continue
            waiting.remove(found)
            left -= 1
            closed = self._ledger.state.groups[found].closed
            assert closed is not None
            yield closed

    def flow(self) -> Flow:
        """Return what is under way now."""
        now = time.monotonic()
        with self._changed:
            return Flow(
                dispatched=self._dispatched,
                started=self._finished + len(self._began),
                finished=self._finished,
                ages={member: now - began for member, began in self._began.items()},
                durations=tuple(self._durations),
                longest=self._longest,
                open=dict(self._open),
            )

    def stop(self, seconds: float) -> bool:
        """Start nothing more; wait for the runs in flight, for at most `seconds`. True when all ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return self._slots.stop(seconds)

    # -- groups --------------------------------------------------------------------------------------------------------

    def _dispatch(self, group: str, under_way: Mapping[tuple[str, int], float] = _NONE) -> None:
        """Ask for the members of a group that have no ended run yet, in their turn."""
        planned = self._ledger.state.groups[group]
        task = self._by_name.get(planned.task)
        if task is None:
            raise TrainerError(
                f"group {group} is about task {planned.task!r}, which is not among the tasks any more; keep [tasks] as"
                " it was, or start with a new store"
            )
        have = {run.member for run in usable_runs(self._journal.runs(group=group))}
        missing = [member for member in range(planned.members) if member not in have]
        self._open[group] = len(missing)
        self._dispatched += len(missing)
        for member in missing:
            give = self._slots.submit
            if (seconds := under_way.get((group, member))) is not None:
                self._began[group, member] = time.monotonic() - seconds
                give = self._slots.occupy
            give(lambda end, member=member: self._member(task, group, member, end))  # type: ignore[misc]
        if not missing:
            self._close(group)

    def _member(self, task: Task, group: str, member: int, end: End, attempt: int = 1) -> None:
        """Ask for a member's run; it has a slot until `end`."""
        with self._changed:
            if self._stopping:
                self._began.pop((group, member), None)
                end()
                return
            self._began.setdefault((group, member), time.monotonic())
        try:
            self._begin(task, group, member, lambda outcome: self._ended(task, group, member, end, attempt, outcome))
        except Exception as error:  # boundary: whoever waits for groups raises it
            self._fail(error)
            end()

    def _ended(self, task: Task, group: str, member: int, end: End, attempt: int, outcome: Outcome) -> None:
        """Count a member's run, or ask for it again where the service was away before it was recorded."""
        try:
            if outcome.kind is OutcomeKind.RAISED:
                _log.info("run %d of %s: %s", member, group, outcome)
            elif outcome.kind is not OutcomeKind.ENDED:
                _log.warning("run %d of %s: %s", member, group, outcome)
            if outcome.kind is OutcomeKind.SERVICE and attempt < _SERVICE_ATTEMPTS:
                later = threading.Timer(2.0 ** (attempt - 2), self._again, (task, group, member, end, attempt))
                later.daemon = True
                later.start()
                return
            self._count(group, member)
        except Exception as error:  # boundary: whoever waits for groups raises it
            self._fail(error)
        end()

    def _again(self, task: Task, group: str, member: int, end: End, attempt: int) -> None:
        try:
            if self._unrecorded(group, member):
                self._member(task, group, member, end, attempt + 1)
                return
            self._count(group, member)
        except Exception as error:  # boundary: whoever waits for groups raises it
            self._fail(error)
        end()

    def _count(self, group: str, member: int) -> None:
        """Take a member as ended, and close its group after the last one."""
        with self._changed:
            self._durations.append(time.monotonic() - self._began.pop((group, member)))
            self._longest = max(self._longest, self._durations[-1])
            self._finished += 1
            self._open[group] -= 1
            if self._open[group] == 0:
                self._close(group)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _unrecorded(self, group: str, member: int) -> bool:
        return all(run.member != member for run in self._journal.runs(group=group))

    def _close(self, group: str) -> None:
        """Record a group whose members have all ended. The lock is held."""
        del self._open[group]
        runs = usable_runs(self._journal.runs(group=group))
        versions = [run.dispatch_version for run in runs]
        self._ledger.add(
            GroupClosed(group, [run.run for run in runs], [run.reward for run in runs], min(versions, default=0)),
            at=time.time(),
        )
        self._observer(told(group, group_credit(runs)))
        self._changed.notify_all()


def told(group: str, credit: GroupCredit) -> events.GroupClosed:
    """Return what observers learn of a group whose runs have all ended."""
    return events.GroupClosed(
        time.time(),
        group,
        scored=credit.scored,
        started=credit.started,
        mean_reward=credit.mean,
        trainable=credit.dropped is None,
    )


def usable_runs(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the ended runs of a group that count, one per member: the last that stands by the error policy."""
    members: dict[int, RunRecord] = {}
    for run in runs:
        if stands(run.status):
            members[run.member] = run
    return [members[member] for member in sorted(members)]


def cancel_orphans(journal: Journal, *, alive: str = "", service: ServiceClient | None = None) -> int:
    """End runs that a dead process left running as cancelled; return how many.

    Args:
        alive: owner whose runs go on.
        service: the one that has served them all the time: it breaks off their calls first.
    """
    orphans = [run for run in journal.runs(status=RunStatus.RUNNING) if not alive or run.owner != alive]
    error = "the process that ran it ended"
    if service is not None:
        for run in orphans:
            service.end_run(run.run, RunStatus.CANCELLED, reward=None, parts={}, error=error, placeholder=False)
        return len(orphans)
    writes = [journal.end_run(run.run, RunStatus.CANCELLED, at=time.time(), error=error) for run in orphans]
    for write in writes:
        write.result()
    return len(orphans)


def cancel_runs_of(owner: str, journal: Journal, service: ServiceClient, observer: Observer) -> list[RunRecord]:
    """End the runs of a process that has just died as cancelled, where the service knows them; return those that had ended."""
    ended = []
    for run in journal.runs():
        if run.owner != owner:
            continue
        if run.status is not RunStatus.RUNNING:
            ended.append(run)
            continue
        try:
            service.end_run(
                run.run, RunStatus.CANCELLED, reward=None, parts={}, error="its process died", placeholder=False
            )
        except ServiceError as error:
            _log.warning("run %s: %s", run.run, error)  # the next start ends it
            continue
        now = time.time()
        observer(events.RunEnded(now, run.run, RunStatus.CANCELLED, None, now - run.created_at))
    return [run for run in ended if stands(run.status)]
