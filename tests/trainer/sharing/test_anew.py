"""A trainer whose own unit hangs begins anew in its own place: same process, the batch from its first unit, exactly once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing_kit import SECONDS, one_process, some_units

from gyre_sdk.trainer.anew import Anew

HERE = Path(__file__).parent
PATHS = os.pathsep.join([str(HERE), str(HERE.parent)])
TRAINER = """
import fcntl, json, os, random, sys
from pathlib import Path
from sharing_kit import KEY, TinyPolicy, gradients, some_units
from gyre_sdk.trainer.anew import Anew
from gyre_sdk.trainer.sharing.core import Core
from gyre_sdk.trainer.sharing.wire import Counted

folder = Path(sys.argv[1])
lock = (folder / "lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
os.set_inheritable(lock.fileno(), True)  # as a library's may be
first = not (folder / "begun").exists()
port = 0 if first else int((folder / "begun").read_text())
units = some_units(random.Random(3))
TinyPolicy().compute(units[0], 0, Counted())  # the first unit of a process takes longest
with Core(key=KEY, port=port, lease_s=5.0, stuck_s=1.5) as core:
    (folder / "begun").write_text(str(core.address[1]))
    anew = Anew(folder, lambda: core.progress().step)
    core.on_hung = anew.begin
    policy, counted = TinyPolicy(), Counted()
    for hand in core.deal(7, 0, policy.model, iter(units)):
        if first and counted.totals.rows == 2:
            os.read(os.pipe()[0], 1)  # for ever
        for one in hand:
            policy.compute(one, 0, counted)
    found = core.collect()
    found.sums.add_to(policy.model)
    tokens = counted.totals.targets + found.totals.targets
    said = {name: one.tolist() for name, one in gradients(policy.model).items() if one is not None}
    why, again = anew.untold(), anew.untold()
    print(json.dumps({"pid": os.getpid(), "tokens": tokens, "names": found.names, "gradients": said,
                      "why": why, "again": again}), flush=True)
"""
HOPELESS = """
import sys
from pathlib import Path
from gyre_sdk.trainer.anew import Anew
print("begun", flush=True)
Anew(Path(sys.argv[1]), lambda: 4, int(sys.argv[2])).begin("a unit hangs")
"""


def program(folder: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "trainer.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_a_core_that_hangs_begins_the_batch_anew(tmp_path: Path) -> None:
    """What it had computed before counts nowhere; locks and ports of its first life are free."""
    units = some_units(random.Random(3))
    process = program(tmp_path, TRAINER)
    out, err = process.communicate(timeout=8 * SECONDS)
    assert process.returncode == 0, err
    said: dict[str, Any] = json.loads(out)
    assert said["pid"] == process.pid
    assert said["names"] == [one.id for one in units]
    assert said["tokens"] == sum(one.tokens for one in units)
    for name, wanted in one_process(units).items():
        assert (name in said["gradients"]) == (wanted is not None)
        if wanted is not None:
            found = torch.tensor(said["gradients"][name], dtype=torch.float64)
            assert float((found - wanted).norm()) <= 1e-12 * float(wanted.norm())
    assert "longer than the 2 s that they may take" in said["why"] and said["again"] is None


@pytest.mark.parametrize(("ranks", "lives"), [(1, 3), (2, 1)])
def test_what_hangs_again_and_again_or_has_more_ranks_ends(tmp_path: Path, ranks: int, lives: int) -> None:
    process = program(tmp_path, HOPELESS, str(ranks))
    out, err = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 1 and out.split() == ["begun"] * lives
    assert f"step 4 hung for the {lives}. time: a unit hangs" in err
    assert ("raise cells.stuck_s" in err) == (ranks == 1) and ("--max-restarts" in err) == (ranks == 2)
    if ranks == 1:
        assert Anew(tmp_path, lambda: 4).untold() is None, "who raised the bound begins with all tries"


def test_what_cannot_be_counted_ends(tmp_path: Path) -> None:
    """With a disk that takes no note it would begin anew for ever."""
    (tmp_path / "hung.json").mkdir()
    out, err = (process := program(tmp_path, HOPELESS, "1")).communicate(timeout=2 * SECONDS)
    assert process.returncode == 1 and out.split() == ["begun"]
    assert "a unit hangs; it does not begin anew: " in err and "run the same command again" in err
