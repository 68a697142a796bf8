"""Cells of several ranks, with copies of the weights or shards of them, take the steps of one process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from ranks_kit import forking, together
from sharing_kit import KEY, SECONDS, until
from tiny_policy import gradient, pure64, relative
from torch.distributed import TCPStore
from training_kit import CONFIG
from worker_kit import LORA, START_S, Cells, make_settings, policy_of, start_worker, step, units_of

from gyre_sdk import events
from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.arguments import arguments
from gyre_sdk.trainer.config import TrainerConfig, read_config
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.sharing.batch import OWN
from gyre_sdk.trainer.sharing.companions import Meeting, devices_of
from gyre_sdk.trainer.sharing.core import Core
from gyre_sdk.trainer.team import join, place
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOTrainer, make_trainer
from gyre_sdk.trainer.units import Unit

SIZE = 2
CELLS = f"\n[cells]\ncount = 3\nranks = {SIZE}\n"
SHARDS = "save_every = 1\nfsdp = true"


def be_rank(meeting: Meeting, settings: Path, address: tuple[str, int], cell: str) -> None:
    """Be a rank of a cell's worker, in a process that was forked for it."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    from gyre_sdk.trainer import policy
    from gyre_sdk.trainer.sharing import cell_policy
    from gyre_sdk.trainer.sharing.companions import meet
    from gyre_sdk.trainer.sharing.satellite import Satellite

    def load64(*arguments: Any) -> Any:
        return load_policy(*arguments).double()

    policy.load_policy = cell_policy.load_policy = load64
    with pure64():
        meet(meeting)
        part = cell_policy.CellPolicy(read_config(settings), Ranks())
        if meeting.rank:
            part.follow()
        Satellite(address, KEY, cell, part).run()


