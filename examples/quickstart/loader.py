"""The demo's tasks as `gyre.Task`s: written as Harbor folders once, then loaded like any other task folder."""

from __future__ import annotations

from pathlib import Path

from tasks import Split, generate, write_folders

import gyre_sdk as gyre


def load(folder: str, split: str = "train", count: int = 400, seed: int = 0) -> list[gyre.Task]:
    """Return `count` tasks of a split, from `folder`; generate what is not there yet.

    Raises:
        TaskError: a folder was damaged; delete `folder` to make it anew.
    """
    root = Path(folder) / f"{split}-{seed}-{count}"
    if not (root / "complete").is_file():
        write_folders(root, generate(Split(split), count, seed))
        (root / "complete").touch()
    return [gyre.Task.load(path.parent) for path in sorted(root.glob("*/task.toml"))]
