"""Fingerprints of tensors: the trainer takes them of what it wrote, an engine of what it serves, and they must agree.

The bytes are read as 64-bit words and summed with pseudo-random odd factors, mod 2^64: every changed word changes the
sum, it costs one pass on the device where the tensor lies, and nothing is copied to the host. It is meant to find
accidents (old, missing, mixed up or damaged weights), not an adversary. The factors are splitmix64 (Steele, Lea,
Flood, OOPSLA 2014).

Shapes: C words of a chunk, N bytes of one.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["fingerprint"]

_CHUNK = 1 << 20
"""Words that are summed at a time: bounds the memory of a large tensor."""


def fingerprint(tensor: torch.Tensor) -> str:
    """Return dtype, shape and weighted sum of a tensor's words. -0.0 counts as 0.0: they multiply alike."""
    flat = tensor.detach().contiguous().reshape(-1)
    factors_C = _factors(flat.device)
    size = _CHUNK * 8 // flat.element_size()
    total = 0
    for chunk, start in enumerate(range(0, len(flat), size)):
        words_C = _words(flat[start : start + size])
        total += int((words_C * factors_C[: len(words_C)]).sum()) * int(_odd(np.array([chunk]), seed=1)[0])
    shape = "x".join(str(size) for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}:{shape}:{total % 2**64:016x}"


def _words(part: torch.Tensor) -> torch.Tensor:
    fresh = part + 0 if part.is_floating_point() else part.clone()  # aligned, and without -0.0
    bytes_N = fresh.view(torch.uint8)
    rest = -len(bytes_N) % 8
    if rest:
        bytes_N = torch.cat([bytes_N, bytes_N.new_zeros(rest)])
    return bytes_N.view(torch.int64)


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_odd(np.arange(_CHUNK), seed=0).view(np.int64)).to(device)


def _odd(index: npt.NDArray[np.int64], *, seed: int) -> npt.NDArray[np.uint64]:
    """Return the splitmix64 outputs of a seed at these places, made odd."""
    with np.errstate(over="ignore"):
        z = (index.astype(np.uint64) + np.uint64(1 + (seed << 40))) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)
