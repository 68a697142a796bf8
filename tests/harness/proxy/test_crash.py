"""kill -9 of the proxy: what an agent was given is in the store, and a retry goes on from what is durable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from crash_kit import SERVICE_KEY, KillableProxy, Template
from proxy_engine import Finish, ScriptedEngine, Step, Tokens, Wait, say
from proxy_kit import Proxy, arguments, content_of, sse
from test_fidelity_cases import check_all
from test_render import write
from test_retries import wait_for

from gyre_sdk.harness.proxy.render import load_template
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus

USER = {"role": "user", "content": "hi"}


class Serving(KillableProxy):
    """`gyre serve` as a process of its own, and its clients."""

    proxy: Proxy


@contextmanager
def serving(forks: Template, model: Path, store: Path, url: str, port: int = 0) -> Iterator[Serving]:
    process = Serving(forks, arguments(model, store, url))
    process.port = port
    process.start()
    process.proxy = Proxy(process.url, SERVICE_KEY, store)
    try:
        yield process
    finally:
        process.kill()


def follow(proxy: Proxy, access: dict[str, Any], body: dict[str, Any], out: list[str]) -> None:
    """Stream, keeping every line that arrived; a cut connection ends it."""
    headers = {"Authorization": f"Bearer {access['api_key']}"}
    try:
        with httpx.stream("POST", f"{proxy.url}/v1/chat/completions", json=body, headers=headers, timeout=30) as answer:
            for line in answer.iter_lines():
                out.append(line)
    except httpx.HTTPError:
        pass


@pytest.mark.parametrize("seed", [None, 7], ids=["continued", "restarted"])
def test_kill_mid_call_then_retry(model: Path, tmp_path: Path, forks: Template, seed: int | None) -> None:
    """Mid-stream: delivered text is durable; after a restart on the same port the same body resumes or restarts."""
    template = load_template(model)
    begun, rest = write(template, "water and"), write(template, " wine<|im_end|>")

    def play(request: dict[str, Any], number: int) -> list[Step]:
        if number == 1:
            return [*[Tokens([token]) for token in begun], Wait(20.0)]
        started = request["token_ids"][-len(begun) :] == begun
        return [Tokens(rest if started else begun + rest), Finish()]

    body = {"model": "p", "messages": [USER], "stream": True, "seed": seed}
    store = tmp_path / "s.db"
    with ScriptedEngine(play) as engine:
        with serving(forks, model, store, engine.url) as first:
            access = first.proxy.run()
            lines: list[str] = []
            thread = threading.Thread(target=follow, args=(first.proxy, access, body, lines))
            thread.start()
            wait_for(
                lambda: "water and" in content_of(sse("\n".join(lines))) or (seed is not None and durable(store) >= 1)
            )
            first.kill()
            thread.join()
        shown = content_of(sse("\n".join(lines)))
        with Journal(store, "r") as journal:
            [call] = journal.calls()
        assert template.text(call.sampled_ids).startswith(shown)
        assert shown == ("water and" if seed is None else "")
        with serving(forks, model, store, engine.url, port=first.port) as second:
            again: list[str] = []
            follow(second.proxy, access, body, again)
            events = sse("\n".join(again))
            assert events[-1] == "[DONE]"
            assert content_of(events) == "water and wine"
            [call] = second.proxy.calls()
            with second.proxy.journal() as journal:
                attempts = journal.attempts(call.call)
            kept = len(begun) if seed is None else 0
            assert len(engine.log[1].prompt) == len(call.prompt_ids) + kept
            assert call.sampled_ids == begun + rest
            assert [item.end for item in attempts] == ["broken" if seed is None else "abandoned", "finished"]
            assert [item.tokens_from for item in attempts] == [0, kept]
            follow(
                second.proxy,
                access,
                {**body, "messages": [USER, {"role": "assistant", "content": "water and wine"}, USER]},
                [],
            )
            last = second.proxy.calls()[1]
            assert (last.parent, last.fork_reason) == (call.call, None)
            assert last.prompt_ids[: last.shared] == call.prompt_ids + call.sampled_ids


def durable(store: Path) -> int:
    with Journal(store, "r") as journal:
        return sum(len(call.sampled_ids) for call in journal.calls())


def test_kill_behind_answered_calls(model: Path, tmp_path: Path, forks: Template) -> None:
    """N answers reached their agents, the process is killed: N are in the store, histories and keys come back."""
    template = load_template(model)
    answer = write(template, "water<|im_end|>")
    store = tmp_path / "s.db"
    with ScriptedEngine(lambda request, number: say(*answer)) as engine:
        with serving(forks, model, store, engine.url) as first:
            accesses = [first.proxy.run() for _ in range(4)]
            got = [0] * 4
            killed = threading.Event()

            def agent(place: int) -> None:
                messages: list[dict[str, Any]] = [USER]
                while not killed.is_set():
                    try:
                        said = first.proxy.chat(accesses[place], {"messages": messages})
                    except httpx.HTTPError:
                        return
                    got[place] += said.status_code == 200
                    messages = [*messages, {"role": "assistant", "content": "water"}, USER]

            threads = [threading.Thread(target=agent, args=(place,)) for place in range(4)]
            for thread in threads:
                thread.start()
            wait_for(lambda: min(got) >= 3)
            first.kill()
            killed.set()
            for thread in threads:
                thread.join()
        with serving(forks, model, store, engine.url, port=first.port) as second:
            for access, count in zip(accesses, got, strict=True):
                calls = second.proxy.calls(access["run"])
                answered = [call for call in calls if call.status in (CallStatus.COMPLETE, CallStatus.DELIVERED)]
                assert count <= len(answered) <= count + 1
                assert all(call.sampled_ids == answer for call in answered)
                turns = [USER] + [{"role": "assistant", "content": "water"}, USER] * count
                said = second.proxy.chat(access, {"messages": turns})
                assert said.status_code == 200
                closed = second.proxy.control.post(f"/runs/{access['run']}/close", json={"seconds": 1})
                assert closed.json()["calls"] >= count + 1
                second.proxy.control.post(f"/runs/{access['run']}/end", json={"status": "completed"})
                last = second.proxy.calls(access["run"])[-1]
                assert last.fork_reason is None and last.parent is not None
                assert not any(
                    call.status in ("received", "dispatched", "streaming") for call in second.proxy.calls(access["run"])
                )
            complete = {call.call for call in second.proxy.calls() if call.finish_reason}
            assert {g.request["request_id"].rsplit("-", 2)[0] for g in engine.log} >= complete


def test_a_complete_answer_that_nobody_got_is_replayed_after_a_restart(
    model: Path, tmp_path: Path, forks: Template
) -> None:
    template = load_template(model)
    store, body = tmp_path / "s.db", {"messages": [USER]}
    gate = threading.Event()
    steps: list[Step] = [Wait(gate), Tokens(write(template, "water<|im_end|>")), Finish()]
    with ScriptedEngine(lambda request, number: steps) as engine:
        with serving(forks, model, store, engine.url) as first:
            access = first.proxy.run()
            with pytest.raises(httpx.ReadTimeout):
                first.proxy.http.post(
                    "/v1/chat/completions",
                    content=b'{"model":"p","messages":[{"role":"user","content":"hi"}]}',
                    headers={"Authorization": f"Bearer {access['api_key']}"},
                    timeout=0.5,
                )
            gate.set()
            wait_for(lambda: any(call.finish_reason for call in first.proxy.calls()))
            first.kill()
        with serving(forks, model, store, engine.url, port=first.port) as second:
            said = second.proxy.chat(access, b'{"model":"p","messages":[{"role":"user","content":"hi"}]}')
            assert said.json()["choices"][0]["message"]["content"] == "water"
            assert len(engine.log) == 1
            said = second.proxy.chat(access, body)
            assert said.status_code == 200
            assert len(engine.log) == 2
            check_all(second.proxy, engine)
