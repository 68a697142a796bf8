"""What makes two forward passes of one model differ: dropout of any kind, skipped layers, jitter on routers.

The log-probs of a policy in training are compared with those of the policy that sampled. Noise in one of them is noise in
every ratio, and an engine has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_NAMES = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names under which transformers' models keep their rates."""


def rates(model: nn.Module) -> dict[str, float]:
    """Return what is noisy in a model's modules: `module.attribute` -> rate above 0."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            found[f"{name}.p"] = float(module.p)
        found |= {f"{name}.{key}": rate for key, rate in _kept(module)}
    return found


def silence(model: nn.Module) -> None:
    """Set every rate to 0: of modules, of attributes that functions take theirs from, and of the config, which some
    models read as they run. It is saved with the model.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for owner in (module, getattr(module, "config", None)):
            for key, _ in _kept(owner):
                setattr(owner, key, 0.0)


def _kept(owner: Any) -> Iterator[tuple[str, float]]:
    """Yield an object's own rates above 0."""
    for key, rate in list(getattr(owner, "__dict__", {}).items()):
        if isinstance(rate, float) and rate > 0 and any(name in key for name in _NAMES):
            yield key, rate
