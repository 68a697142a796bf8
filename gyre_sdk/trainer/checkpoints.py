"""Checkpoints on disk: whole or not there.

A checkpoint counts once the ledger has its digest. What a killed trainer left half-written has no entry, what was
damaged later does not match its digest, and what belongs to a voided lineage is removed before it can be taken for new.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from gyre_sdk.trainer.ledger import LedgerState
from gyre_sdk.trainer.weights import file_digest

PREFIX = "checkpoint-"


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
