"""The training process of a satellite cell.

    python -m gyre_sdk.trainer.sharing.worker --config FILE --core HOST:PORT --key-file FILE --cell NAME

It loads the policy that the trainer trains, dials in, and waits to be admitted. While its cell serves it holds no memory
of a GPU. Exit status: 0 interrupted, 1 it cannot go on, 2 the settings are wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from gyre_sdk.errors import GyreError, SettingsError
from gyre_sdk.trainer.config import TrainerConfig, load_config, read_config
from gyre_sdk.trainer.main import DONE, FAILED, MISCONFIGURED, quiet_libraries
from gyre_sdk.trainer.sharing.satellite import Satellite
from gyre_sdk.trainer.sharing.wire import Address, Counted
from gyre_sdk.trainer.units import Unit

READY = "gyre-worker ready on"
"""Start of the line that is printed once the core has let it in; the cell's name follows."""


class CellPolicy:
    """The policy of a config, with its loss, executor and reference: what `TreeGRPOTrainer` trains, without an optimizer."""

    def __init__(self, config: TrainerConfig) -> None:
        """Load it, on the CPU.

        Raises:
            SettingsError: the settings cannot be shared by several cells.
            TrainerError: the policy cannot be loaded.
        """
        import torch
        from trl.trainer.utils import disable_dropout_in_model

        from gyre_sdk.trainer.arguments import arguments
        from gyre_sdk.trainer.policy import load_policy
        from gyre_sdk.trainer.team import reference_of

        train = msgspec.structs.replace(config.train, report_to=[])
        if train.sync_ref_model:
            raise SettingsError("sync_ref_model moves the trainer's reference only: satellites need it to be false")
        if train.threads:
            torch.set_num_threads(train.threads)
        self._args = arguments(train, config.output.dir)
        self._options = self._args.loss_options()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_policy(config.policy)
        if self._args.disable_dropout:
            disable_dropout_in_model(self.model)
        if train.activation_checkpointing:
            self.model.activation_checkpointing_enable()
        self.model.train()
        self._beside = reference_of(config.policy, config.train)
        self._executor: Any = None
        self._reference: Any = None

    def enter(self) -> None:
        """Go where it computes."""
        self._move(self._device)

    def leave(self) -> None:
        """Free the GPU."""
        import torch

        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def compute(self, unit: Unit, version: int | None, counted: Counted) -> None:
        """Add a unit's gradient, and count it."""
        from gyre_sdk.trainer.unit_step import accumulate

        self._prepare()
        found = accumulate(
            unit,
            counted.totals,
            counted.mismatch,
            self._options,
            self._executor,
            self._reference,
            version=version,
            device=self._device,
        )
        counted.found.add(found)

    def _prepare(self) -> None:
        """Make what runs the model, once it is where it computes."""
        from gyre_sdk.trainer.attention.choose import choose
        from gyre_sdk.trainer.reference import AdapterOff, FrozenCopy

        if self._executor is not None:
            return
        wanted: Any = self._args.executor
        budget = self._args.budget()
        self._executor = choose(self.model, wanted, budget)
        if self._options.needs_reference:
            self._reference = (
                AdapterOff(self.model, self._executor)
                if self._beside is None
                else FrozenCopy(self._beside, lambda model: choose(model, wanted, budget))
            )

    def _move(self, device: Any) -> None:
        if self._device.type == "cpu":
            return
        self.model.to(device)
        if self._beside is not None:
            self._beside.to(device)


def command(
    config: Annotated[Path, typer.Option(help="Settings that the trainer saved (.json), or its TOML file.")],
    core: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the trainer listens.")],
    key_file: Annotated[Path, typer.Option(help="File with the key of the training; nobody else may read it.")],
    cell: Annotated[str, typer.Option(help="Name of the cell.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key.")] = None,
) -> None:
    """Train units of the batch that a trainer has open, whenever it admits this cell."""
    try:
        settings = _settings(config, set_ or [])
        quiet_libraries()
        Satellite(_address(core), _key(key_file), cell, CellPolicy(settings), ready=lambda: _say(cell)).run()
    except GyreError as error:
        sys.stderr.write(f"gyre-worker: {type(error).__name__}: {error}\n")
        raise typer.Exit(MISCONFIGURED if isinstance(error, SettingsError) else FAILED) from None


def _settings(path: Path, pairs: list[str]) -> TrainerConfig:
    if path.suffix != ".json":
        return load_config(path, pairs)
    if pairs:
        raise SettingsError(f"--set {pairs[0]}: {path} holds settings that are whole; set it where the trainer starts")
    try:
        return read_config(path)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdigit()):
        raise SettingsError(f"--core {text!r} is not HOST:PORT, for example 127.0.0.1:29400")
    return host, int(port)


def _key(path: Path) -> bytes:
    try:
        if path.stat().st_mode & 0o077:
            raise SettingsError(f"--key-file {path}: others may read it; run: chmod 600 {path}")
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"--key-file {path}: {error}") from error
    if not key:
        raise SettingsError(f"--key-file {path}: it is empty")
    return key


def _say(cell: str) -> None:
    sys.stdout.write(f"{READY} {cell}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; return the exit status."""
    before = signal.signal(signal.SIGTERM, _end)
    app = typer.Typer(add_completion=False)
    app.command()(command)
    try:
        app(args=None if argv is None else list(argv), prog_name="gyre-worker")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else DONE
    finally:
        signal.signal(signal.SIGTERM, before)
    return DONE


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(DONE)  # nothing is kept here that an orderly end would save


if __name__ == "__main__":
    sys.exit(main())
