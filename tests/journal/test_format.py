"""The second format: what the agent sent comes back as sent, is stored once, and is read without its whole run."""

from __future__ import annotations

import math
import sqlite3
import struct
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import LANE, RUN, open_run

from gyre_sdk.errors import JournalError
from gyre_sdk.journal import CallIntent, Journal, TokenChunk, store_file
from gyre_sdk.journal.blobs import as_ids, as_logprobs, blob_ids, blob_logprobs, ids_blob, listed, logprobs_blob
from gyre_sdk.records import CallId, CallStatus, LaneId, LaneRecord, RunId, RunStatus, Sampling

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
IDS = st.lists(st.integers(0, 200_000), max_size=200) | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)


def intent(name: str, messages: list[Any], raw: list[Any], **more: Any) -> CallIntent:
    fields: dict[str, Any] = {
        "parent": None,
        "fork_reason": None,
        "shared": 0,
        "prompt_ids": [1],
        "request": {},
        **more,
    }
    return CallIntent(
        call=CallId(name), run=RUN, lane=LANE, role="main", sampling=Sampling(), messages=messages, raw=raw,
        received_at=1.0, **fields,
    )  # fmt: skip


def count(path: Path, table: str) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        db.close()


@given(IDS, IDS)
def test_ids_come_back_and_small_lists_do_not_grow(ids: list[int], before: list[int]) -> None:
    blob = ids_blob(as_ids(ids), as_ids(before))
    assert blob_ids(blob, as_ids(before)).tolist() == ids
    assert len(blob) <= 4 * len(ids) + 1


@given(st.lists(st.none() | st.floats(max_value=0, allow_nan=False, width=32), max_size=400))
def test_logprobs_keep_every_bit(logprobs: list[float | None]) -> None:
    blob = logprobs_blob(as_logprobs(logprobs))
    found = listed(blob_logprobs(blob))
    assert [None if value is None else struct.pack("<f", value) for value in found] == [
        None if value is None else struct.pack("<f", value) for value in logprobs
    ]
    assert len(blob) <= 4 * len(logprobs) + 1


@pytest.mark.parametrize("blob", [b"\x09abc", b"\x01ab", b"\x02junk", b"\x04junk"])
def test_a_damaged_blob_is_an_error(blob: bytes) -> None:
    with pytest.raises(ValueError, match="blob"):
        blob_ids(blob, np.arange(100, dtype="<i4"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.lists(JSON, max_size=4), st.lists(JSON, max_size=4), st.booleans()),
        min_size=1, max_size=9,
    )
)  # fmt: skip
def test_any_lists_of_messages_come_back_as_sent(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[int, int, list[Any], list[Any], bool]]
) -> None:
    """Whatever a call keeps of its parent's lists, in two processes or one, read together or alone."""
    path = tmp_path_factory.mktemp("store") / "s.db"
    sent: list[tuple[list[Any], list[Any]]] = []
    with Journal(path) as one, Journal(path) as two:
        open_run(one)
        for number, (choice, kept, messages, raw, other) in enumerate(plan):
            parent = choice % number if number else None
            if parent is not None:
                messages = sent[parent][0][:kept] + messages
                raw = sent[parent][1][:kept] + raw
            call = intent(
                f"c{number}", messages, raw, parent=None if parent is None else CallId(f"c{parent}"),
                request={"body": {"tools": raw, "text": "x" * 10 * number}, "odd": messages},
            )  # fmt: skip
            (two if other else one).call_received(call).result()
            sent.append((messages, raw))
    encode = msgspec.json.encode
    with Journal(path, "r") as journal:
        for number, (exchange, (messages, raw)) in enumerate(zip(journal.exchanges(RUN), sent, strict=True)):
            assert encode(exchange.messages) == encode(messages) and encode(exchange.raw) == encode(raw)
            assert exchange.request == {"body": {"tools": raw, "text": "x" * 10 * number}, "odd": messages}
            assert journal.exchange(f"c{number}") == exchange
        assert [item for item in journal.audit() if item.level == "error"] == []


def test_equal_bodies_are_stored_once(tmp_path: Path) -> None:
    """A raw item that equals a canonical message, and an answer that is sent back, are one row of `message`."""
    path = tmp_path / "s.db"
    user, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}
    with Journal(path) as journal:
        open_run(journal)
        journal.call_received(intent("a", [user], [user])).result()
        before = count(path, "message")
        assert before == 2, "the message, and the sampling parameters"
        journal.call_ended(
            CallId("a"), CallStatus.COMPLETE, at=2.0, sampled=TokenChunk(0, [], [], []), answer=answer
        ).result()
        journal.call_received(intent("b", [user, answer], [user, answer], parent=CallId("a"))).result()
        assert count(path, "message") == before + 1
        futures = [journal.call_received(intent(f"n{n}", [{"role": "user", "content": "same"}], [])) for n in range(5)]
        for future in futures:
            future.result()
        assert count(path, "message") == before + 2 and count(path, "pack") == 3
        assert journal.exchange("b").answer is None and journal.exchange("a").answer == answer  # type: ignore[union-attr]


