"""A step of `TreeGRPOTrainer` with satellites in real worker processes is the step of one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sharing_kit import KEY, SECONDS, until
from tiny_policy import gradient, pure64, relative, tiny_model
from training_kit import CONFIG, make_training
from worker_kit import LORA, START_S, Cells, make_settings, policy_of, start_worker, step, units_of

from gyre_sdk import events
from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.config import load_config, save_config
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.sharing import worker
from gyre_sdk.trainer.sharing.batch import OWN
from gyre_sdk.trainer.sharing.core import Core
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig, TreeGRPOTrainer, make_trainer
from gyre_sdk.trainer.units import Unit


@pytest.fixture(scope="module", params=["full weights", "adapters"])
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    """Workers start while the test prepares what to train."""
    folder = tmp_path_factory.mktemp("cells")
    config = make_settings(folder, CONFIG if request.param == "full weights" else LORA)
    seen: list[events.Event] = []
    with Core(key=KEY, observer=seen.append) as core:
        count = 2 if request.param == "full weights" else 1
        found = Cells(config, core, [f"cell-{number + 1}" for number in range(count)], seen)
        found.workers = [start_worker(folder, core, cell) for cell in found.names]
        yield found
        for process in found.workers:
            assert process.poll() is None, (folder / "cell-1.log").read_text()
        assert "gyre-worker ready on cell-1\n" in (folder / "cell-1.log").read_text()
    for process in found.workers:
        assert process.stdin is not None
        process.stdin.close()  # the leash: it ends with its parent
        process.wait(SECONDS)


def test_a_step_with_satellites_is_that_of_one_process(cells: Cells, tmp_path: Path) -> None:
    """Each satellite alone, with the other one gone and the core at rest; then all together. Twice, with other weights."""
    config, core = cells.config, cells.core
    with pure64():
        model = policy_of(config)
        units = units_of(model, 12)
        reference = load_policy(config.policy).double() if config.policy.lora is None else None
        alone = make_trainer(config.train, model, tmp_path, None, reference_model=reference)
        wanted = step(alone, units)
        wanted_gradient = gradient(model)
        shared = make_trainer(config.train, model, tmp_path, None, reference_model=reference, core=core)
        until(
            lambda: core.waiting() == set(cells.names) or any(one.poll() is not None for one in cells.workers),
            "they dial in",
            START_S,
        )
        for _ in range(2):
            cells.seen.clear()
            core.close_gate()
            assert all(core.dismiss(cell, SECONDS) for cell in cells.names)
            reports: list[StepReport] = []

            def batch() -> Iterator[Unit]:
                """Seal parts, each for whoever is there."""
                for place, cell in enumerate(cells.names):
                    core.admit(cell)
                    assert core.join_wait(cell, SECONDS)
                    yield from units[4 * place : 4 * place + 4]
                    until(lambda cell=cell: cells.committed(cell) == 4, f"{cell} computes its part")  # type: ignore[misc]
                    assert core.dismiss(cell, SECONDS) and not core.joined(cell)
                core.open_gate()
                yield from units[4 * len(cells.names) : 9]
                until(lambda: core.progress().ready_units == 0, "the core takes some")
                for cell in cells.names:
                    core.admit(cell)
                yield from units[9:]

            training = threading.Thread(
                target=lambda batch=batch, reports=reports: reports.append(step(shared, batch()))
            )
            training.start()
            training.join(START_S)
            (report,) = reports
            assert relative(gradient(model), wanted_gradient) < 1e-12
            assert report.totals == wanted.totals
            assert report.units == wanted.units == [one.id for one in units]
            assert report.metrics == pytest.approx(wanted.metrics, rel=1e-9, abs=1e-12)
            assert report.mismatch.worst == wanted.mismatch.worst
            assert sum(cells.committed(cell) for cell in (OWN, *cells.names)) == 12
            assert cells.committed(OWN) > 0
            with torch.no_grad():  # the optimizer's step: the next batch has other weights
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight.sub_(0.1 * weight.grad)
            wanted = step(alone, units)
            wanted_gradient = gradient(model)


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    """A reference that moves in this process only."""
    common: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1, "use_cpu": True, "report_to": []}
    moving = TreeGRPOConfig(**common, beta=0.1, sync_ref_model=True)
    with pytest.raises(SettingsError, match="sync_ref_model"):
        TreeGRPOTrainer(tiny_model(), moving, lambda step: [], core=Core(key=KEY))


def test_a_step_that_skips_all_leaves_no_gradient(tmp_path: Path) -> None:
    """A batch without units, with a core and nobody else."""
    args = TreeGRPOConfig(output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    with Core(key=KEY) as core:
        trainer = TreeGRPOTrainer(tiny_model(), args, lambda step: [], core=core)
        assert step(trainer, []).skipped
        assert all(one.grad is None for one in trainer.model.parameters())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"--core": "somewhere"}, "HOST:PORT"),
        ({"--key-file": "open-key"}, "chmod 600"),
        ({"--key-file": "no-key"}, "no-key"),
        ({"--key-file": "empty-key"}, "empty"),
        ({"--config": "no.json"}, "no.json"),
        ({"--set": "train.steps=3"}, "where the trainer starts"),
    ],
    ids=lambda wrong: "".join(wrong) if isinstance(wrong, dict) else "",
)
def test_a_worker_says_what_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], wrong: dict[str, str], says: str
) -> None:
    config = load_config(make_training(tmp_path))
    save_config(config, tmp_path / "settings.json")
    for name, content, mode in (("key", "k", 0o600), ("open-key", "k", 0o644), ("empty-key", "", 0o600)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    given = {"--config": "settings.json", "--core": "127.0.0.1:1", "--key-file": "key", "--cell": "cell-1"} | wrong
    arguments = []
    for name, value in given.items():
        arguments += [name, str(tmp_path / value) if name in ("--config", "--key-file") else value]
    assert worker.main(arguments) == 2
    assert says in capfd.readouterr().err