@contextmanager
def ranks_of(folder: Path, address: tuple[str, int], cells: list[str]) -> Iterator[None]:
    """The workers of some cells, each of `SIZE` ranks."""
    context = forking()
    stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in cells]
    processes = [
        context.Process(
            target=be_rank,
            args=(Meeting(rank, SIZE, store.port), folder / "settings.json", address, cell),
            daemon=True,
        )
        for cell, store in zip(cells, stores, strict=True)
        for rank in range(SIZE)
    ]
    try:
        for process in processes:
            process.start()
        yield
        assert all(process.is_alive() for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.join(SECONDS)


@dataclass
class Core64:
    """A core of one process and what its step must give."""

    trainer: TreeGRPOTrainer
    alone: TreeGRPOTrainer
    model: Any
    units: list[Unit]

    @classmethod
    def of(cls, config: TrainerConfig, core: Core, folder: Path) -> Core64:
        model = policy_of(config)
        train = msgspec.structs.replace(config.train, fsdp=False)
        reference = load_policy(config.policy).double() if config.policy.lora is None else None
        alone, shared = (
            make_trainer(train, model, folder, None, reference_model=reference, core=one) for one in (None, core)
        )
        return cls(shared, alone, model, units_of(model, 14))

    def check(self, batch: Any) -> None:
        """Take a step on a batch with whoever is there; it must be that of one process."""
        wanted = step(self.alone, self.units)
        wanted_gradient = gradient(self.model)
        reports: list[StepReport] = []
        training = threading.Thread(target=lambda: reports.append(step(self.trainer, batch())))
        training.start()
        training.join(START_S)
        (report,) = reports
        assert relative(gradient(self.model), wanted_gradient) < 1e-12
        assert report.totals == wanted.totals
        assert report.units == wanted.units == [one.id for one in self.units]
        assert report.metrics == pytest.approx(wanted.metrics, rel=1e-9, abs=1e-12)
        assert report.mismatch.worst == wanted.mismatch.worst
        with torch.no_grad():  # the optimizer's step: the next batch has other weights
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight.sub_(0.1 * weight.grad)


@pytest.mark.parametrize(("text", "how"), [(CONFIG, "shards"), (LORA, "copies")], ids=["shards", "copies of adapters"])
def test_a_satellite_of_several_ranks_adds_up_to_the_step_of_one_process(tmp_path: Path, text: str, how: str) -> None:
    """Two batches: it computes units alone, leaves with more at hand, comes back, and shares the rest with the core.

    Copies of full weights and shards of adapters are what the satellite of the core of several ranks has.
    """
    config = make_settings(tmp_path, text.replace("save_every = 1", SHARDS) if how == "shards" else text, CELLS)
    seen: list[events.Event] = []
    with Core(key=KEY, observer=seen.append) as core, pure64(), ranks_of(tmp_path, core.address, ["cell-1"]):
        cells = Cells(config, core, ["cell-1"], seen)
        stage = Core64.of(config, core, tmp_path)
        units = stage.units
        until(lambda: core.waiting() == {"cell-1"}, "it dials in", START_S)
        for _ in range(2):
            seen.clear()
            core.close_gate()

            def batch() -> Iterator[Unit]:
                for part in (units[:5], units[5:6], units[6:10]):
                    core.admit("cell-1")
                    yield from part
                    done = units.index(part[-1]) + 1
                    until(lambda done=done: cells.committed("cell-1") == done, "it computes its part")  # type: ignore[misc]
                    assert core.dismiss("cell-1", SECONDS)
                core.admit("cell-1")
                core.open_gate()
                yield from units[10:]

            stage.check(batch)
            assert cells.committed("cell-1") >= 10
            assert cells.committed("cell-1") + cells.committed(OWN) == len(units)


def two_steps(config: TrainerConfig, port: int | None, folder: Path) -> list[Any]:
    """Take two steps, alone or as a rank of a core; return the gradient and the report of each."""
    seen: list[events.Event] = []
    found: list[Any] = []
    train = config.train if port is not None else msgspec.structs.replace(config.train, fsdp=False)
    with pure64(), ExitStack() as cleanup:
        model = policy_of(config)
        units = units_of(model, 14)
        ranks = Ranks() if port is None else join(place(os.environ))
        core = None
        if port is not None and ranks.leads:
            core = cleanup.enter_context(Core(key=KEY, port=port, observer=seen.append))

        def batch(step: int) -> Iterator[Unit]:
            if core is None:
                yield from units
                return
            own: Core = core
            cells = Cells(config, own, ["cell-1"], seen)
            before = cells.committed("cell-1"), cells.committed(OWN)
            own.close_gate()
            own.admit("cell-1")
            yield from units[:5]
            until(lambda: cells.committed("cell-1") == before[0] + 5, "the satellite computes its part", START_S)
            assert own.dismiss("cell-1", SECONDS)
            own.open_gate()
            yield from units[5:10]
            until(lambda: not own.progress().ready_units, "the core takes the rest")
            own.close_gate()  # it ends what it has
            assert own.progress().done_tokens == sum(unit.tokens for unit in units[:10])
            own.admit("cell-1")
            yield from units[10:]

        def look(model: Any, grad_norm: Any = None) -> Any:
            grads = [one.grad for one in model.parameters() if one.grad is not None]
            whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
            found.append(torch.cat([one.detach().reshape(-1) for one in whole]))
            return norm(model, grad_norm)

        trainer = TreeGRPOTrainer(
            model,
            arguments(train, folder, optim="sgd", max_steps=2, save_strategy="no", max_grad_norm=0.0),
            batch,
            reference_model=load_policy(config.policy).double() if config.policy.lora is None else None,
            on_step=lambda report: found.append((report.totals, report.units, report.metrics)),
            ranks=ranks,
            core=core,
        )
        norm = trainer._get_grad_norm
        trainer._get_grad_norm = look  # type: ignore[method-assign]
        trainer.train()
    return found


@pytest.mark.parametrize(("text", "how"), [(CONFIG, "copies"), (LORA, "shards")], ids=["copies", "shards of adapters"])
def test_a_core_of_several_ranks_takes_the_steps_of_one_process(tmp_path: Path, text: str, how: str) -> None:
    """With a satellite of as many; the core's cell goes to serving and comes back in the middle of a batch."""
    config = make_settings(tmp_path, text.replace("save_every = 1", SHARDS) if how == "shards" else text, CELLS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ranks_of(tmp_path, ("127.0.0.1", port), ["cell-1"]):
        ranks = together(SIZE, two_steps, config, port, tmp_path, seconds=START_S)
    wanted = two_steps(config, None, tmp_path)
    for found in ranks:
        for step_ in range(2):
            gradient_, report = found[2 * step_ : 2 * step_ + 2]
            assert relative(gradient_, wanted[2 * step_]) < 1e-12
            totals, names, metrics = wanted[2 * step_ + 1]
            assert report[0] == totals
            assert (
                len(report[1]) == len(set(report[1])) == len(names)
            )  # each process has made these runs under its own ids
            assert report[2] == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_the_death_of_one_rank_is_that_of_its_worker(tmp_path: Path) -> None:
    """Real workers: of one the leading rank is killed in the middle of a unit, of the other the second rank."""
    config = make_settings(tmp_path, CONFIG, CELLS)
    seen: list[events.Event] = []
    names = ["cell-1", "cell-2"]
    with Core(key=KEY, observer=seen.append) as core, pure64():
        cells = Cells(config, core, names, seen)
        cells.workers = [
            start_worker(tmp_path, core, cell, WORKER64_DIES=f"{rank} 2", WORKER64_PIDS=str(tmp_path))
            for rank, cell in enumerate(names)
        ]
        stage = Core64.of(config, core, tmp_path)
        logs = [tmp_path / f"{cell}.log" for cell in names]
        until(
            lambda: core.waiting() == set(names) or any(one.poll() is not None for one in cells.workers),
            "they dial in",
            START_S,
        )
        assert core.waiting() == set(names), [log.read_text() for log in logs]
        core.close_gate()

        def batch() -> Iterator[Unit]:
            for cell in names:
                core.admit(cell)
                yield from stage.units[:7] if cell == "cell-1" else stage.units[7:]
                until(lambda cell=cell: cell not in core.waiting(), f"{cell} is lost", START_S)  # type: ignore[misc]
            assert core.progress().leased_tokens == 0
            core.open_gate()

        stage.check(batch)
        assert sum(cells.committed(cell) for cell in (OWN, *names)) == len(stage.units)
        statuses = [worker.wait(SECONDS) for worker in cells.workers]
        assert statuses == [-9, 1]
        assert "rank 1 ended with signal SIGKILL" in logs[1].read_text()
        pids = [int(path.name.split()[1]) for path in tmp_path.glob("pid *")]
        assert len(pids) == SIZE * len(names)
        until(lambda: not any(_runs(pid) for pid in pids), "all ranks end")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_rank_sees_its_own_device() -> None:
    assert devices_of(2, 0, None) == [{}, {}]
    assert devices_of(2, 4, None) == [{}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert devices_of(3, 3, "4,5, 7") == [{}, {"CUDA_VISIBLE_DEVICES": "5"}, {"CUDA_VISIBLE_DEVICES": "7"}]
    with pytest.raises(SettingsError, match=r"cells\.ranks = 3, and this cell sees 2 GPUs"):
        devices_of(3, 2, None)
