"""Cases of role switches that overlap with what agents and engines do (shared/cases/elastic)."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web
from proxy_engine import Finish, ScriptedEngine, Step, Tokens, Wait, say
from proxy_kit import SHARED, content_of, sse
from proxy_toy import END
from test_replicas import BODY, proxy_of, state, until


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHARED / "cases" / "elastic" / f"{name}.json").read_text())
    return found


class ObedientEngine(ScriptedEngine):
    """Ends what it is asked to abort, by its own ids, and says that it aborted whatever it was asked."""

    def __init__(self, partial: list[int], rest: list[int]) -> None:
        super().__init__(self._answer)
        self._partial, self._rest = partial, rest
        self.cut: dict[str, threading.Event] = {}
        """By stored id: set when it is aborted."""
        self.go = threading.Event()
        """Lets the second attempt go on."""

    def _answer(self, request: dict[str, Any], number: int) -> list[Step]:
        aborted = self.cut.setdefault(f"generate-tokens-{request['request_id']}", threading.Event())
        if number == 1:
            return [Tokens(self._partial), Wait(aborted), Finish("abort")]
        return [Tokens(self._rest[:2]), Wait(self.go), Tokens(self._rest[2:]), Finish()]

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        self.aborts += ids
        for name in ids:
            if name in self.cut:
                self.cut[name].set()
        return web.json_response({"aborted": len(ids)})


def test_two_attempts_of_a_call_on_one_engine(model: Path, tmp_path: Path) -> None:
    """elastic-two-attempts-one-engine-id: a drain that is taken back, and an abort that is said twice."""
    given = case("elastic-two-attempts-one-engine-id")["input"]
    partial, rest = given["partial_of_attempt_1"], [74, 75, 76, 77, END]
    with ObedientEngine(partial, rest) as engine, proxy_of(model, tmp_path, engine, flush=0.0, gather=1) as proxy:
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(proxy.chat, proxy.run(), BODY)
            until(lambda: [call.sampled_ids for call in proxy.calls()] == [partial], "the first attempt has sampled")
            drained = proxy.control.post("/replicas/drain", json={"url": engine.url, "seconds": 0.05})
            assert drained.json() == {"finished": 0, "moved": 1}
            assert engine.log[0].ended and not engine.log[0].dropped, "seen by its effect, not by the answer's number"
            proxy.control.post("/replicas", json={"url": engine.url})  # the switch is taken back
            until(lambda: len(engine.log) == 2 and engine.log[1].sampled, "the second attempt has begun there")
            assert httpx.post(f"{engine.url}/inference/v1/abort_requests", json={"request_ids": engine.aborts}).json()
            engine.go.set()
            assert said.result(30).status_code == 200
        [call] = proxy.calls()
        with proxy.journal() as journal:
            attempts = journal.attempts(call.call)
    assert call.sampled_ids == [*partial, *rest]
    assert engine.log[1].prompt == call.prompt_ids + partial
    assert [(item.tokens_from, item.tokens_to, item.end) for item in attempts] == [
        (0, 3, "aborted"),
        (3, 8, "finished"),
    ]
    assert len(engine.cut) == len({item.request_id for item in attempts}) == 2
    assert not list(engine.cut.values())[1].is_set()


def test_a_paused_engine_that_queues_without_a_word(model: Path, tmp_path: Path) -> None:
    """elastic-paused-engine-queues-silently: calls go to the one that samples; without one they wait, and are sent once."""
    given = case("elastic-paused-engine-queues-silently")["input"]["engines"]
    assert given["X"]["is_paused"] and given["X"]["health"] == 200
    with (
        ScriptedEngine(lambda request, number: say(65, END)) as x,
        ScriptedEngine(lambda request, number: say(65, END)) as y,
        proxy_of(model, tmp_path, x, heartbeat=0.05) as proxy,
    ):
        lived = proxy.run()
        assert proxy.chat(lived, BODY).status_code == 200
        proxy.control.post("/replicas", json={"url": y.url})
        x.paused = True
        until(lambda: state(proxy, x) == "paused", "the pause is seen")
        assert proxy.chat(proxy.run(), BODY).status_code == 200  # a1
        follow = [*BODY["messages"], {"role": "assistant", "content": "A"}, {"role": "user", "content": "more"}]
        assert proxy.chat(lived, {**BODY, "messages": follow}).status_code == 200  # a2
        assert (len(x.log), len(y.log)) == (1, 2)
        y.paused = True
        until(lambda: state(proxy, y) == "paused", "the other pause is seen")
        with ThreadPoolExecutor(2) as pool:
            streamed = pool.submit(proxy.chat, proxy.run(), {**BODY, "stream": True})  # a3
            whole = pool.submit(proxy.chat, proxy.run(), BODY)  # a4
            until(lambda: len(proxy.calls()) == 5, "both calls are on record")
            assert (len(x.log), len(y.log)) == (1, 2), "nothing is queued in an engine that is paused"
            x.version, x.paused = 8, False
            proxy.control.post("/replicas", json={"url": x.url, "version": 8})
            answers = [streamed.result(30), whole.result(30)]
        assert answers[0].text.count(": ") >= 1 and content_of(sse(answers[0].text)) == "A"
        assert answers[1].json()["choices"][0]["message"]["content"] == "A"
        until(lambda: all(call.status == "delivered" for call in proxy.calls()), "all is delivered")
        for call in proxy.calls()[3:]:
            assert [(span.version, span.start, span.end) for span in call.versions] == [(8, 0, 2)]
        assert (len(x.log), len(y.log)) == (3, 2), "one generation for each request"
