"""A satellite's worker in a process of its own, which stops for good in its first unit the first time that it is started.

    python -m hung_worker PORT MARK

MARK is a file that says that it was started before.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch
from torch import nn

from gyre_sdk.trainer.sharing.part import Part
from gyre_sdk.trainer.sharing.satellite import Satellite
from gyre_sdk.trainer.sharing.wire import Counted
from gyre_sdk.trainer.units import Unit

KEY = b"the key of this test"
CELL = "cell-1"


class Policy(Part):
    """One layer in float64. `before` is called before each unit."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 3).double())

    def before(self) -> None:
        """Do nothing."""

    def occupy(self) -> None:
        pass

    def free(self) -> None:
        pass

    def compute(self, unit: Unit | None, version: int | None, counted: Counted) -> None:
        assert unit is not None
        self.before()
        draw = torch.Generator().manual_seed(int(unit.id[1:]))
        x = torch.randn(unit.tokens, 4, generator=draw, dtype=torch.float64)
        self.model(x).log_softmax(-1)[:, 0].sum().backward()
        counted.totals.add(runs=unit.runs, rows=1, targets=unit.tokens, calls=1)


class Stops(Policy):
    """Stops its process, once."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark

    def before(self) -> None:
        if not self._mark.exists():
            self._mark.touch()
            signal.raise_signal(signal.SIGSTOP)


def main() -> None:
    torch.set_num_threads(1)
    Policy().compute(Unit("u0", "g", (), 1, 3), 0, Counted())  # the first unit of a process takes longest
    address, mark = ("127.0.0.1", int(sys.argv[1])), Path(sys.argv[2])
    Satellite(address, KEY, CELL, Stops(mark), ready=lambda: print("toy-worker ready on x", flush=True), chunk=1).run()


if __name__ == "__main__":
    main()
