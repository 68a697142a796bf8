"""What a run costs on disk: everything included, a few bytes per token, whatever the number of calls."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prose import Writer, turns

from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallStatus,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    Sampling,
    VersionSpan,
)

SHARED = Path(__file__).resolve().parents[3] / "shared"
RUN, LANE = RunId("r-5fb0ab3ad7e24f64"), LaneId("l-8c1f2b7d9a3e4f56")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Run {name} in the workspace. " * 20,
            "parameters": {"type": "object"},
        },
    }
    for name in ("bash", "edit", "search")
]

Rows = list[tuple[str, str, list[int], list[int]]]
"""Per call: what is said, what is answered, ids of both."""


def own(calls: int, tokens: int) -> Rows:
    writer = Writer(7)
    return [(said, answer, writer.ids(said), writer.ids(answer)) for said, answer in turns(writer, calls, tokens)]


def real(calls: int, tokens: int) -> Rows:
    """Histories of real agents under the real vocabulary."""
    folder, vocabulary = SHARED / "data/histories", SHARED / "data/tokenizers/qwen3/tokenizer.json.gz"
    if not folder.is_dir() or not vocabulary.is_file():
        pytest.skip(f"{folder} or {vocabulary} is missing")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(gzip.decompress(vocabulary.read_bytes()).decode())
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".md", ".txt", ".traj"))
    text = "".join(path.read_text(errors="replace")[:40_000] for path in files)
    size = int(tokens / calls * 3.3)
    assert len(text) >= calls * size, "too little text to try with"
    rows = []
    for at in range(0, calls * size, size):
        said, answer = text[at : at + size * 9 // 10], text[at + size * 9 // 10 : at + size]
        rows.append((said, answer, tokenizer.encode(said).ids, tokenizer.encode(answer).ids))
    return rows


def raw_items(dialect: str, said: str, answer: str | None) -> list[Any]:
    """What the agent itself sends for a turn: the answer before, and what is new."""
    if dialect == "chat":
        items: list[Any] = [{"role": "user", "content": said}]
        return items if answer is None else [{"role": "assistant", "content": answer}, *items]
    items = [{"role": "user", "content": [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}]}]
    return items if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}, *items]


def write_run(path: Path, rows: Rows, dialect: str) -> int:
    """Record a run that re-sends its whole history with each call; give its unique tokens."""
    writer, system = Writer(3), {"role": "system", "content": "You are an agent. " * 200}
    messages: list[dict[str, Any]] = [system]
    raw: list[Any] = [system]
    whole: list[int] = []
    with Journal(path) as journal:
        journal.open_run(RunRecord(RUN, "task", 1.0), LaneRecord(LANE, RUN, "main", "main", None, 1.0), "key").result()
        for number, (said, answer, prompt, sampled) in enumerate(rows):
            call = CallId(f"c-{number:016x}")
            raw = raw + raw_items(dialect, said, rows[number - 1][1] if number else None)
            messages = [*messages, {"role": "user", "content": said}]
            request = {
                "dialect": dialect, "history": "bridge", "digest": f"{number:032x}", "turn": f"{number:016x}", "index": 0,
                "body": {"model": "policy", "temperature": 0.7, "max_tokens": 4096, "stream": True, "tools": TOOLS},
            }  # fmt: skip
            journal.call_received(
                CallIntent(
                    call, RUN, LANE, "main", CallId(f"c-{number - 1:016x}") if number else None, None, len(whole),
                    whole + prompt, Sampling(stop_token_ids=(151643, 151645)), request, messages, 1e9 + number, raw=raw,
                )
            )  # fmt: skip
            attempt = AttemptRecord(call, 0, "http://127.0.0.1:8000", f"{number:016x}-0", 0, 0, "open")
            journal.call_dispatched(attempt)
            chunk = TokenChunk(0, sampled, writer.logprobs(len(sampled)), [VersionSpan(3, 0, len(sampled))])
            journal.tokens_sampled(call, chunk)
            journal.attempt_ended(
                AttemptRecord(call, 0, attempt.replica, attempt.request_id, 0, len(sampled), "finished")
            )
            said_back = {"role": "assistant", "content": answer}
            journal.call_ended(
                call, CallStatus.COMPLETE, at=1e9 + number, sampled=chunk, finish_reason="stop", answer=said_back
            )
            journal.call_delivered(call).result()
            messages = [*messages, said_back]
            whole = whole + prompt + sampled
    return len(whole)


@pytest.mark.parametrize("dialect", ["chat", "messages"])
@pytest.mark.parametrize("source", [own, real])
def test_a_run_of_100k_tokens_costs_at_most_6_bytes_per_token(
    tmp_path: Path, source: Callable[[int, int], Rows], dialect: str
) -> None:
    """200 calls: ids, log-probs, canonical and raw messages, answers, attempts, indexes; the file after a checkpoint."""
    rows = source(200, 100_000)
    path = tmp_path / "gyre.db"
    unique = write_run(path, rows, dialect)
    assert unique > 80_000
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    size = path.stat().st_size
    assert size <= 6 * unique, f"{size / unique:.2f} bytes per token"
    with Journal(path, "r") as journal:
        last = journal.call("c-00000000000000c7")
        exchange = journal.exchange("c-00000000000000c7")
    assert last is not None and exchange is not None
    assert last.prompt_ids + last.sampled_ids == [token for row in rows for token in row[2] + row[3]]
    assert exchange.answer == {"role": "assistant", "content": rows[-1][1]}
    assert [item["content"] for item in exchange.messages if item["role"] == "user"] == [row[0] for row in rows]
    assert json.dumps(exchange.raw[-1]) == json.dumps(raw_items(dialect, rows[-1][0], None)[0])
    assert exchange.request["body"]["tools"] == TOOLS


def test_twice_the_calls_over_the_same_tokens_cost_a_little_more(tmp_path: Path) -> None:
    """The lists of messages are deltas: a call costs what it adds, not what it repeats."""
    sizes = []
    for calls in (100, 200):
        path = tmp_path / f"{calls}.db"
        rows = own(100, 50_000) if calls == 100 else [part for row in own(100, 50_000) for part in halves(row)]
        write_run(path, rows, "chat")
        sizes.append(path.stat().st_size)
    assert sizes[1] < 1.6 * sizes[0]


def halves(row: tuple[str, str, list[int], list[int]]) -> Rows:
    """Split a turn into two."""
    parts = []
    for half in (0, 1):
        cut = [slice(0, len(part) // 2) if half == 0 else slice(len(part) // 2, None) for part in row]
        parts.append((row[0][cut[0]], row[1][cut[1]], row[2][cut[2]], row[3][cut[3]]))
    return parts
