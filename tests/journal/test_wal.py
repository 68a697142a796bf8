"""The log of a store: durable before a write is done, never synced under the store's lock, never long."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal

_PATIENCE = 120.0


class Disk:
    """Stands in for the disk: syncs wait for `go`, and fail while `problem` is set."""

    def __init__(self) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.problem: OSError | None = None
        self._sync = os.fdatasync

    def sync(self, file: int) -> None:
        self.asked.set()
        assert self.go.wait(_PATIENCE)
        if self.problem is not None:
            raise self.problem
        self._sync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    held = Disk()
    monkeypatch.setattr(os, "fdatasync", held.sync)
    yield held
    held.go.set()


def test_a_write_is_done_once_the_log_is_synced_and_holds_nobody_up_before(tmp_path: Path, disk: Disk) -> None:
    with Journal(tmp_path / "s.db") as journal:
        disk.go.clear()
        write = journal.append("s", "k", 1, at=0.0)
        assert disk.asked.wait(_PATIENCE)
        other = sqlite3.connect(tmp_path / "s.db", timeout=0.0, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert other.execute("SELECT count(*) FROM entry").fetchone() == (1,), "written, and the store is free again"
        other.execute("COMMIT")
        other.close()
        assert not write.done()
        disk.go.set()
        assert write.result() == 1


def test_nothing_is_durable_on_a_disk_that_failed_once(tmp_path: Path, disk: Disk) -> None:
    with Journal(tmp_path / "s.db") as journal:
        disk.problem = OSError(5, "Input/output error")
        for _ in range(2):
            with pytest.raises(JournalError, match="Input/output error; stop the service"):
                journal.append("s", "k", 1, at=0.0).result()
            disk.problem = None


def test_a_loop_waits_for_its_turn_and_goes_on_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        journal = Journal(tmp_path / "s.db")
        journal.join_loop(loop)
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        write = journal.append("s", "k", 1, at=0.0)
        later = journal.append("s", "k", 2, at=0.0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert isinstance(write, asyncio.Future) and isinstance(later, asyncio.Future)
        assert not write.done()
        other.execute("INSERT INTO entry (stream, kind, at, body) VALUES ('s', 'k', 0, x'01')")
        other.execute("COMMIT")
        other.close()
        async with asyncio.timeout(_PATIENCE):
            assert (await write, await later) == (2, 3)
        journal.leave_loop()
        await asyncio.to_thread(journal.close)

    asyncio.run(main())


def test_a_loop_whose_turn_never_comes_leaves_the_wait_to_a_thread(tmp_path: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        journal = Journal(tmp_path / "s.db")
        journal.join_loop(loop)
        other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        write = journal.append("s", "k", 1, at=0.0)
        assert isinstance(write, asyncio.Future)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(write)
        other.execute("COMMIT")
        other.close()
        async with asyncio.timeout(_PATIENCE):
            assert await write == 1
            assert await journal.append("s", "k", 2, at=0.0) == 2  # type: ignore[misc]
        journal.leave_loop()
        await asyncio.to_thread(journal.close)

    asyncio.run(main())


def test_writers_that_never_rest_do_not_let_the_log_grow(tmp_path: Path) -> None:
    log, largest = tmp_path / "s.db-wal", 0
    with Journal(tmp_path / "s.db") as one, Journal(tmp_path / "s.db") as two:

        def write(journal: Journal) -> None:
            nonlocal largest
            for _ in range(400):
                journal.append("s", "k", b"x" * 100_000, at=0.0).result()
                largest = max(largest, log.stat().st_size)

        threads = [threading.Thread(target=write, args=(journal,)) for journal in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(one.entries("s")) == 800
    assert largest < 60 << 20 < (tmp_path / "s.db").stat().st_size
