"""The numbers of targets that do not depend on the policy in training, as tensors.

Shapes: K targets in row order (those of the first row, then those of the second, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.loss_options import Counted

if TYPE_CHECKING:
    from gyre_sdk.trainer.units import Row


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a unit's rows, or some of them."""

    behaviour_K: Tensor  # noqa: N815
    """Log-prob (nats) at sampling."""
    advantage_K: Tensor  # noqa: N815
    weight_K: Tensor  # noqa: N815
    """Share in its run; sums to 1 over all rows of a run."""
    row_share_K: Tensor  # noqa: N815
    """1 / targets of its row."""
    call_share_K: Tensor  # noqa: N815
    """1 / targets of its call, in these rows."""
    call_K: Tensor  # noqa: N815
    """Number of the call that sampled it, below `calls`; int64."""
    staleness_K: Tensor  # noqa: N815
    """Versions between the one in training and the one that sampled it, 0 or more; int64."""
    calls: int
    """Calls with a target in the rows that this was made of."""
    reference_K: Tensor | None = None  # noqa: N815
    """Log-prob (nats) under the reference policy."""
    proximal_K: Tensor | None = None  # noqa: N815
    """Log-prob (nats) under the policy that ratios are taken against, from a forward pass of its own."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        *,
        version: int | None = None,
        reference_K: Tensor | None = None,
        proximal_K: Tensor | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> Targets:
        """Take the targets of rows.

        Args:
            version: number that the policy in training has or would get; None takes the newest among the rows.
            reference_K: log-probs under the reference policy, in row order.
            proximal_K: log-probs under the proximal policy, in row order.
            dtype: of the numbers; `loss` converts where the scores have another.
            device: likewise.
        """
        number: dict[tuple[str, str], int] = {}
        calls = []
        for row in rows:
            known = np.array([number.setdefault((row.run, call), len(number)) for call in row.call_ids], dtype=np.int64)
            calls.append(known[row.calls])
        call_K = np.concatenate(calls)
        sizes = np.bincount(call_K, minlength=len(number))
        versions_K = np.concatenate([row.versions for row in rows]).astype(np.int64)
        staleness_K = np.maximum((int(versions_K.max()) if version is None else version) - versions_K, 0)
        counts = np.array([len(row.targets) for row in rows])

        def numbers(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device, dtype)

        def given(values: Tensor | None, name: str) -> Tensor | None:
            if values is not None and values.shape != (len(call_K),):
                raise TrainerError(
                    f"{name} has shape {tuple(values.shape)} for {len(call_K)} targets; give one log-prob per target, in"
                    " row order"
                )
            return None if values is None else values.detach().to(device, dtype)

        return cls(
            behaviour_K=numbers(np.concatenate([row.logprobs for row in rows])),
            advantage_K=numbers(np.concatenate([row.advantages for row in rows])),
            weight_K=numbers(np.concatenate([row.weights for row in rows])),
            row_share_K=numbers(np.repeat(1.0 / counts, counts)),
            call_share_K=numbers(1.0 / sizes[call_K]),
            call_K=torch.from_numpy(call_K).to(device),
            staleness_K=torch.from_numpy(staleness_K).to(device),
            calls=int((sizes > 0).sum()),
            reference_K=given(reference_K, "reference_K"),
            proximal_K=given(proximal_K, "proximal_K"),
        )

    def share_K(self, over: Counted) -> Tensor:  # noqa: N802
        """Return the share of each target in what is counted."""
        match over:
            case Counted.RUNS:
                return self.weight_K
            case Counted.ROWS:
                return self.row_share_K
            case Counted.CALLS:
                return self.call_share_K
            case Counted.TARGETS:
                return torch.ones_like(self.weight_K)

    def take(self, index_C: Tensor, only: Collection[str] = ()) -> Targets:
        """Return some of them.

        Args:
            index_C: their places.
            only: fields that are wanted; the others are left empty. None given: all.
        """
        index_C = index_C.to(self.weight_K.device)
        none = self.call_K[:0]
        return self._each(lambda name, values: values[index_C] if not only or name in only else none)

    def like(self, values_K: Tensor) -> Targets:
        """Return them on a tensor's device, floating-point numbers in its type."""
        device, dtype = values_K.device, values_K.dtype
        if self.weight_K.dtype == dtype and self.weight_K.device == device:
            return self
        return self._each(lambda _, own: own.to(device, dtype if own.is_floating_point() else own.dtype))

    def _each(self, change: Callable[[str, Tensor], Tensor]) -> Targets:
        changed = {name: change(name, own) for name in _TENSORS if (own := getattr(self, name)) is not None}
        return Targets(calls=self.calls, **changed)


_TENSORS = tuple(field.name for field in fields(Targets) if field.name != "calls")
