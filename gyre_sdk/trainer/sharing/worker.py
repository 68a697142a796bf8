"""The training process of a satellite cell.

    python -m gyre_sdk.trainer.sharing.worker --config FILE --core HOST:PORT --key-file FILE --cell NAME

It loads the policy that the trainer trains, dials in, and waits to be admitted. While its cell serves it holds no memory
of a GPU. With `cells.ranks` it starts more processes like itself, and leads them. Exit status: 0 interrupted, 1 it cannot
go on, 2 the settings are wrong.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from gyre_sdk.errors import GyreError, SettingsError
from gyre_sdk.trainer.config import TrainerConfig, load_config, read_config
from gyre_sdk.trainer.keys import read_key
from gyre_sdk.trainer.main import DONE, FAILED, MISCONFIGURED, quiet_libraries
from gyre_sdk.trainer.sharing.companions import Companions, Meeting, devices_of
from gyre_sdk.trainer.sharing.companions import meet as meet_ranks
from gyre_sdk.trainer.sharing.satellite import Satellite
from gyre_sdk.trainer.sharing.wire import Address

if TYPE_CHECKING:
    from gyre_sdk.trainer.sharing.cell_policy import CellPolicy

READY = "gyre-worker ready on"
"""Start of the line that is printed once the core has let it in; the cell's name follows."""


def command(
    config: Annotated[Path, typer.Option(help="Settings that the trainer saved (.json), or its TOML file.")],
    core: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the trainer listens.")],
    key_file: Annotated[Path, typer.Option(help="File with the key of the training; nobody else may read it.")],
    cell: Annotated[str, typer.Option(help="Name of the cell.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key.")] = None,
    rank: Annotated[
        str | None, typer.Option(metavar="RANK/RANKS", help="Follow the worker that started this one.")
    ] = None,
    meet: Annotated[int, typer.Option(metavar="PORT", help="Where that one waits for it.")] = 0,
) -> None:
    """Train units of the batch that a trainer has open, whenever it admits this cell."""
    try:
        settings = _settings(config, set_ or [])
        address, secret = _address(core), read_key(key_file)
        quiet_libraries()
        if rank is not None:
            _follow(settings, rank, meet)
        again = ["--config", str(config), "--core", core, "--key-file", str(key_file), "--cell", cell]
        for pair in set_ or []:
            again += ["--set", pair]
        _lead(settings, address, secret, cell, again)
    except GyreError as error:
        sys.stderr.write(f"gyre-worker: {type(error).__name__}: {error}\n")
        raise typer.Exit(MISCONFIGURED if isinstance(error, SettingsError) else FAILED) from None


def _lead(settings: TrainerConfig, address: Address, key: bytes, cell: str, arguments: list[str]) -> None:
    """Be the worker, or rank 0 of it. `arguments`: of this process."""
    size = settings.cells.ranks if settings.cells is not None else 1
    companions = None
    if size > 1:
        import torch

        places = devices_of(size, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        companions = Companions([_module(), *arguments], size, places)
    try:
        part = _part(settings, companions.meeting if companions is not None else None)
        Satellite(address, key, cell, part, ready=lambda: _say(cell)).run()
    finally:
        if companions is not None:
            companions.end()


def _follow(settings: TrainerConfig, place: str, port: int) -> NoReturn:
    """Do what rank 0 says until it ends; then this process is ended too."""
    rank, _, size = place.partition("/")
    if not (rank.isdigit() and size.isdigit() and 0 < int(rank) < int(size)):
        raise SettingsError(f"--rank {place!r} is not RANK/RANKS, for example 1/2")
    _part(settings, Meeting(int(rank), int(size), port)).follow()


def _part(settings: TrainerConfig, meeting: Meeting | None) -> CellPolicy:
    from gyre_sdk.trainer.ranks import Ranks
    from gyre_sdk.trainer.sharing.cell_policy import CellPolicy

    if meeting is not None:
        meet_ranks(meeting)
    return CellPolicy(settings, Ranks())


def _module() -> str:
    """Return the module that this process runs."""
    spec = sys.modules["__main__"].__spec__
    return __name__ if spec is None else spec.name


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
