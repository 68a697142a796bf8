"""Tasks of several parts, made of the demo's: longer runs, for the ablation of the bound on trajectories."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))

from tasks import Split, Task, _draw, _Names, write_folders

import gyre_sdk as gyre

PARTS = 5
"""Of a task; the last one goes to a helper."""


def generate(split: Split | str, count: int, seed: int) -> list[Task]:
    """Return `count` different tasks of a split; its parts are in no other split's tasks."""
    split = Split(split)
    rng = random.Random(f"branching-{split}-{seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        names = _Names(rng)
        task = Task(f"{split}-{len(tasks):04d}", split, tuple(_draw(names, split) for _ in range(PARTS)))
        tasks.setdefault(task.instruction, task)
    return list(tasks.values())


def load(folder: str, split: str = "train", count: int = 400, seed: int = 0) -> list[gyre.Task]:
    """Return `count` tasks of a split as Harbor folders, from `folder`; make what is not there yet."""
    root = Path(folder) / f"{split}-{seed}-{count}"
    if not (root / "complete").is_file():
        write_folders(root, generate(split, count, seed))
        (root / "complete").touch()
    return [gyre.Task.load(path.parent) for path in sorted(root.glob("*/task.toml"))]
