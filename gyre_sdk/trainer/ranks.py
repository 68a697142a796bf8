"""The processes that train one policy together, and what passes between them.

Rank 0 leads: it alone has the units of a batch, and deals them out as they are sealed, one to each rank and round. Every
rank adds up un-normalised gradients of what it was dealt; they are summed over the ranks once, when the batch is closed.
So neither the number of processes nor the way in which units fall to them changes the gradient.

Two groups: torch's own for gradients (NCCL on GPUs, gloo on CPUs), and one on gloo for everything else. The second waits
as long as rollouts take; how long a rank may be gone is for whoever started the processes to notice.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gyre_sdk.errors import TrainerError

T = TypeVar("T")

_FOREVER = timedelta(days=365)
_BUCKET = 1 << 24
"""Numbers that are summed in one message."""


@dataclass(frozen=True, slots=True)
class Dealt(Generic[T]):
    """What a round brings a rank."""

    mine: T | None
    """None where the batch had nothing left for this rank."""
    names: list[str]
    """Of all that were dealt in the round; empty where rank 0 had none to deal, and will have more."""


class _Over(Enum):
    """Sent in place of a hand: there are no further rounds."""

    OVER = "over"


@dataclass(frozen=True, slots=True)
class _Failed:
    """Sent in place of what was expected: the leading rank cannot go on."""

    reason: str


class Ranks:
    """This process's place among those that train together. Torch's process group must be there before, or never."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER) if together else None

    @property
    def leads(self) -> bool:
        """True on the rank that has units, store and engine; where there is one process, on that."""
        return self.rank == 0

    def deal(self, units: Iterable[T]) -> Iterator[Dealt[T]]:
        """Yield what falls to this rank, round by round; as many rounds on every rank.

        Args:
            units: with an `id`; looked at on rank 0 only, and taken as they come, one for each rank in a round.

        Raises:
            TrainerError: on other ranks, when `units` raised on rank 0; there, what it raised.
        """
        waiting = iter(units) if self.leads else iter(())
        return self.rounds(iter(lambda: list(islice(waiting, self.size)), []))

    def rounds(self, rounds: Iterable[Sequence[T]]) -> Iterator[Dealt[T]]:
        """Yield what falls to this rank of rounds that are cut already.

        Args:
            rounds: of at most as many units as there are ranks; looked at on rank 0 only. An empty one reaches every rank.

        Raises:
            TrainerError: on other ranks, when `rounds` raised on rank 0; there, what it raised.
        """
        if self.size == 1:
            for round_ in rounds:
                yield Dealt(round_[0] if round_ else None, [unit.id for unit in round_])  # type: ignore[attr-defined]
            return
        waiting = iter(rounds)
        while True:
            hands: list[Any] = []
            if self.leads:
                try:
                    found = next(waiting, None)
                except BaseException as error:
                    self._scatter([_Failed(f"{type(error).__name__}: {error}")] * self.size)
                    raise
                if found is None:
                    hands = [_Over.OVER] * self.size
                else:
                    names = [unit.id for unit in found]  # type: ignore[attr-defined]
                    hands = [Dealt(unit, names) for unit in found]
                    hands += [Dealt(None, names)] * (self.size - len(found))
            hand = self._scatter(hands)
            if hand is _Over.OVER:
                return
            yield hand

    def share(self, value: T | None = None) -> T:
        """Return rank 0's value on every rank.

        Raises:
            TrainerError: rank 0 said that it cannot go on.
        """
        if self._group is None:
            return value  # type: ignore[return-value]
        box = [value if self.leads else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return _checked(box[0])

    def fail(self, reason: str) -> None:
        """Let the ranks that wait in `share` raise a `TrainerError` with the reason."""
        if self._group is not None and self.leads:
            dist.broadcast_object_list([_Failed(reason)], src=0, group=self._group)

    def add(self, numbers: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks, on the CPU."""
        found = numbers.detach().to("cpu", copy=True)
        if self._group is not None:
            dist.all_reduce(found, group=self._group)
        return found

    def any(self, flag: bool) -> bool:
        """Tell whether it is true on some rank."""
        return bool(self.add(torch.tensor(int(flag))))

    def most(self, numbers: Tensor) -> Tensor:
        """Return the largest of a small tensor's numbers over the ranks, on the CPU."""
        found = numbers.detach().to("cpu", copy=True)
        if self._group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return found

    def all(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks."""
        if self._group is None:
            return [value]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait until every rank is here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    # -- tensors of the model ------------------------------------------------------------------------------------------

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the ranks' gradients, in place. One that no rank has stays None; shards of FSDP are summed already."""
        if self.size == 1:
            return
        whole = [one for one in parameters if one.requires_grad and not isinstance(one, DTensor)]
        had = torch.tensor([one.grad is not None for one in whole], dtype=torch.int32)
        anywhere = self.add(had).tolist() if whole else []
        found = []
        for parameter, count in zip(whole, anywhere, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                found.append(parameter.grad)
        for bucket in _buckets(found):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def copy_weights(self, model: torch.nn.Module) -> None:
        """Give every rank the trainable weights and the buffers of rank 0: adapters start from random numbers."""
        if self.size == 1:
            return
        for tensor in [*model.parameters(), *model.buffers()]:
            if not isinstance(tensor, DTensor) and (tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter)):
                dist.broadcast(tensor.detach(), src=0)

    def _scatter(self, hands: list[Any]) -> Any:
        """Send each rank its own; sizes first, so that what a rank gets is as long as it is and no longer."""
        assert self._group is not None
        if self.leads:
            parts = [torch.frombuffer(bytearray(pickle.dumps(hand)), dtype=torch.uint8) for hand in hands]
            sizes = torch.tensor([len(part) for part in parts])
            dist.broadcast(sizes, src=0, group=self._group)
            sending = [dist.isend(part, rank, group=self._group) for rank, part in enumerate(parts) if rank]
            for sent in sending:
                if sent is not None:
                    sent.wait()
            return hands[0]
        sizes = torch.empty(self.size, dtype=torch.int64)
        dist.broadcast(sizes, src=0, group=self._group)
        part = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
        dist.recv(part, 0, group=self._group)
        return _checked(pickle.loads(part.numpy().tobytes()))


def _checked(value: Any) -> Any:
    if isinstance(value, _Failed):
        raise TrainerError(f"rank 0 cannot go on: {value.reason}")
    return value


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one type and place, up to `_BUCKET` numbers together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket
