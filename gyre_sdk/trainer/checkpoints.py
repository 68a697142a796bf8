"""Checkpoints on disk: whole or not there.

A checkpoint counts once the ledger has its digest. What a killed trainer left half-written has no entry, what was
damaged later does not match its digest, and what belongs to a voided lineage is removed before it can be taken for new.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.ledger import LedgerState
from gyre_sdk.trainer.weights import file_digest

PREFIX = "checkpoint-"
_FROM_TORCH = re.compile(r"inline_container|iostream")
"""How torch says that a file could not be written."""


def folder_digest(folder: Path, *, sync: bool = False) -> str:
    """Return the hash of all files of a folder, names included; with `sync`, flush each to the disk first."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if sync:
            _sync(path)
        found.update(f"{path.relative_to(folder)}\0{file_digest(path)}\0".encode())
    if sync:
        _sync(folder)
    return found.hexdigest()


def whole(state: LedgerState) -> set[int]:
    """Return the steps whose checkpoint is on disk as it was recorded."""
    found = set()
    for step, kept in state.steps.items():
        if kept.checkpoint is not None:
            folder = Path(kept.checkpoint.path)
            if folder.is_dir() and folder_digest(folder) == kept.checkpoint.digest:
                found.add(step)
    return found


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints of later steps."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        number = path.name.removeprefix(PREFIX)
        if path.name.startswith(PREFIX) and number.isdigit() and int(number) > step:
            shutil.rmtree(path)


@contextmanager
def whole_or_gone(folder: Path) -> Iterator[None]:
    """Remove a checkpoint whose files cannot be written whole.

    Raises:
        TrainerError: they cannot.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not _FROM_TORCH.search(str(error)):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        free = shutil.disk_usage(next(above for above in folder.parents if above.is_dir())).free / 2**20
        raise TrainerError(
            f"{folder} cannot be written ({type(error).__name__}: {error}); {free:.0f} MiB are free there: make room, then"
            " run the same command again, which resumes at the checkpoint before"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
