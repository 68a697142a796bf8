"""What is simulated: a cluster, a batch, a workload and what moving costs. Read from TOML."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from gyre_sdk.errors import SettingsError
from gyre_sdk.settings import load

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Natural = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_MOST_RUNS = 1_000_000
"""Runs of a training: a few minutes of computing for each policy and draw."""


class Fleet(Struct, frozen=True, forbid_unknown_fields=True):
    """The cells."""

    cells: Annotated[int, Meta(ge=1, le=10_000)] = 8
    gpus_per_cell: Count = 8
    slots: Annotated[float, Meta(ge=1, le=1e6)] = 32.0
    """Runs that one serving cell carries at full speed."""
    solo: Annotated[float, Meta(ge=1, le=1e6)] = 2.0
    """How many times faster a run goes that has a cell for itself than one in a full cell."""


class Batch(Struct, frozen=True, forbid_unknown_fields=True):
    """What a training step consumes."""

    groups: Count = 16
    """Groups of a step (the paper's B)."""
    runs: Count = 8
    """Runs of a group (N)."""
    steps: Count = 48
    """Steps of the whole training."""
    mu: Count = 4
    """Steps between two publications: a burst."""
    phi: Natural = 1.0
    """Steps of runs that may be under way beyond the open burst: the allowed staleness. `colocate` has none."""
    whole_steps: bool = False
    """Whether runs beyond the open burst are handed out by whole steps only; a part of a step is then no staleness at all."""

    @property
    def ahead(self) -> float:
        """Steps that may really be under way beyond the open burst."""
        return float(int(self.phi)) if self.whole_steps else self.phi


class Runs(Struct, frozen=True, forbid_unknown_fields=True):
    """How long runs take, in seconds of work on a full cell: lognormal, cut at the timeout."""

    median_s: Positive = 1800.0
    sigma: Annotated[float, Meta(ge=0, le=10)] = 0.6
    """Standard deviation of the logarithm."""
    correlation: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Of the logarithms within a group."""
    timeout_s: Positive = 14400.0


class Training(Struct, frozen=True, forbid_unknown_fields=True):
    """How much work a step is."""

    batch_s: Positive = 600.0
    """Seconds in which all cells together train an average batch (distributions)."""
    tokens_per_cell_s: Positive = 10000.0
    """Tokens that one cell trains in a second (recorded stores)."""


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """What moving costs, in seconds. The defaults sum to arXiv:2609.33848's 8.52 s to training and 3.46 s back."""

    drain_s: Natural = 5.0
    switch_s: Natural = 3.52
    load_s: Natural = 3.46
    join_s: Natural = 5.0
    """One satellite's weight pull and gradient push; those that pull at the same time share the core's line."""
    recompute_s: Natural = 2.0
    """Work on a full cell that a run loses when its cell leaves: its prefix is computed again elsewhere."""


class Async(Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed split of the policies `async` and `async_streaming`."""

    training_cells: Annotated[int, Meta(ge=0)] = 0
    """Cells that train; 0 takes half of them."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """One simulated training."""

    name: str = "unnamed"
    about: str = ""
    fleet: Fleet = Fleet()
    batch: Batch = Batch()
    runs: Runs = Runs()
    training: Training = Training()
    costs: Costs = Costs()
    given: Async = Async()

    @property
    def given_split(self) -> int:
        """Training cells of the given split."""
        return self.given.training_cells or max(1, self.fleet.cells // 2)


def shipped() -> dict[str, Path]:
    """Return the scenarios that come with gyre, by name."""
    folder = Path(str(resources.files(__package__))) / "scenarios"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read(name: str) -> Scenario:
    """Read a scenario: the name of a shipped one, or a TOML file.

    Raises:
        SettingsError: there is no such scenario, or a key or value in it is wrong.
    """
    known = shipped()
    path = known.get(name, Path(name))
    if name not in known and not path.exists():
        raise SettingsError(f"{name!r} is neither a file nor a scenario; scenarios: {', '.join(known)}")
    scenario = load(Scenario, path)
    batch = scenario.batch
    if (runs := batch.steps * batch.groups * batch.runs) > _MOST_RUNS:
        raise SettingsError(
            f"batch.steps * batch.groups * batch.runs = {runs:,} runs in {path}: at most {_MOST_RUNS:,} are simulated; take"
            " fewer steps"
        )
    if scenario.given.training_cells >= scenario.fleet.cells > 1:
        raise SettingsError(
            f"given.training_cells = {scenario.given.training_cells} in {path}: leaves no cell of {scenario.fleet.cells}"
            " to serve; give fewer"
        )
    return scenario
