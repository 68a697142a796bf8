"""Embedded engines with the same weights behind one proxy: stopped and drained under load, agents see nothing."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from proxy_kit import Proxy, running
from test_replicas import replicas, until
from trainer.engines.engine_process import Engine, make_model, running_engine

LENGTH = 600
"""Tokens of each answer."""


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with the tokenizer of these tests."""
    folder = tmp_path_factory.mktemp("policy")
    make_model(folder, 0, vocab_size=512, max_position_embeddings=4096, eos_token_id=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def engines(policy: Path) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(running_engine(policy, policy / f"requests{number}.jsonl", "--version", "7"))
            for number in range(2)
        ]


def body(number: int) -> dict[str, Any]:
    return {
        "model": "policy",
        "messages": [{"role": "user", "content": f"the tests {number}"}],
        "temperature": 0,
        "max_tokens": LENGTH,
        "ignore_eos": True,
        "stream": number % 2 == 1,
    }


def ask(proxy: Proxy, access: dict[str, Any], number: int, begun: list[int]) -> bytes:
    """Ask; note a stream that has begun. Returns what distinguishes the answer: the text, in bytes."""
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    url = f"{proxy.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(number), headers=headers, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        if number % 2 == 0:
            begun.append(number)
            answer.read()
            [choice] = answer.json()["choices"]
            assert choice["finish_reason"] == "length"
            return str(choice["message"]["content"]).encode()
        text = ""
        finish, end = None, False
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                end = True
                continue
            event = httpx.Response(200, content=line[6:].encode()).json()
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                finish = choice.get("finish_reason") or finish
                if text:
                    begun.append(number)
        assert (finish, end) == ("length", True)
        return text.encode()


def load(proxy: Proxy, accesses: list[dict[str, Any]], pool: ThreadPoolExecutor, begun: list[int]) -> list[Any]:
    return [pool.submit(ask, proxy, access, number, begun) for number, access in enumerate(accesses)]


def undisturbed(policy: Path, tmp_path: Path, engine: Engine, count: int) -> list[bytes]:
    with running(policy, tmp_path / "calm.db", engine.url, versions={engine.url: 7}) as proxy:
        return [ask(proxy, proxy.run(), number, []) for number in range(count)]


def check(proxy: Proxy, accesses: list[dict[str, Any]]) -> list[list[str]]:
    """Every call is whole, with one version; give the ends of the attempts."""
    calls = proxy.calls()
    assert len(calls) == len(accesses)
    ends = []
    for call in calls:
        assert len(call.sampled_ids) == len(call.logprobs) == LENGTH
        assert [(span.version, span.start, span.end) for span in call.versions] == [(7, 0, LENGTH)]
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
        ends.append([item.end for item in attempts])
        assert [item.tokens_from for item in attempts[1:]] == [item.tokens_to for item in attempts[:-1]]
    return ends


def test_an_engine_that_stops_dead_is_found_out(policy: Path, tmp_path: Path, engines: list[Engine]) -> None:
    """SIGSTOP: no connection breaks, nothing is refused; the calls there still end, on the other engine."""
    want = undisturbed(policy, tmp_path, engines[0], 4)
    versions = {engine.url: 7 for engine in engines}
    with running(policy, tmp_path / "s.db", *versions, versions=versions) as proxy, ThreadPoolExecutor(4) as pool:
        accesses, begun = [proxy.run() for _ in range(4)], list[int]()
        futures = load(proxy, accesses, pool, begun)
        until(lambda: begun and all(item["calls"] for item in replicas(proxy).values()), "both engines have calls")
        stopped = engines[0]
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            assert [future.result(60) for future in futures] == want
            ends = check(proxy, accesses)
            assert ["broken", "finished"] in ends
            assert {tuple(item) for item in ends} <= {("finished",), ("broken", "finished")}
            assert replicas(proxy)[stopped.url]["state"] == "gone"
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        until(lambda: replicas(proxy)[stopped.url]["state"] == "serving", "it serves again when it goes on")


def test_draining_under_load_is_invisible(policy: Path, tmp_path: Path, engines: list[Engine]) -> None:
    """Streams and whole answers, byte-equal to an undisturbed run, while each engine is drained in turn."""
    want = undisturbed(policy, tmp_path, engines[0], 6)
    versions = {engine.url: 7 for engine in engines}
    with running(policy, tmp_path / "s.db", *versions, versions=versions) as proxy, ThreadPoolExecutor(6) as pool:
        accesses, begun = [proxy.run() for _ in range(6)], list[int]()
        futures = load(proxy, accesses, pool, begun)
        until(lambda: begun and all(item["calls"] for item in replicas(proxy).values()), "both engines have calls")
        moved = 0
        for engine in engines:
            had = replicas(proxy)[engine.url]["calls"]
            drained = proxy.control.post("/replicas/drain", json={"url": engine.url, "seconds": 0}).json()
            assert sum(drained.values()) <= had
            moved += drained["moved"]
            assert replicas(proxy)[engine.url]["calls"] == 0
            until(lambda at=engine: at.get("/load") == '{"server_load": 0}', "the engine runs nothing of ours")
            assert proxy.control.post("/replicas", json={"url": engine.url, "version": 7}).status_code == 200
        assert [future.result(60) for future in futures] == want
        ends = check(proxy, accesses)
        assert moved == sum(len(item) - 1 for item in ends) > 0
        assert {end for item in ends for end in item} <= {"aborted", "broken", "finished"}
