"""What passes between cells: tensors of a model in one order everywhere, and a fingerprint that both ends compare.

Weights that pass are those that are trained, and the buffers; with adapters that is little. The rest is the same files on
every cell: its fingerprint is compared once. Gradients pass as un-normalised sums in float32, or wider where the weights
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

BUCKET = 1 << 22
"""Numbers that pass in one message."""
_CHUNK = 1 << 18
"""Numbers that are hashed together."""
_MASK = (1 << 64) - 1
_STEP = 0x5851F42D4C957F2D
_GOLDEN = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def trainable(model: Any) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name; tied ones once."""
    return {name: one for name, one in model.named_parameters() if one.requires_grad}


def weights(model: Any) -> dict[str, Tensor]:
    """Return what differs from one version to the next: the parameters that are trained, and the buffers."""
    return {name: one.detach() for name, one in (*trainable(model).items(), *model.named_buffers())}


def frozen(model: Any) -> dict[str, Tensor]:
    """Return the parameters that are not trained."""
    return {name: one.detach() for name, one in model.named_parameters() if not one.requires_grad}


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients that there are, in the type in which they are summed."""
    found = {name: one.grad for name, one in trainable(model).items() if one.grad is not None}
    return {name: grad.detach().to(summed(grad.dtype)) for name, grad in found.items()}


def summed(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are summed: float32, or wider."""
    return torch.promote_types(dtype, torch.float32)


def fingerprint(tensors: Mapping[str, Tensor], alive: Callable[[], None] = lambda: None) -> str:
    """Return a hash of names, shapes, types and bits. It tells what was damaged or is another's, not what was forged.

    Sums of the numbers' bits times odd numbers, modulo 2^64: a pass over memory, on whatever device they are. `alive` is
    called for each piece.
    """
    found = blake2b(digest_size=16)
    for name, tensor in tensors.items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_bits(tensor, alive):x}\n".encode())
    return found.hexdigest()


def _bits(tensor: Tensor, alive: Callable[[], None]) -> int:
    found = 0
    numbers = tensor.detach().reshape(-1)
    for chunk in numbers.view(_INTEGERS[tensor.element_size()]).split(_CHUNK):
        alive()
        odd = _odd(str(tensor.device))[: len(chunk)]
        found = (found * _STEP + int((chunk.to(torch.int64) * odd).sum())) & _MASK
    return found


@cache
def _odd(device: str) -> Tensor:
    return torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device) * _GOLDEN | 1


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield flat views, in order, of up to `BUCKET` numbers of one type together. Contiguous tensors only."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        for piece in tensor.detach().view(-1).split(BUCKET):
            if bucket and (bucket[0].dtype != piece.dtype or size + len(piece) > BUCKET):
                yield bucket
                bucket, size = [], 0
            if len(piece):
                bucket.append(piece)
                size += len(piece)
    if bucket:
        yield bucket


class Sums:
    """Gradients that were added up for a batch, by the parameters' names."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._found: dict[str, Tensor] = {}

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add tensors, which are this object's from now on."""
        for name, gradient in gradients.items():
            if name in self._found:
                self._found[name].add_(gradient)
            else:
                self._found[name] = gradient

    def found(self) -> Mapping[str, Tensor]:
        """Return what was found, by name."""
        return self._found

    def add_to(self, model: Any) -> None:
        """Add what was found into the parameters' `.grad`; one that nobody has a gradient of is left as it is."""
        for name, parameter in trainable(model).items():
            if name in self._found:
                add_gradient(parameter, self._found[name].to(parameter.device))


def add_gradient(parameter: Tensor, found: Tensor) -> None:
    """Add into a parameter's `.grad`. `found`, a shard where the parameter is one, may be of a wider type."""
    if parameter.grad is not None:
        found = found + parameter.grad.to(found.dtype)
    parameter.grad = found.to(parameter.dtype)
