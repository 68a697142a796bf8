"""`gyre-train` in several processes: real engine, proxy and agents on rank 0, and a second rank that only trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks_kit import free_port
from training_kit import Forked, make_training

from gyre_sdk.errors import SettingsError
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.ledger import STREAM, fold, read
from gyre_sdk.trainer.loss import Totals
from gyre_sdk.trainer.main import main
from gyre_sdk.trainer.team import Burst, Place, place
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig


def launch(config: Path, *arguments: str) -> dict[str, Any]:
    """Run `gyre-train` on two ranks with torchrun; return what it reports."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    command += ["-m", "gyre_sdk.trainer.main", str(config), "--plain", "--json", *arguments]
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return reported(process.stdout)


def launch_again(config: Path, *arguments: str) -> dict[str, Any]:
    """The same with processes that have their imports done, and torchrun's variables."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Forked(config, *arguments, **group, RANK=rank, LOCAL_RANK=rank, CUDA_VISIBLE_DEVICES="") for rank in ("0", "1")
    ]
    try:
        said = [process.communicate(280) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    return reported("".join(out for out, _ in said))


def reported(out: str) -> dict[str, Any]:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    assert len(lines) == 1  # one rank reports
    report: dict[str, Any] = json.loads(lines[0])
    return report


@pytest.mark.timeout(600)
def test_two_ranks_train_publish_and_resume_in_shards(tmp_path: Path) -> None:
    config = make_training(tmp_path)
    options = ("--set", "train.fsdp=true", "--set", "train.unit_tokens=64")
    report = launch(config, *options, "--steps", "2")
    assert (report["steps"], report["resumed_from"], report["version"]) == (2, 0, 2)
    assert report["metrics"]["approx_kl"] < 0.05  # what was published is what is trained
    report = launch_again(config, *options, "--steps", "3")
    assert (report["steps"], report["resumed_from"], report["skipped"]) == (3, 2, 0)
    with Journal(tmp_path / "out" / "store.db", "r") as store:
        state = fold(read(store.entries(STREAM)))
    assert sorted(state.steps) == [1, 2, 3]
    assert all(len(step.units) > 1 for step in state.steps.values())
    assert (tmp_path / "out" / "checkpoints" / "checkpoint-3" / "model.safetensors").is_file()


def test_the_place_among_ranks() -> None:
    assert place({}) == Place(0, 1, 1)
    assert place({"WORLD_SIZE": "1", "RANK": "0"}) == Place(0, 1, 1)
    given = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert place(given) == Place(3, 4, 2)
    with pytest.raises(SettingsError, match="WORLD_SIZE = 2, and RANK, MASTER_ADDR, MASTER_PORT is not set"):
        place({"WORLD_SIZE": "2"})
    with pytest.raises(SettingsError, match="WORLD_SIZE = 'two' is not a number"):
        place({"WORLD_SIZE": "two"})


def test_deepspeed_is_refused(tmp_path: Path) -> None:
    """As `accelerate launch --use_deepspeed` asks for it, and as transformers' arguments do."""
    with pytest.raises(SettingsError, match="DeepSpeed keeps gradients to itself"):
        place({"ACCELERATE_USE_DEEPSPEED": "true"})
    with pytest.raises(SettingsError, match="DeepSpeed keeps gradients to itself"):
        TreeGRPOConfig(
            output_dir=str(tmp_path), max_steps=1, use_cpu=True, deepspeed={"zero_optimization": {"stage": 2}}
        )


def test_an_evaluation_takes_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_training(tmp_path)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main([str(config), "--evaluate", "test"]) == 2
    assert "an evaluation takes one process" in capsys.readouterr().err


def test_weights_go_out_at_the_end_of_a_burst_that_trained() -> None:
    burst = Burst(every=2, steps=5)

    def step(number: int, *, trained: bool) -> StepReport:
        return StepReport(number, ["u"] if trained else [], Totals(), {})

    found = [
        burst.publishes(step(n, trained=trained)) for n, trained in enumerate([True, False, False, False, True], 1)
    ]
    assert found == [False, True, False, False, True]
