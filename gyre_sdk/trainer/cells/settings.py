"""The section `[cells]` of `gyre-train`'s settings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class CellsConfig(msgspec.Struct, frozen=True):
    """Cells that serve or train, and go over from one to the other while agents run on. Each has a replica and a training
    worker; the worker of the first, the core, is the trainer itself."""

    count: Positive = 1
    """Cells. One alone alternates: it serves until there is something to train."""
    standalone: NotNegative = 0
    """Replicas beside the cells, which serve all the time."""
    policy: Literal["elastic", "async", "colocate"] = "elastic"
    """`elastic`: the waterlevel plan (arXiv:2609.33848). `async`: the first `standing` cells train, the others serve, always.
    `colocate`: all cells serve until no run is left, then all train."""
    ranks: Positive = 1
    """Processes of a satellite's training worker, one for each of the cell's GPUs. They train as several of `gyre-train` do:
    whole copies of the weights, or shards with `train.fsdp`."""
    standing: NotNegative = 0
    """Cells that train all the time."""
    hysteresis: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    """A change must be worth this many times what it was measured to cost."""
    pace: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Training cells at most this many times what finishes a burst's training together with its runs."""
    reserve: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    """Capacity to keep for unfinished runs, in multiples of their number: the last ones go faster where cells are not full."""
    runs_per_cell: Positive | None = None
    """Runs that a serving cell carries at most; None: `rollout.concurrency` over `count` and `standalone`, or less where less was
    measured: its cache, its speed."""
    drain_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """Seconds that requests may take to end on a cell that leaves; the rest goes on elsewhere."""
    lease_s: Seconds = 60.0
    """Seconds without a sign of life after which a cell's work is given to others."""
    stuck_s: Seconds = 600.0
    """Seconds that units may be in hand before who computes them is taken for hung, ended and started again; ten times what the
    slowest took, by targets, where that is more."""
    link: Literal["auto", "gloo", "nccl", "files"] = "auto"
    """How weights and gradients pass between cells. `auto`: NCCL between GPUs of their own (`launcher = "ray"`), else gloo."""
    launcher: Literal["local", "ray"] = "local"
    """Where cells run: on this machine, or on a Ray cluster."""
    ray_address: str | None = None
    """Of the Ray cluster, for example `auto`; None starts one on this machine."""
    resources: dict[str, float] = {}
    """What Ray reserves for a cell, for example `{ GPU = 8 }`."""

    def __post_init__(self) -> None:
        most = self.count if self.standalone else self.count - 1
        if self.policy == "async" and not 0 < self.standing <= most:
            raise ValueError(
                f"cells.policy = 'async' needs cells on both sides: cells.standing = {self.standing} must lie between 0 and"
                f" cells.count = {self.count}, or cells.standalone be above 0"
            )
        if self.standing > most:
            raise ValueError(
                f"cells.standing = {self.standing} leaves none of {self.count} cells to serve; cells.standalone adds"
                " replicas that always do"
                if self.standing == self.count
                else f"cells.standing = {self.standing} is more than cells.count = {self.count}"
            )
        if self.launcher == "local" and (self.ray_address is not None or self.resources):
            raise ValueError("cells.ray_address and cells.resources belong to cells.launcher = 'ray'")
