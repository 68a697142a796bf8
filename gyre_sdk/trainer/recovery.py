"""Where a restart of the trainer takes up, from what its ledger says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gyre_sdk.trainer.ledger import CheckpointSaved, LedgerState


@dataclass(frozen=True, slots=True)
class Recovery:
    """Where a restart takes up."""

    step: int
    """Optimizer steps behind the checkpoint; 0 is the starting policy."""
    checkpoint: CheckpointSaved | None
    version: int | None
    """Version that the restored weights are served under: 0 for the starting policy, None for a new number."""
    closed: list[str]
    """Groups that are closed and free, in the order planned: trained without running anything again."""
    unfinished: list[str]
    """Groups that are planned and free but not closed: their missing members are run again."""


def recover(state: LedgerState, usable: Iterable[int] | None = None) -> Recovery:
    """Decide where a restart takes up: the newest checkpoint of the lineage whose files are whole.

    Args:
        usable: steps whose checkpoint on disk matches its digest; None trusts all.
    """
    allowed = None if usable is None else set(usable)
    saved = [
        (step, kept.checkpoint)
        for step, kept in state.steps.items()
        if kept.checkpoint is not None and (allowed is None or step in allowed)
    ]
    step, checkpoint = max(saved, key=lambda pair: pair[0], default=(0, None))
    free = {group for number, kept in state.steps.items() if number > step for group in kept.groups}
    free.update(state.unused())
    order = [group for group in state.groups if group in free]
    return Recovery(
        step=step,
        checkpoint=checkpoint,
        version=0 if step == 0 else None,
        closed=[group for group in order if state.groups[group].closed],
        unfinished=[group for group in order if not state.groups[group].closed],
    )
