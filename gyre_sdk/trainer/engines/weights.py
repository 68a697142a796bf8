"""Sets of weights from safetensors files: read, validate all of it, then copy in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from gyre_sdk.errors import PublishError

__all__ = ["WeightSession", "Weights", "expected_shapes", "place"]

Weights = dict[str, torch.Tensor]


def expected_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor a full set has; a tied head counts once, under its embedding's name."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in _tied(model)}


def _tied(model: Any) -> dict[str, str]:
    """Return `{name: name it shares its tensor with}`."""
    first: dict[int, str] = {}
    tied = {}
    keys = getattr(model, "_tied_weights_keys", None) or {}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0] in keys):
        if (owner := first.setdefault(id(tensor), name)) != name:
            tied[name] = owner
    return tied


def place(model: Any, weights: Weights) -> None:
    """Copy a complete, validated set into the model's own tensors; compiled or cached references stay valid."""
    with torch.no_grad():
        state = model.state_dict()
        for name, tensor in weights.items():
            state[name].copy_(tensor)


class WeightSession:
    """One weight update: files are added and checked one by one; `finish` gives the set when it is complete."""

    def __init__(self, model: Any) -> None:
        self._expected = expected_shapes(model)
        self._tied = _tied(model)
        self._weights: Weights = {}
        self._aliases: Weights = {}

    def add(self, path: Path) -> None:
        """Read one file into memory of our own and check every tensor in it. Nothing is kept of a bad file.

        Raises:
            PublishError: naming the file and the tensor at fault.
        """
        try:
            found = load(path.read_bytes())
        except OSError as err:
            raise PublishError(f"cannot read weights from {path}: {err.strerror or err}") from err
        except (SafetensorError, ValueError) as err:
            raise PublishError(f"{path} is not a complete safetensors file: {err}") from err
        fresh: Weights = {}
        aliases: Weights = {}
        for name, tensor in found.items():
            owner = self._tied.get(name, name)
            if owner not in self._expected:
                raise PublishError(f"{path}: tensor {name!r} is not in the model")
            if tuple(tensor.shape) != self._expected[owner]:
                raise PublishError(
                    f"{path}: tensor {name!r} has shape {tuple(tensor.shape)}, the model has {self._expected[owner]}"
                )
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise PublishError(f"{path}: tensor {name!r} ({tensor.dtype}) has values that are not finite floats")
            if name in self._weights or name in self._aliases:
                raise PublishError(f"{path}: tensor {name!r} was already sent in this weight update")
            (fresh if name == owner else aliases)[name] = tensor
        self._weights.update(fresh)
        self._aliases.update(aliases)

    def finish(self) -> Weights:
        """Return the complete set.

        Raises:
            PublishError: tensors are missing, or a tied tensor differs from the one it is tied to.
        """
        for name, tensor in self._aliases.items():
            owner = self._tied[name]
            if not torch.equal(self._weights.setdefault(owner, tensor), tensor):
                raise PublishError(f"tensor {name!r} differs from {owner!r}, to which the model ties it")
        missing = sorted(self._expected.keys() - self._weights.keys())
        if missing:
            raise PublishError(
                f"the weight update is incomplete: {len(missing)} of {len(self._expected)} tensors are "
                f"missing, first {missing[0]!r}; send every tensor before finish_weight_update"
            )
        return self._weights
