"""What the store keeps of evaluations: the stream `scoring`, one entry per evaluated run that there is more to say of than a reward."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.harness.scoring.watch import Seal
from gyre_sdk.harness.task import Task
from gyre_sdk.journal import Journal
from gyre_sdk.records import Score

STREAM = "scoring"
EVALUATED, RESCORED = "evaluated", "rescored"


class Evaluated(msgspec.Struct, frozen=True):
    """Body of an entry."""

    run: str
    task: str
    """Name of the task."""
    score: Score
    source: str = ""
    """Folder that the task was loaded from; empty where it was not."""
    tests: str = ""
    """Digest of the tests."""
    seal: Seal | None = None
    """Of the run's start; kept with a snapshot."""


def worth_recording(score: Score) -> bool:
    """Tell whether there is more to say than the run's own record says."""
    return bool(
        score.tampered
        or score.output
        or score.snapshot
        or score.explanation
        or score.reward is None
        or score.evaluations > 1
    )


def evaluated(run: str, task: Task, score: Score, seal: Seal | None) -> Evaluated:
    """Return what is recorded of an evaluation."""
    folder = task.tests.parent if isinstance(task.tests, Path) else None
    source = str(folder.resolve()) if folder is not None and (folder / "task.toml").is_file() else ""
    return Evaluated(run, task.name, score, source, tests_digest(task), seal if score.snapshot else None)


def tests_digest(task: Task) -> str:
    """Return a hash of what evaluates a task; empty for a scorer in Python."""
    if task.scorer is not None:
        return ""
    found = blake2b(digest_size=16)
    for name, content in sorted(task.test_files().items()):
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    found.update(f"{task.test_command}\0{sorted(task.verifier_env.items())}".encode())
    return found.hexdigest()


def append(store: Path, kind: str, entries: Iterable[Evaluated], *, at: float) -> None:
    """Append entries to a store of this machine.

    Raises:
        JournalError: the store is not here, or cannot be written.
    """
    if not store.is_file():
        raise JournalError(f"store {store} is not on this machine; record scoring where the service runs")
    with Journal(store, "rw") as journal:
        for write in [journal.append(STREAM, kind, entry, at=at) for entry in entries]:
            write.result()


def evaluations(journal: Journal, run: str | None = None) -> list[Evaluated]:
    """Return what is recorded of runs as they were evaluated, oldest first; what was scored again is not among it.

    Raises:
        JournalError: an entry cannot be read.
    """
    found = []
    for entry in journal.entries(STREAM):
        if entry.kind != EVALUATED:
            continue
        try:
            body = msgspec.msgpack.decode(entry.body, type=Evaluated)
        except msgspec.DecodeError as error:
            raise JournalError(f"entry {entry.seq} of {STREAM!r} in {journal.path} cannot be read: {error}") from error
        if run is None or body.run == run:
            found.append(body)
    return found
