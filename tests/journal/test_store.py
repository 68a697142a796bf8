"""The store: durable when the future resolves, exact when read back, one terminal state per run."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import JournalError
from gyre_sdk.journal import CallEnd, CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallStatus,
    ForkReason,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

RUN, LANE = RunId("r1"), LaneId("l1")


def open_run(journal: Journal, run: str = RUN, lane: str = LANE) -> None:
    journal.open_run(
        RunRecord(run=RunId(run), task="t", created_at=1.0, group=None),
        LaneRecord(lane=LaneId(lane), run=RunId(run), role="main", name="main", parent=None, created_at=1.0),
        f"digest-{lane}",
    ).result()


def intent(call: str, prompt: list[int], *, parent: str | None = None, shared: int = 0) -> CallIntent:
    return CallIntent(
        call=CallId(call),
        run=RUN,
        lane=LANE,
        role="main",
        parent=CallId(parent) if parent else None,
        fork_reason=ForkReason.CLIENT_EDIT if parent and shared < 3 else None,
        shared=shared,
        prompt_ids=prompt,
        sampling=Sampling(temperature=0.5, max_tokens=7, extra={"min_p": 0.1}),
        request={"model": "policy", "x_unknown": {"a": [1]}},
        messages=[{"role": "system", "content": "s"}, {"role": "user", "content": call}],
        received_at=2.0,
    )


def record(journal: Journal, call: CallIntent, sampled: list[int]) -> None:
    journal.call_received(call).result()
    spans = [VersionSpan(3, 0, len(sampled))] if sampled else []
    journal.call_ended(
        call.call,
        CallStatus.COMPLETE,
        at=3.0,
        sampled=TokenChunk(0, sampled, [-0.5] * len(sampled), spans),
        finish_reason="stop",
        answer={"role": "assistant", "content": "é"},
    ).result()
    journal.call_delivered(call.call).result()


def test_call_comes_back_exactly(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        record(journal, intent("c1", [1, 2, 3]), [4, 5])
        record(journal, intent("c2", [1, 2, 3, 4, 5, 6], parent="c1", shared=5), [7])
        record(journal, intent("c3", [1, 2, 9], parent="c2", shared=2), [8])
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = {call.call: call for call in journal.calls()}
        assert calls["c2"].prompt_ids == [1, 2, 3, 4, 5, 6]
        assert calls["c3"].prompt_ids == [1, 2, 9]
        assert calls["c3"].fork_reason is ForkReason.CLIENT_EDIT
        assert calls["c1"].sampled_ids == [4, 5] and calls["c1"].versions == [VersionSpan(3, 0, 2)]
        assert calls["c1"].sampling.extra == {"min_p": 0.1}
        assert calls["c1"].status is CallStatus.DELIVERED
        exchange = journal.exchanges(RUN)[0]
        assert exchange.messages[1] == {"role": "user", "content": "c1"}
        assert exchange.answer == {"role": "assistant", "content": "é"}
        assert exchange.request["x_unknown"] == {"a": [1]}
        assert journal.call_summaries()[1].version == 3
        assert [call.seq for call in journal.call_summaries(2, also={1})] == [1, 3], "not those between"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(0, 99), max_size=5)), min_size=1, max_size=12))
def test_any_tree_of_prompts_is_stored_without_loss(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "s.db"
    expected: dict[str, list[int]] = {}
    wholes: list[tuple[str, list[int]]] = []
    with Journal(path) as journal:
        open_run(journal)
        for number, (choice, tokens) in enumerate(plan):
            name = f"c{number}"
            if wholes:
                parent, whole = wholes[choice % len(wholes)]
                shared = min(choice, len(whole))
                prompt = [*whole[:shared], 1000 + number, *tokens]
                record(journal, intent(name, prompt, parent=parent, shared=shared), tokens)
            else:
                prompt = [7, *tokens]
                record(journal, intent(name, prompt), tokens)
            expected[name] = prompt
            wholes.append((name, prompt + tokens))
    with Journal(path, "r") as journal:
        assert {call.call: call.prompt_ids for call in journal.calls()} == expected
        for listed, arrays in zip(journal.calls(), journal.calls(arrays=True), strict=True):
            assert np.array_equal(arrays.prompt_ids, listed.prompt_ids)
            assert np.array_equal(arrays.sampled_ids, listed.sampled_ids)
            assert np.asarray(arrays.logprobs).tolist() == listed.logprobs


def test_a_long_run_is_stored_once(tmp_path: Path) -> None:
    """200 calls that each re-send the whole history cost bytes for new tokens only."""
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        whole: list[int] = []
        for number in range(200):
            prompt = whole + list(range(100))
            record(
                journal,
                intent(f"c{number}", prompt, parent=f"c{number - 1}" if number else None, shared=len(whole)),
                [1] * 20,
            )
            whole = prompt + [1] * 20
    stored = (
        sqlite3.connect(tmp_path / "s.db")
        .execute("SELECT sum(length(prompt.ids) + length(sampled.ids)) FROM prompt JOIN sampled USING (seq)")
        .fetchone()[0]
    )
    assert stored < 3 * len(whole)


def test_run_ends_once(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        journal.end_run(RUN, RunStatus.COMPLETED, at=2.0, reward=0.5).result()
        journal.end_run(RUN, RunStatus.COMPLETED, at=9.0, reward=0.9).result()
        with pytest.raises(JournalError, match="already ended as completed"):
            journal.end_run(RUN, RunStatus.CANCELLED, at=2.0).result()
        assert journal.run(RUN).reward == 0.5  # type: ignore[union-attr]


def test_one_bad_write_does_not_spoil_its_neighbours(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        good = journal.call_received(intent("c1", [1]))
        bad = journal.call_received(intent("c1", [2]))
        later = journal.call_received(intent("c2", [3]))
        good.result()
        later.result()
        with pytest.raises(JournalError, match="refused"):
            bad.result()
        assert [call.prompt_ids for call in journal.calls()] == [[1], [3]]


def test_open_call_shows_its_durable_tokens_and_attempts(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        journal.call_received(intent("c1", [1, 2])).result()
        attempt = AttemptRecord(CallId("c1"), 0, "http://a", "req-0", 0, 0, "open")
        journal.call_dispatched(attempt).result()
        journal.tokens_sampled(CallId("c1"), TokenChunk(0, [5, 6], [-1.0, None], [VersionSpan(1, 0, 2)])).result()
        journal.tokens_sampled(CallId("c1"), TokenChunk(2, [7], [-2.0], [VersionSpan(2, 2, 3)])).result()
        call = next(journal.calls())
        assert call.status is CallStatus.STREAMING and call.sampled_ids == [5, 6, 7]
        assert call.logprobs == [-1.0, None, -2.0]
        arrays = next(journal.calls(arrays=True))
        np.testing.assert_array_equal(arrays.logprobs, [-1.0, np.nan, -2.0])
        np.testing.assert_array_equal(arrays.sampled_ids, [5, 6, 7])
        journal.attempt_ended(AttemptRecord(CallId("c1"), 0, "http://a", "req-0", 0, 3, "broken")).result()
        assert journal.attempts("c1")[0].end == "broken"


def test_a_call_recorded_whole_reads_like_one_recorded_in_parts(tmp_path: Path) -> None:
    """The same two calls, the second one after the first, either way; and the journal's own audit finds nothing."""
    found = []
    for whole in (False, True):
        with Journal(tmp_path / f"{whole}.db") as journal:
            open_run(journal)
            for call, sampled in (
                (intent("c1", [1, 2]), [3, 4]),
                (intent("c2", [1, 2, 3, 4, 5], parent="c1", shared=4), [6]),
            ):
                attempt = AttemptRecord(call.call, 0, "http://a", f"req-{call.call}", 0, len(sampled), "finished")
                chunk = TokenChunk(0, sampled, [-0.5, None][: len(sampled)], [VersionSpan(3, 0, len(sampled))])
                answer = {"role": "assistant", "content": f"says {call.call}"}
                end = CallEnd(CallStatus.COMPLETE, 3.0, chunk, "stop", answer, None, attempt)
                if whole:
                    journal.call_recorded(call, end).result()
                else:
                    journal.call_received(call, msgspec.structs.replace(attempt, tokens_to=0, end="open"))
                    journal.call_ended(
                        call.call,
                        end.status,
                        at=3.0,
                        sampled=chunk,
                        finish_reason="stop",
                        answer=answer,
                        attempt=attempt,
                    ).result()
            exchanges = journal.exchanges(RUN)
            found.append((list(journal.calls()), exchanges, [journal.attempts(call) for call in ("c1", "c2")]))
            assert not list(journal.audit())
    assert found[0] == found[1]
    assert [call.sampled_ids for call in found[0][0]] == [[3, 4], [6]]


