"""A rollout worker and a weight transfer for TRL's `AsyncGRPOTrainer`, in one object.

    gyre = AsyncRollouts(stack)
    AsyncGRPOTrainer(model=..., rollout_worker=gyre, weight_transfer=gyre, train_dataset=gyre.dataset(), args=...)

Runs go on while TRL trains. Each closed group becomes samples: one per selected trajectory, whose mask marks the tokens
that it owns, so that each sampling event is trained once. Weights go to the stack's replicas under gyre's versions; a
sample carries the least of its tokens' versions, in TRL's count.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from typing import Literal
from uuid import uuid4

from datasets import Dataset
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.adapters import without_gpu
from gyre_sdk.trainer.adapters.groups import ClosedGroup, Groups
from gyre_sdk.trainer.adapters.samples import Weighing, samples_of
from gyre_sdk.trainer.rollouts import Plan
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import make_sealer
from gyre_sdk.trainer.units import Sealer

_QUEUED_SAMPLES = 256
_QUEUED_METRICS = 4096
_LOOK = 1.0
_STOP_SECONDS = 5.0


class AsyncRollouts:
    """Runs the agent of a stack and hands on what can be trained. Use it in the main process only.

    Args:
        stack: running processes. `rollout.runs_per_group` and `rollout.concurrency` say how runs are made;
            `rollout.staleness` steps' worth of `rollout.groups_per_step` groups, and one step more, are in flight.
        sealer: how rows are made; None as `[train]` says.
        weighing: `run`: within a group, runs weigh the same however long they are; `token`: every token weighs the same.
        temperature: the trainer's; targets sampled at another one are left out and counted.
    """

    rollout_buffer: queue.Queue[RolloutSample]
    """What TRL's trainer takes samples from."""
    metrics_queue: queue.Queue[dict[str, float | tuple[float, float]]]
    """What it takes metrics from."""

    def __init__(
        self,
        stack: Stack,
        sealer: Sealer | None = None,
        *,
        weighing: Literal["run", "token"] = "run",
        temperature: float = 1.0,
    ) -> None:
        without_gpu.prepare()
        self.rollout_buffer = queue.Queue(_QUEUED_SAMPLES)
        self.metrics_queue = queue.Queue(_QUEUED_METRICS)
        self._stack = stack
        self._groups = Groups(stack, sealer or make_sealer(stack.config.train, stack.base))
        self._weighing = Weighing(weighing)
        self._temperature = temperature
        rollout = stack.config.rollout
        self._plan = Plan(
            groups_per_step=rollout.groups_per_step,
            runs_per_group=rollout.runs_per_group,
            staleness=rollout.staleness,
            publish_every=1,
            steps=stack.config.train.steps,
            seed=stack.config.tasks.seed,
        )
        self._room = threading.Semaphore(self._plan.limit(0, 0))
        """Groups that may be in flight, their samples not yet taken over by the queue included."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._begin_groups, name="rollouts", daemon=True)
        self._ids = itertools.count()
        self._beat = time.monotonic()
        self._trl_versions: dict[int, int] = {}
        """gyre's version -> TRL's."""

    def dataset(self) -> Dataset:
        """Return the stack's tasks as a TRL dataset, by which TRL counts epochs."""
        return Dataset.from_dict({"prompt": [task.instruction for task in self._stack.tasks]})

    # -- RolloutWorkerProtocol -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to make runs. TRL calls it once weights were sent for the first time."""
        without_gpu.register()
        self._beat = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Begin no more runs, and let those in flight end for some seconds. Idempotent."""
        self._stopping.set()
        self._room.release()
        if self._thread.ident is not None:
            self._thread.join()
        self._groups.stop(_STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """Learn TRL's number of the version that is served now."""
        self._trl_versions[self._stack.publisher.current.version] = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise when no further samples can be expected.

        Raises:
            TrainerError: groups cannot be sealed, a process was given up, or no group has closed for so long.
        """
        self._groups.check()
        silent = time.monotonic() - self._beat
        if silent > stale_after_s:
            raise TrainerError(
                f"no group of runs has closed for {silent:.0f} s (heartbeat_stale_after_s is {stale_after_s:.0f}); look at"
                " the logs below output.dir, or raise the limit if runs take that long"
            )

    # -- WeightTransferProtocol ----------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Nothing to set up: the stack has its publisher."""

    def pause(self) -> None:
        """Nothing to pause: a replica changes its weights between tokens, and calls go on across it."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish a full set of weights to the replicas, under a fresh version.

        Raises:
            PublishError: a replica could not be brought to it.
        """
        tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in iterator}
        self._stack.publisher.publish(tensors, len(self._trl_versions))

    def resume(self) -> None:
        """Nothing to resume."""

    def destroy(self) -> None:
        """Nothing to release: the stack ends with its block."""

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def _begin_groups(self) -> None:
        """Begin groups as there is room for them, the tasks in a seeded order, round after round."""
        tasks, session = self._stack.tasks, uuid4().hex[:8]
        for index in itertools.count():
            self._room.acquire()
            if self._stopping.is_set():
                return
            task = tasks[self._plan.task_at(index, len(tasks))]
            self._groups.begin(task, f"trl-{session}-{index:06d}", self._plan.runs_per_group, self._closed)

    def _closed(self, group: ClosedGroup) -> None:
        """Hand on a group; waits while the queue is full, which holds back further runs."""
        self._beat = time.monotonic()
        number = next(self._ids)
        samples, dropped = samples_of(
            group, number, weighing=self._weighing, temperature=self._temperature, version=self._in_trls_count
        )
        for sample in samples:
            sample.enqueued_at = time.time()
            while not self._stopping.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=_LOOK)
                    break
                except queue.Full:
                    self._beat = time.monotonic()
        self._tell(group, dropped)
        self._room.release()

    def _in_trls_count(self, version: int) -> int:
        known = dict(self._trl_versions)
        found = known.get(version)
        if found is not None:
            return found
        # a version that was routed a moment ago and is about to be announced, or one from before this trainer
        return max(known.values(), default=0) + 1 if version > max(known, default=0) else 0

    def _tell(self, group: ClosedGroup, dropped: dict[str, int]) -> None:
        credit = group.sealed.credit
        told: dict[str, float | tuple[float, float]] = {
            "rollout/scored": (float(credit.scored), float(max(credit.started, 1))),
            "rollout/groups_trained": (float(credit.dropped is None), 1.0),
            **{f"untrained/{name}_total": float(count) for name, count in dropped.items()},
        }
        if credit.mean is not None:
            told["rollout/reward"] = (credit.mean * credit.scored, float(credit.scored))
        try:
            self.metrics_queue.put_nowait(told)
        except queue.Full:
            pass  # a trainer that does not log holds nothing up
