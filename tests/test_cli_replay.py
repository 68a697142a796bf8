"""`gyre replay` against the embedded engine and a scripted one; `gyre calls STORE CALL` shows a call whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy_engine import Hangup, ScriptedEngine, Status, Tokens, say
from test_cli import gyre

from gyre_sdk.harness.proxy.upstream import Upstream
from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    AttemptRecord,
    CallId,
    CallStatus,
    ForkReason,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    Sampling,
    VersionSpan,
)

RUN, MAIN, SUB = RunId("r"), LaneId("l-main"), LaneId("l-sub")


def write(
    journal: Journal, name: str, prompt: list[int], sampled: list[int], logprobs: list[float | None], **more: Any
) -> None:
    call = CallId(name)
    request = {
        "dialect": "messages",
        "history": "bridge",
        "hosted": more.get("hosted", False),
        "body": {"model": "policy"},
    }
    journal.call_received(
        CallIntent(
            call, RUN, more.get("lane", MAIN), more.get("role", "main"), more.get("parent"), more.get("fork"),
            more.get("shared", 0), prompt, more.get("sampling", Sampling(temperature=0.0, max_tokens=24)), request,
            [{"role": "user", "content": "count \x1b[2J"}], 100.0, raw=[{"role": "user", "content": [{"type": "text"}]}],
        )
    )  # fmt: skip
    journal.call_dispatched(AttemptRecord(call, 0, "http://a:1", f"{name}-0", 0, 0, "open"))
    journal.attempt_ended(AttemptRecord(call, 0, "http://a:1", f"{name}-0", 0, len(sampled), "finished"))
    if more.get("open"):
        return
    journal.call_ended(
        call, CallStatus.COMPLETE, at=101.5, finish_reason="stop",
        sampled=TokenChunk(0, sampled, logprobs, [VersionSpan(7, 0, len(sampled))] if sampled else []),
        answer={"role": "assistant", "content": "1 2", "tool_calls": [{"id": "t", "name": "run", "arguments": "{}"}]},
    ).result()  # fmt: skip


def open_run(journal: Journal) -> None:
    journal.open_run(RunRecord(RUN, "t", 99.0), LaneRecord(MAIN, RUN, "main", "main", None, 99.0), "k1").result()
    lane = LaneRecord(SUB, RUN, "subagent", "reviewer", MAIN, 99.5, CallId("a"))
    journal.open_lane(lane, "k2").result()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    with Journal(folder / "gyre.db") as journal:
        open_run(journal)
        write(journal, "a", [1, 2], [3, 4, 5], [-0.5, None, -0.5])
        more = {"parent": CallId("a"), "shared": 1, "fork": ForkReason.COMPACTION, "lane": SUB, "role": "subagent"}
        write(journal, "warm", [1, 9], [3, 4, 5], [-0.5] * 3, sampling=Sampling(temperature=0.7, top_p=0.9), **more)
        write(journal, "hosted", [], [], [], hosted=True)
        write(journal, "open", [1], [], [], open=True)
    return folder


def replayed(store: Path, call: str, *script: Any, options: tuple[object, ...] = ()) -> tuple[Any, ScriptedEngine]:
    with ScriptedEngine(lambda request, number: list(script), version=8) as engine:
        return gyre("replay", call, "--store", store, "--replica", engine.url, *options), engine


def test_the_same_prompt_and_sampling_are_sent_and_equal_ids_end_with_0(store: Path) -> None:
    done, engine = replayed(store, "warm", *say(3, 4, 5), options=("--json",))
    assert done.returncode == 0, done.stderr
    [generation] = engine.log
    assert generation.prompt == [1, 9]
    params = generation.request["sampling_params"]
    assert (params["temperature"], params["top_p"], params["max_tokens"]) == (0.7, 0.9, 512)
    found = json.loads(done.stdout)
    assert found["equal"] and found["same"] == 3 and found["max_logprob_difference"] == 0.0
    assert found["recorded_versions"] == [7] and found["replayed_versions"] == [8]


@pytest.mark.parametrize(
    ("ids", "same"),
    [((3, 9, 5), 1), ((3, 4), 2), ((3, 4, 5, 6), 3), ((), 0)],
    ids=["other", "shorter", "longer", "none"],
)
def test_the_first_difference_is_told_and_ends_with_1(store: Path, ids: tuple[int, ...], same: int) -> None:
    done, _ = replayed(store, "a", *say(*ids))
    assert (
        done.returncode == 1
        and f"{same} {'id' if same == 1 else 'ids'} equal, then token {same} of 3 recorded" in done.stdout
    )
    assert "temperature" not in done.stdout
    done, _ = replayed(store, "warm", *say(*ids))
    assert done.returncode == 1 and "temperature 0.7: another answer is to be expected" in done.stdout


def test_logprobs_are_compared_over_the_common_prefix(store: Path) -> None:
    done, _ = replayed(store, "warm", Tokens([3, 4, 8], [-0.5, -0.75, -9.0]), *say(), options=("--json",))
    assert json.loads(done.stdout)["max_logprob_difference"] == 0.25
    done, _ = replayed(store, "a", Tokens([3, 4, 8], [-0.5, -0.75, -9.0]), *say(), options=("--json",))
    assert json.loads(done.stdout)["max_logprob_difference"] == 0.0, "a slot without a log-prob is not compared"


@pytest.mark.parametrize(
    ("call", "script", "what"),
    [
        ("nobody", say(1), "is not in"),
        ("hosted", say(1), "hosted model"),
        ("open", say(1), "no sampled ids"),
        ("a", [Status(400, "too long")], "too long"),
        ("a", [Tokens([3]), Hangup()], "broke off"),
    ],
)
def test_what_cannot_be_replayed_is_one_line_and_status_2(store: Path, call: str, script: list[Any], what: str) -> None:
    done, _ = replayed(store, call, *script)
    assert done.returncode == 2 and what in done.stderr and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The embedded engine with random weights, version 7, and the folder of its model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from engine_process import VOCAB, make_model, running_engine
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("model")
    make_model(folder, 0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["count to two"],
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<pad>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    with running_engine(folder, folder / "requests.jsonl", "--version", "7") as running:
        yield running.url, folder


async def sample(url: str, prompt: list[int], sampling: Sampling) -> tuple[list[int], list[float | None]]:
    upstream = Upstream(versions={})
    await upstream.open()
    ids: list[int] = []
    logprobs: list[float | None] = []
    async for piece in upstream.generate(
        url, request_id="first", prompt=json.dumps(prompt)[1:-1].encode(), sampling=sampling, stop_ids=(), max_tokens=sampling.max_tokens, salt="7",
        version=7,
    ):  # fmt: skip
        ids, logprobs = ids + piece.ids, logprobs + piece.logprobs
    await upstream.close()
    return ids, logprobs


def test_a_greedy_call_of_the_same_weights_is_equal(engine: tuple[str, Path], tmp_path: Path) -> None:
    """The second call's prompt comes out of the first one's path; a changed record is found, with its text."""
    url, model = engine
    greedy = Sampling(temperature=0.0, max_tokens=24)
    with Journal(tmp_path / "s.db") as journal:
        open_run(journal)
        first, logprobs = asyncio.run(sample(url, [5, 6, 7], greedy))
        write(journal, "a", [5, 6, 7], first, logprobs)
        prompt = [5, 6, 7, *first, 40, 41]
        second, logprobs = asyncio.run(sample(url, prompt, greedy))
        write(journal, "b", prompt, second, logprobs, parent=CallId("a"), shared=3 + len(first))
        write(journal, "wrong", prompt, [*second[:5], (second[5] + 1) % 300, *second[6:]], logprobs)
    options = ("--store", tmp_path / "s.db", "--replica", url)
    for call in ("a", "b"):
        done = gyre("replay", call, *options, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found["same"] == 24 and found["max_logprob_difference"] < 1e-4
        assert found["recorded_versions"] == found["replayed_versions"] == [7]
    done = gyre("replay", "wrong", *options, "--model", model)
    assert done.returncode == 1 and "5 ids equal, then token 5 of 24 recorded" in done.stdout
    assert "  recorded: " in done.stdout and "  now: " in done.stdout
    assert gyre("replay", "a", *options, "--model", tmp_path).returncode == 2


def test_a_call_is_shown_whole(store: Path) -> None:
    done = gyre("calls", store, "warm")
    assert done.returncode == 0 and "\x1b" not in done.stdout
    for part in (
        "warm of run r: complete", "reviewer (l-sub), role subagent, child of lane l-main, started by call a",
        "messages, history bridge", "2 tokens, forks from (reason compaction) a, 1 shared", "3 tokens, versions 7 for 0-3",
        "temperature 0.7, top_p 0.9", "1.500 s", "http://a:1 (warm-0): tokens 0 to 3, finished", "count \\e[2J",
        "1 item as sent", "finished: stop", "(calls run) {}",
    ):  # fmt: skip
        assert part in done.stdout, part
    found = json.loads(gyre("calls", store, "warm", "--json").stdout)
    assert list(found)[:6] == ["run", "lane", "role", "call", "status", "prompt_ids"]
    assert found["prompt_ids"] == [1, 9] and found["raw"] == [{"role": "user", "content": [{"type": "text"}]}]
    assert found["lane_record"]["parent_call"] == "a" and found["attempts"][0]["replica"] == "http://a:1"


def test_calls_without_ids_are_shown_too(store: Path) -> None:
    done = gyre("calls", store, "hosted")
    assert done.returncode == 0 and done.stdout.count("no ids: a hosted model answered") == 2
    assert "not ended" in gyre("calls", store, "open").stdout
    for command in ("calls", "samples", "runs"):
        assert gyre(command, store).returncode == 0
    done = gyre("calls", store, "nobody")
    assert done.returncode == 2 and "is not in" in done.stderr
