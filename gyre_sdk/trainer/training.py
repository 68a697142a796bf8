"""Training: wires rollouts, units, ledger, trainer and publication into the loop.

    plan -> runs -> closed groups -> units -> gradient -> step -> commit -> publish -> further runs; checkpoint

The trainer's thread takes closed groups as they come, while further runs go on in the agents' process. What is durable, and in which
order, is the ledger's: a step is committed before its weights are published, and published before its checkpoint counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gyre_sdk import events
from gyre_sdk.credit import Baseline
from gyre_sdk.errors import TrainerError
from gyre_sdk.harness.hooks import unobserved
from gyre_sdk.harness.ports import Observer
from gyre_sdk.select import ROLES, Role
from gyre_sdk.trainer.agents.client import members
from gyre_sdk.trainer.agents.wire import Order
from gyre_sdk.trainer.checkpoints import folder_digest, remove_after
from gyre_sdk.trainer.config import TrainConfig, TrainerConfig
from gyre_sdk.trainer.ledger import (
    CheckpointSaved,
    GroupClosed,
    GroupTaken,
    LedgerState,
    Resumed,
    StepCommitted,
    StepStarted,
    UnitSealed,
)
from gyre_sdk.trainer.purpose import check_purpose
from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.rollouts import Plan, Rollouts
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.team import Burst, Start, reference_of
from gyre_sdk.trainer.trainer import StepReport, make_trainer
from gyre_sdk.trainer.units import Sealer, Unit

if TYPE_CHECKING:
    from gyre_sdk.trainer.crew import Crew

_UNTRAINED = "untrained/"
_STOP_SECONDS = 5.0
_HOPELESS_STEPS = 2
"""Steps in a row without a scored run, or without an answer of the policy in any, after which training gives up."""


class TrainReport(msgspec.Struct, frozen=True):
    """What a training came to, over all processes that worked on it."""

    steps: int
    resumed_from: int
    """Step that this process took up at."""
    skipped: int
    """Steps with nothing to train."""
    runs: int
    """Runs of the groups that the steps used."""
    trained_tokens: int
    """Sampled tokens that were targets of a step."""
    version: int
    """Version being served at the end."""
    versions: int
    """Version numbers taken in this store, the starting policy not counted."""
    seconds: float
    """Wall time of this process's part."""
    metrics: dict[str, float] = {}
    """Of the last step that trained."""
    untrained: dict[str, int] = {}
    """What the steps' groups recorded and did not train, by reason."""


@dataclass(slots=True)
class _Step:
    """What is gathered while a step's batch is open."""

    groups: list[GroupClosed] = field(default_factory=list)
    untrained: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    waited: float = 0.0
    """Seconds in which no closed group was there to train on."""

    def rewards(self) -> list[float]:
        return [reward for group in self.groups for reward in group.rewards if reward is not None]

    def runs(self) -> int:
        return sum(len(group.runs) for group in self.groups)


def train(
    config: TrainerConfig,
    observer: Observer = unobserved,
    *,
    stack: Stack | None = None,
    base: Path | None = None,
    ranks: Ranks | None = None,
) -> TrainReport:
    """Train to `train.steps`, from wherever the store and the output folder say that it stands.

    Args:
        stack: running processes to use; None starts and stops its own.
        ranks: the processes that train together, this one leading; None for this one alone.

    Raises:
        SettingsError: the config does not allow training.
        TrainerError: training cannot go on.
    """
    check_purpose(config, processes=1 if ranks is None else ranks.size)
    if stack is None:
        with Stack(config, observer, base=base) as own:
            return train(config, stack=own, ranks=ranks)
    return _Training(stack, ranks).run()


_BASELINES = {
    "group": Baseline.SAMPLE_STD,
    "population": Baseline.POPULATION_STD,
    "none": Baseline.MEAN,
    "leave_one_out": Baseline.LEAVE_ONE_OUT,
}


def make_sealer(config: TrainConfig, base: Path = Path()) -> Sealer:
    """Return what seals the units that a config describes.

    Args:
        base: folder of the config file: modules next to it can be named.
    """
    roles = tuple(Role(name, role.weight, role.j_max) for name, role in config.roles.items())
    return Sealer(
        j_max=config.j_max or None,
        seed=config.seed,
        baseline=_BASELINES[config.scale_rewards],
        unit_tokens=config.unit_tokens,
        rule=config.selection,
        roles=roles or ROLES,
        max_staleness=config.max_staleness,
        mask_truncated=config.mask_truncated_completions,
        credit_hook=config.credit_hook,
        base=base,
    )