def test_tokens_of_a_call_that_was_refused_are_refused(tmp_path: Path) -> None:
    """They must not pass for durable: nobody would find them."""
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        chunk = TokenChunk(0, [5], [-1.0], [])
        for write in (
            journal.tokens_sampled(CallId("c1"), chunk),
            journal.call_ended(CallId("c1"), CallStatus.COMPLETE, at=3.0, sampled=chunk),
        ):
            with pytest.raises(JournalError, match="call c1 is not in the store"):
                write.result()


def test_entries_replay_in_order(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        for number in range(5):
            journal.append("ledger", "step", {"n": number}, at=float(number)).result()
        journal.append("other", "x", None, at=0.0).result()
        found = journal.entries("ledger", after=2)
        assert [entry.at for entry in found] == [2.0, 3.0, 4.0]


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not exist"):
        Journal(tmp_path / "none.db", "r")
    (tmp_path / "empty.db").touch()
    with pytest.raises(JournalError, match="is empty"):
        Journal(tmp_path / "empty.db", "r")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)")
    with pytest.raises(JournalError, match="not a gyre store"):
        Journal(tmp_path / "other.db")
    (tmp_path / "text.db").write_text("hello world, this is not a database at all" * 100)
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "text.db")


def test_a_store_is_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    """SQLite makes a log and its index beside a store even for reading; on a read-only disk it cannot."""
    folder = tmp_path / "a b"
    with Journal(folder) as journal:
        open_run(journal)
        closed = (folder / "gyre.db").read_bytes()
        record(journal, intent("c1", [1, 2, 3]), [4, 5])
        log = (folder / "gyre.db-wal").read_bytes()
    read = "from gyre_sdk.journal import Journal; print([call.sampled_ids for call in Journal(r'{}', 'r').calls()])"
    write = "from gyre_sdk.journal import Journal; Journal(r'{}')"
    folder.chmod(0o555)
    try:
        assert without_rights(read.format(folder)) == "[[4, 5]]"
        assert "its folder and its file must be writable" in without_rights(write.format(folder))
        folder.chmod(0o755)
        (folder / "gyre.db-wal").touch()
        folder.chmod(0o555)
        assert without_rights(read.format(folder)) == "[[4, 5]]"
        folder.chmod(0o755)
        (folder / "gyre.db").write_bytes(closed)
        (folder / "gyre.db-wal").write_bytes(log)
        folder.chmod(0o555)
        said = without_rights(read.format(folder))
        assert f"gyre.db-wal holds {len(log)} bytes" in said and f"cp '{folder}/gyre.db'* FOLDER" in said
    finally:
        folder.chmod(0o755)


