"""The folder through which replicas share keys and values: its names, and what goes when there is too much."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["SWEEP_S", "clear", "layout_name", "sweep", "training_folder"]

SWEEP_S = 60.0
"""Seconds between two looks at the size of the folder."""
_PREFIX = "gyre-kv-"
"""Of the folders' names: what else lies beside them is not touched."""
_LEFT_S = 600.0
"""Seconds after which a folder that no replica looks after counts as left behind."""


def training_folder(parent: Path, record: Path, *, store: Path, fresh: bool) -> Path:
    """Return a training's own folder: numbers of versions mean the same weights in no other.

    Args:
        parent: of the folders of all trainings.
        record: file that keeps the name of this one's.
        store: where its versions are numbered.
        fresh: no version but the first was numbered there.
    """
    about = f"{store.resolve()} {store.stat().st_ino}"
    name, _, before = record.read_text().partition("\n") if record.is_file() else ("", "", "")
    if fresh or before != about:
        name = _PREFIX + secrets.token_hex(8)
        record.write_text(f"{name}\n{about}")
    return parent / name


def layout_name(fields: Mapping[str, Any]) -> str:
    """Return a name for how keys lie in a file: shapes, types and layers, not where the model was loaded from."""
    told = json.dumps({name: value for name, value in fields.items() if name != "model_name"}, sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def sweep(root: Path, version: str | None, limit: int) -> None:
    """Remove the files of other versions, and the oldest beyond a limit.

    Files of versions that another replica still serves go too: it computes them again.

    Args:
        root: one folder for each version.
        version: what this replica serves; None: not known, all stay.
        limit: bytes.
    """
    root.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        root.touch()
    for folder in root.iterdir():
        if version is not None and version.isdigit() and folder.name.isdigit() and int(folder.name) < int(version):
            shutil.rmtree(folder, ignore_errors=True)
    files = []
    for path in root.rglob("*.bin"):
        with suppress(FileNotFoundError):
            found = path.stat()
            files.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size


def clear(parent: Path, now: float | None = None) -> None:
    """Remove the folders of trainings that were killed: those that no replica has looked after for ten minutes."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):  # another training clears too
            touched = max(path.stat().st_mtime for path in (folder, *folder.glob("*")))
            if (now or time.time()) - touched > _LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)