class _Training:
    """One training on a running stack."""

    def __init__(self, stack: Stack, ranks: Ranks | None) -> None:
        self._stack = stack
        self._ranks = ranks
        self._config = config = stack.config
        self._ledger = stack.ledger
        self._plan = Plan(
            groups_per_step=config.rollout.groups_per_step,
            runs_per_group=config.rollout.runs_per_group,
            staleness=config.rollout.staleness,
            publish_every=config.rollout.publish_every,
            steps=config.train.steps,
            seed=config.tasks.seed,
        )
        self._rollouts = Rollouts(
            self._plan,
            stack.tasks,
            lambda task, group, member, done: stack.agents.begin(task, Order(task.name, group, member), done),
            journal=stack.journal,
            ledger=stack.ledger,
            observer=stack.observer,
            concurrency=config.rollout.concurrency,
            check=self._check,
        )
        self._sealer = make_sealer(config.train, stack.base)
        self._step = _Step()
        self._number = stack.recovery.step
        """Of the step whose batch is open."""
        self._crew = self._make_crew() if stack.core is not None else None
        self._burst = Burst(config.rollout.publish_every, config.train.steps)
        self._found = frozenset(stack.recovery.closed)
        """Groups that an earlier process closed: what was wrong with them may be corrected by now."""
        self._hopeless = 0

    def _make_crew(self) -> Crew:
        from gyre_sdk.trainer.crew import Crew

        return Crew(self._stack, self._rollouts, self._awaited)

    def run(self) -> TrainReport:
        """Train, and report."""
        began = time.monotonic()
        stack, recovery = self._stack, self._stack.recovery
        steps = self._config.train.steps
        checkpoint = recovery.checkpoint.path if recovery.checkpoint else None
        if self._ranks is not None:
            self._ranks.share(Start(checkpoint) if recovery.step < steps else None)
        if recovery.step < steps:
            remove_after(stack.checkpoints, recovery.step)
            if len(self._ledger.state.steps) > recovery.step:
                self._ledger.add(Resumed(recovery.step), at=time.time())
            self._trainer = trainer = make_trainer(
                self._config.train,
                stack.model(),
                stack.checkpoints,
                self._batch,
                reference_model=reference_of(self._config.policy, self._config.train),
                version=self._version,
                on_step=self._on_step,
                on_saved=self._on_saved,
                ranks=self._ranks,
                core=stack.core,
            )
            stack.observer(events.PhaseStarted(time.time(), "train", steps - recovery.step))
            try:
                self._rollouts.start(recovery.step, recovery.unfinished, members(stack.agents.under_way()))
                with self._crew or nullcontext():
                    trainer.train(resume_from_checkpoint=checkpoint)
            finally:
                self._rollouts.stop(_STOP_SECONDS)
        return report(self._ledger.state, recovery.step, stack.publisher.current.version, time.monotonic() - began)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _batch(self, step: int) -> Iterator[Unit]:
        """Yield the units of a step as its groups close."""
        self._step = current = _Step()
        self._number = step
        self._ledger.add(StepStarted(step, settings=self._sealer.settings), at=time.time())
        versions = self._ledger.state.versions

        def lag(version: int) -> int:
            """Return how many optimizer steps lie between a version and the policy that this step changes."""
            return step - 1 - (versions[version][1] if version in versions else 0)

        asked = time.monotonic()
        for closed in self._rollouts.closed(self._awaited(), self._config.rollout.groups_per_step):
            current.waited += time.monotonic() - asked
            self._ledger.add(GroupTaken(step, closed.group), at=time.time())
            current.groups.append(closed)
            sealed = self._sealer.seal(self._stack.journal, closed.group, closed.runs, lag=lag)
            current.untrained.update(sealed.dropped)
            if self._crew is not None:
                self._crew.sealed(sealed, len(closed.runs))
            for unit in sealed.units:
                self._ledger.add(UnitSealed(unit.id, unit.group, unit.runs, unit.tokens), at=time.time())
                yield unit
            asked = time.monotonic()

    def _awaited(self) -> list[str]:
        """Return the groups of the open burst that training waits for: those of its open step and of its later ones."""
        return self._ledger.awaited(
            self._number, self._config.rollout.groups_per_step, max(0, self._burst.left(self._number))
        )

    def _check(self) -> None:
        """Raise when training cannot go on: a process was given up, or nobody moves cells any more."""
        (self._crew or self._stack).check()

    def _version(self) -> int:
        """Return the number of the weights in training: the one being served, or the next where steps lie between."""
        return self._stack.publisher.current.version + self._burst.changed

    def _on_step(self, report: StepReport) -> None:
        current, config = self._step, self._config
        rewards = current.rewards()
        report.metrics.update({f"{_UNTRAINED}{name}": float(count) for name, count in current.untrained.items()})
        report.metrics["seconds"] = time.monotonic() - current.began
        report.metrics["seconds_waiting"] = current.waited
        report.metrics["runs/scored"] = float(len(rewards))
        report.metrics["runs/started"] = float(current.runs())
        if rewards:
            report.metrics["reward"] = sum(rewards) / len(rewards)
        self._ledger.add(StepCommitted(report.step, report.units, report.metrics), at=time.time())
        if report.skipped:
            self._skip(report.step, current)
        else:
            self._stack.observer(
                events.StepTaken(
                    at=time.time(),
                    step=report.step,
                    steps=config.train.steps,
                    loss=report.metrics["loss"],
                    grad_norm=report.metrics["grad_norm"],
                    trained_tokens=report.totals.targets,
                    runs=report.totals.runs,
                    mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
                    success=sum(r >= config.rollout.success_at for r in rewards) / len(rewards) if rewards else 0.0,
                )
            )
        if self._burst.publishes(report):
            self._stack.publisher.publish(self._trainer.model, report.step)  # `follow` does its part on other ranks
        if self._burst.ends(report):
            self._rollouts.advance(report.step)

    def _skip(self, step: int, current: _Step) -> None:
        scored = len(current.rewards())
        counts = ", ".join(f"{name} {count}" for name, count in sorted(current.untrained.items()))
        reason = (
            f"nothing to train in {len(current.groups)} groups; scored {scored} of {current.runs()} runs ({counts})"
        )
        self._stack.observer(events.StepSkipped(time.time(), step, reason))
        wrong = self._wrong(current)
        if wrong is None:
            self._hopeless = 0
        elif any(group.group not in self._found for group in current.groups):
            self._hopeless += 1
            if self._hopeless >= _HOPELESS_STEPS:
                raise TrainerError(
                    f"no run of the last {self._hopeless} steps {wrong}, then run the same command again"
                )

    def _wrong(self, current: _Step) -> str | None:
        """Return what no run of a step has, for which nothing could be trained; None where one has it all."""
        journal, logs = self._stack.journal, self._config.output.dir / "logs" / "agents.log"
        if not current.rewards():
            ended = (run for group in current.groups for run in journal.runs(group=group.group))
            errors = (f"run {run.run} ended as {run.status}: {run.error[:500]}; " for run in ended if run.error)
            if (error := next(errors, None)) is None:
                return "got a score: let the agent call agent.score(reward), or give the tasks a scorer or tests"
            return f"got a score; {error}correct that (what the agent printed is in {logs})"
        runs = (run for group in current.groups for run in group.runs)
        if not any(call.sampled_tokens for run in runs for call in journal.call_summaries(run=run)):
            return (
                "has an answer of the policy: let the agent send its calls to agent.base_url with agent.api_key, as"
                " agent.openai() and the like do"
            )
        return None

    def _on_saved(self, step: int, folder: Path) -> None:
        self._ledger.add(CheckpointSaved(step, str(folder), folder_digest(folder, sync=True)), at=time.time())


def report(state: LedgerState, resumed_from: int, version: int, seconds: float) -> TrainReport:
    """Return what the ledger says of a training."""
    steps = [state.steps[number] for number in sorted(state.steps)]
    groups = [state.groups[group].closed for step in steps for group in step.groups]
    untrained: Counter[str] = Counter()
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith(_UNTRAINED):
                untrained[name.removeprefix(_UNTRAINED)] += int(value)
    return TrainReport(
        steps=state.committed,
        resumed_from=resumed_from,
        skipped=sum(not step.units for step in steps),
        runs=sum(len(group.runs) for group in groups if group is not None),
        trained_tokens=state.trained_tokens(),
        version=version,
        versions=len(state.versions) - 1,
        seconds=seconds,
        metrics=next((step.metrics for step in reversed(steps) if step.units), {}),
        untrained=dict(untrained),
    )