def without_rights(program: str) -> str:
    """Run Python as this user without its right to pass over permissions, where it has it; return the last line it said."""
    bounded = [] if os.geteuid() else ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    done = subprocess.run(
        [*bounded, sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]


def test_what_resolved_survives_kill_9(tmp_path: Path) -> None:
    """A writer killed without warning leaves every call whose future had resolved, and a store that opens."""
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[2])
        from test_store import intent, open_run
        from gyre_sdk.journal import Journal
        journal = Journal(sys.argv[1])
        open_run(journal)
        for number in range(100000):
            journal.call_received(intent(f"c{number}", [number])).result()
            print(number, flush=True)
        """
    )
    path = tmp_path / "s.db"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    seen = [int(process.stdout.readline()) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    seen += [int(line) for line in process.stdout.read().split()]
    process.wait()
    with Journal(path) as journal:
        stored = [call.prompt_ids[0] for call in journal.calls()]
        assert stored[: len(seen)] == seen
        assert len(stored) - len(seen) <= 1


def test_two_processes_write_one_store(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as one, Journal(tmp_path / "s.db") as two:
        futures = [(one if number % 2 else two).append("s", "k", number, at=0.0) for number in range(200)]
        assert len({future.result() for future in futures}) == 200
        assert len(one.entries("s")) == 200


def test_processes_open_one_new_store_at_the_same_moment(tmp_path: Path) -> None:
    """SQLite refuses a second process that turns a new file to write-ahead logging, without waiting."""
    program = """
import sys
from pathlib import Path
from gyre_sdk.journal import Journal
for line in sys.stdin:
    Journal(Path(line.strip())).close()
    print("opened", flush=True)
"""
    crowd = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        for number in range(100):
            for process in crowd:
                assert process.stdin is not None
                process.stdin.write(f"{tmp_path / f'{number}.db'}\n")
                process.stdin.flush()
            for process in crowd:
                assert process.stdout is not None
                assert process.stdout.readline() == "opened\n"
    finally:
        for process in crowd:
            process.kill()
            process.communicate()
