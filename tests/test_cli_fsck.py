"""`gyre fsck`: quiet over a sound store, one line per thing that is wrong, whatever is wrong."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from test_cli import gyre

from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallStatus,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

RUN, LANE = RunId("r"), LaneId("l")
LONG = list(range(1000, 1800))


def write(journal: Journal, name: str, prompt: list[int], sampled: list[int], **more: Any) -> None:
    call, parent = CallId(name), more.get("parent")
    journal.call_received(
        CallIntent(
            call, RUN, LANE, "main", parent, None, more.get("shared", 0), prompt, Sampling(max_tokens=9),
            {"dialect": "chat", "hosted": more.get("hosted", False)}, [{"role": "user", "content": f"do {name} " * 50}],
            2.0, raw=[{"content": f"do {name} " * 50, "role": "user"}],
        )
    )  # fmt: skip
    if not more.get("hosted"):
        journal.call_dispatched(AttemptRecord(call, 0, "http://a", f"{name}-0", 0, 0, "open"))
        half = len(sampled) // 2
        journal.attempt_ended(AttemptRecord(call, 0, "http://a", f"{name}-0", 0, half, "broken"))
        journal.call_dispatched(AttemptRecord(call, 1, "http://b", f"{name}-1", half, half, "open"))
    if more.get("open"):
        journal.tokens_sampled(call, TokenChunk(0, sampled[:1], [-1.0], []))
        journal.tokens_sampled(call, TokenChunk(1, sampled[1:], [None] * (len(sampled) - 1), [])).result()
        return
    if not more.get("hosted"):
        journal.attempt_ended(AttemptRecord(call, 1, "http://b", f"{name}-1", half, len(sampled), "finished"))
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, len(sampled))] if len(sampled) > 1 else []
    chunk = TokenChunk(0, sampled, [-0.25] * len(sampled), spans)
    answer = {"role": "assistant", "content": f"done {name}"}
    journal.call_ended(call, CallStatus.COMPLETE, at=3.0, sampled=chunk, finish_reason="stop", answer=answer)
    journal.call_delivered(call).result()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "gyre.db"
    with Journal(path) as journal:
        main = LaneRecord(LANE, RUN, "main", "main", None, 1.0)
        journal.open_run(RunRecord(RUN, "t", 1.0), main, "k").result()
        write(journal, "a", LONG, [1, 2, 3])
        write(journal, "b", [*LONG, 1, 2, 3, *LONG], [4, 5], parent=CallId("a"), shared=803)
        write(journal, "h", [], [], hosted=True)
        write(journal, "o", [1], [6, 7], open=True)
        lane = LaneRecord(LaneId("s"), RUN, "subagent", "sub", LANE, 2.0, CallId("a"))
        journal.open_lane(lane, "k2").result()
        journal.open_run(
            RunRecord(RunId("r2"), "t", 1.0), LaneRecord(LaneId("l2"), RunId("r2"), "main", "main", None, 1.0), "k3"
        ).result()
        journal.end_run(RunId("r2"), RunStatus.COMPLETED, at=9.0, reward=1.0).result()
    return path


def test_a_sound_store_has_no_errors_and_its_open_calls_are_listed(sound: Path) -> None:
    done = gyre("fsck", sound.parent)
    assert done.returncode == 0, done.stdout
    assert "no errors in 4 calls" in done.stderr
    assert done.stdout.splitlines() == [
        "info o: open (streaming); nothing: the agent's retry resumes it, or its run's end ends it"
    ]


DAMAGE = [
    ("UPDATE call SET ended_at=NULL WHERE call='a'", "a", "without a terminal record"),
    ("UPDATE call SET finish_reason=NULL WHERE call='b'", "b", "without a terminal record"),
    ("DELETE FROM prompt WHERE seq=1", "a", "ids of its prompt are not in the store"),
    ("DELETE FROM sampled WHERE seq=2", "b", "0 sampled ids are stored, 2 were sampled"),
    ("UPDATE sampled SET logprobs=substr(logprobs, 1, 5) WHERE seq=1", "a", "1 log-probs for 3 sampled ids"),
    ("UPDATE sampled SET logprobs=x'000000803f000080bf000080bf' WHERE seq=1", "a", "not those that were written"),
    ("UPDATE sampled SET ids=x'01040000050000060000' WHERE seq=1", "b", "does not continue its parent's path"),
    ("UPDATE sampled SET ids=x'0104' WHERE seq=2", "b", "sampled ids cannot be read"),
    ("UPDATE prompt SET ids=x'0228b52ffd' WHERE seq=1", "a", "the ids of its prompt cannot be read"),
    ("UPDATE call SET versions=x'90' WHERE call='a'", "a", "versions cover 0 of 3"),
    ("UPDATE call SET versions=(SELECT versions FROM call WHERE call='b') WHERE call='a'", "a", "versions cover 2 of 3"),
    ("UPDATE call SET parent='nobody' WHERE call='b'", "b", "parent nobody is not in its run"),
    ("UPDATE call SET shared=5000 WHERE call='b'", "b", "shares 5000 tokens of its parent's 803"),
    ("UPDATE call SET shared=802 WHERE call='b'", "b", "tokens, 1603 were sent"),
    ("UPDATE call SET shared=2 WHERE call='a'", "a", "a root that shares 2"),
    ("UPDATE call SET prompt_len=7 WHERE call='a'", "a", "has 800 tokens, 7 were sent"),
    ("INSERT INTO chunk SELECT 'a', 0, ids, logprobs, versions FROM chunk WHERE start=0", "a", "1 chunks left over"),
    ("DELETE FROM chunk WHERE start=0", "o", "jump from token 0 to 1"),
    ("UPDATE attempt SET tokens_from=0 WHERE call='a' AND number=1", "a", "attempt 1 starts at token 0"),
    ("UPDATE attempt SET tokens_to=0 WHERE call='a' AND number=1", "a", "attempt 1 goes from token 1 to 0"),
    ("UPDATE attempt SET end='open' WHERE call='a' AND number=1", "a", "its last attempt is open"),
    ("DELETE FROM attempt WHERE call='a' AND number=0", "a", "attempt 0 is missing"),
    ("DELETE FROM attempt WHERE call='a'", "a", "without an attempt"),
    ("UPDATE attempt SET call='gone' WHERE call='a'", "gone", "has attempts but is not in the store"),
    ("UPDATE run SET status='completed' WHERE run='r'", "r", "completed with no end time"),
    ("UPDATE run SET status='running' WHERE run='r2'", "r2", "running with an end time"),
    ("UPDATE run SET status='won' WHERE run='r2'", "r2", "unknown state 'won'"),
    ("UPDATE run SET run='q' WHERE run='r'", "a", "its run r is not in the store"),
    ("UPDATE lane SET run='q' WHERE lane='s'", "s", "its run q is not in the store"),
    ("UPDATE lane SET parent='l2' WHERE lane='s'", "s", "parent lane l2 is not in its run"),
    ("UPDATE lane SET parent_call='x' WHERE lane='s'", "s", "the call x that started it is not in its run"),
    ("UPDATE call SET lane='l2' WHERE call='a'", "a", "its lane l2 is not in its run"),
    ("DELETE FROM message WHERE digest=(SELECT substr(messages, 1, 16) FROM call WHERE call='b')", "b", "a message cannot be read"),
    ("UPDATE call SET answer=x'00' WHERE call='a'", "a", "its answer cannot be read"),
    ("UPDATE call SET answer=(SELECT answer FROM call WHERE call='a') WHERE call='o'; UPDATE call SET status='delivered', ended_at=1, finish_reason='stop' WHERE call='o'; DELETE FROM chunk", "o", "an answer without sampled ids"),
    ("UPDATE message SET start=start+1 WHERE pack=1", "message", "is not what was written"),
    ("UPDATE pack SET body=x'00' WHERE pack=1", "message", "is damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "subject", "what"), DAMAGE, ids=[item[2] for item in DAMAGE])
def test_each_kind_of_damage_is_found(sound: Path, tmp_path: Path, damage: str, subject: str, what: str) -> None:
    path = tmp_path / "broken.db"
    shutil.copy(sound, path)
    db = sqlite3.connect(path)
    db.executescript(damage)
    db.close()
    with Journal(path, "r") as journal:
        found = [item for item in journal.audit() if item.level == "error"]
    assert any(item.subject.split()[0] == subject and what in item.what and item.remedy for item in found), found


def test_errors_are_lines_with_what_to_do_and_status_1(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.db"
    shutil.copy(sound, path)
    db = sqlite3.connect(path)
    db.executescript("UPDATE call SET prompt_len=7 WHERE call='a'; DELETE FROM attempt WHERE call='b'")
    db.close()
    done = gyre("fsck", path)
    assert done.returncode == 1 and "2 errors" in done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["error a", "error b", "info o"]
    done = gyre("fsck", path, "--json")
    assert done.returncode == 1
    assert [sorted(json.loads(line)) for line in done.stdout.splitlines()] == [
        ["level", "remedy", "subject", "what"]
    ] * 3


def test_what_sqlite_itself_finds_is_told(sound: Path, tmp_path: Path) -> None:
    """A page of an index is overwritten: the tables can be read, the file is not sound."""
    path = tmp_path / "broken.db"
    shutil.copy(sound, path)
    db = sqlite3.connect(path)
    page, size = db.execute("SELECT rootpage FROM sqlite_schema WHERE name='call_run'").fetchone()[0], 4096
    db.close()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size + 64 : page * size] = b"\xff" * (size - 64)
    path.write_bytes(data)
    done = gyre("fsck", path)
    assert done.returncode == 1 and "error store: " in done.stdout and "malformed" in done.stdout