def test_what_an_undone_write_brought_is_written_again(tmp_path: Path) -> None:
    """A refused call must not leave later messages based on a pack that is gone."""
    text = [{"role": "user", "content": f"line {n} " * 60} for n in range(9)]
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        journal.call_received(intent("a", text[:1], [])).result()
        futures = [journal.call_received(intent("a", text[:3], [])), journal.call_received(intent("b", text[:4], []))]
        with pytest.raises(JournalError, match="refused"):
            futures[0].result()
        futures[1].result()
        journal.call_received(intent("c", text, [], parent=CallId("b"))).result()
    with Journal(tmp_path / "s.db", "r") as journal:
        assert [item.messages for item in journal.exchanges(RUN)] == [text[:1], text[:4], text]
        assert [item.level for item in journal.audit()] == ["info"] * 3


def test_chains_of_packs_are_short(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        for number in range(40):
            journal.call_received(
                intent(f"c{number}", [{"role": "user", "content": f"{number} word " * 80}], [])
            ).result()
    db = sqlite3.connect(tmp_path / "s.db")
    assert db.execute("SELECT max(depth), count(base) FROM pack").fetchone()[0] == 7
    db.close()


def test_one_call_is_read_alone(tmp_path: Path) -> None:
    """`call` gives what `calls` gives, with damage elsewhere in the run too."""
    path = tmp_path / "s.db"
    with Journal(path) as journal:
        open_run(journal)
        whole: list[int] = []
        for number in range(30):
            prompt = [*whole, *range(number * 40, number * 40 + 80)]
            journal.call_received(
                intent(f"c{number}", [], [], prompt_ids=prompt, shared=len(whole), parent=CallId(f"c{number - 1}") if number else None)
            ).result()  # fmt: skip
            chunk = TokenChunk(0, [number] * 60, [-0.1 * number, None] * 30, [])
            if number % 7 == 6:
                journal.tokens_sampled(CallId(f"c{number}"), chunk).result()
            else:
                journal.call_ended(CallId(f"c{number}"), CallStatus.COMPLETE, at=2.0, sampled=chunk).result()
            whole = prompt + [number] * 60
        side = intent("side", [], [], prompt_ids=whole[:100] + [9] * 60, shared=100, parent=CallId("c29"))
        journal.call_received(side).result()
        every = {call.call: call for call in journal.calls()}
        assert {name: journal.call(name) for name in every} == every
        assert every[CallId("side")].prompt_ids == side.prompt_ids
        assert journal.call("nobody") is None and journal.exchange("nobody") is None
        assert math.isclose(every[CallId("c5")].logprobs[0] or 0, -0.5, rel_tol=1e-6)
    db = sqlite3.connect(path)
    db.execute("UPDATE prompt SET ids=x'09' WHERE seq=20")
    db.commit()
    db.close()
    with Journal(path, "r") as journal:
        assert journal.call("c18") == every[CallId("c18")]
        with pytest.raises(JournalError, match="c19 are damaged"):
            journal.call("c25")


def test_the_call_that_started_a_lane_and_what_was_spent_are_kept(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        lane = LaneRecord(LaneId("sub"), RUN, "subagent", "sub", LANE, 2.0, CallId("c1"))
        journal.open_lane(lane, "k").result()
        assert journal.lanes(RUN)[1] == lane == journal.lane_of_key("k")
        assert journal.spent(RUN) is None and journal.spent("nobody") is None
        journal.spend_run(RUN, RunStatus.LIMIT, "50 turns of 50").result()
        journal.spend_run(RUN, RunStatus.TIMED_OUT, "60 s").result()
        assert journal.spent(RUN) == (RunStatus.LIMIT, "50 turns of 50")
        with pytest.raises(JournalError, match="not in the store"):
            journal.spend_run(RunId("nobody"), RunStatus.LIMIT, "x").result()
        with pytest.raises(JournalError, match="not as completed"):
            journal.spend_run(RUN, RunStatus.COMPLETED, "x")


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / "s.db").close()
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute("PRAGMA user_version=1")
    db.close()
    with pytest.raises(JournalError, match="has format 1, this gyre reads format 2"):
        Journal(tmp_path / "s.db", "r")


def test_a_directory_means_the_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dir.db").mkdir()
    assert store_file(tmp_path) == tmp_path / "gyre.db"
    assert store_file(tmp_path / "new") == tmp_path / "new" / "gyre.db"
    assert store_file(str(tmp_path / "new.db")) == tmp_path / "new.db"
    assert store_file(tmp_path / "file") == tmp_path / "file"
    assert store_file(tmp_path / "dir.db") == tmp_path / "dir.db" / "gyre.db"


@pytest.mark.parametrize("name", ["of run #1?", "50%20 done", "täglich"])
def test_any_folder_holds_a_store(name: str, tmp_path: Path) -> None:
    with Journal(tmp_path / name) as journal:
        open_run(journal)
    assert (tmp_path / name / "gyre.db").is_file() and sorted(tmp_path.iterdir()) == [tmp_path / name]
    with Journal(str(tmp_path / name), "r") as journal:
        assert [run.run for run in journal.runs()] == [RUN]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        JournalError, match=r"the folder .*/file/below of the store cannot be made: Not a directory; give"
    ):
        Journal(tmp_path / "file" / "below" / "s.db")
