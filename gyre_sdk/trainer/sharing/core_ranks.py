"""A shared batch on the ranks of the core: rank 0 answers satellites, all ranks compute.

Satellites see one cell. What they pull and push passes through rank 0, whole; where the core's weights are in shards, they
are put together before the batch begins and sums are cut when it has ended, one tensor at a time: while it is open, no
collective depends on who joins or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from typing import Any

import torch

from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.sharded import is_sharded, parts, put_together
from gyre_sdk.trainer.sharing.batch import Whole
from gyre_sdk.trainer.sharing.core import Collected, Core
from gyre_sdk.trainer.sharing.tensors import add_gradient, trainable, weights
from gyre_sdk.trainer.units import Unit

__all__ = ["share_batch"]


def share_batch(
    core: Core | None,
    ranks: Ranks,
    model: Any,
    units: Iterable[Unit],
    compute: Callable[[Unit | None], None],
    *,
    step: int,
    version: int | None,
    base: str,
) -> Collected:
    """Compute what falls to this rank of a batch, and take in what satellites did. Every rank of the core has to call this.

    Args:
        core: on rank 0; None on the others.
        units: looked at on rank 0 only.
        compute: adds a unit's gradient into the parameters' `.grad`. Of None, where weights are in shards and other ranks
            have a unit: takes part in theirs.
        version: number of the weights in training, if they have one.
        base: fingerprint of the weights that are not trained, where they are in shards; looked at on rank 0 only.

    Returns:
        What satellites counted, on rank 0; the names of all units, on every rank. Their gradient is in `.grad`, on whole
        weights of rank 0's only.
    """
    in_shards = is_sharded(model)
    whole = Whole(put_together(weights(model), keep=ranks.leads), base) if in_shards else None
    own = None if core is None else core.deal(step, version, model, units, size=ranks.size, whole=whole)
    with nullcontext() if own is None else closing(own):
        for hand in ranks.rounds(() if own is None else own):
            if not hand.names:
                torch.cuda.empty_cache()  # weights, gradients and the optimizer's state stay
            elif hand.mine is not None or in_shards:
                compute(hand.mine)
    torch.cuda.empty_cache()
    found = Collected() if core is None else core.collect()
    if in_shards:
        _add_shards(ranks, model, found)
    else:
        found.sums.add_to(model)
    names: Sequence[str] = ranks.share(found.names)
    return found if core is not None else Collected(names=list(names))


def _add_shards(ranks: Ranks, model: Any, found: Collected) -> None:
    """Add each rank's part of what satellites summed up."""
    sums = found.sums.found()
    own = trainable(model)
    like = {name: own[name] for name in ranks.share(list(sums))}
    for name, part in parts(like, sums if ranks.leads else None):
        add_gradient(own[name], part)
