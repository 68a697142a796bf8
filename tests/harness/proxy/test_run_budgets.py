"""Budgets of runs, enforced by the proxy in every protocol: the protocol's own error, and the state that the run ends in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from protocols_kit import PATHS, body_of, read, say, send
from proxy_engine import Finish, ScriptedEngine, Step, Tokens, Wait
from proxy_engine import say as sampled
from proxy_kit import Proxy, running
from proxy_toy import toy_template
from test_lane_budgets import HELLO, PIECES, PROMPT, refused

from gyre_sdk.harness.proxy.server.budgets import Prices
from gyre_sdk.records import CallStatus

PRICES = Prices(prompt=1e6, sampled=1e6)
"""A dollar per token."""
SPENT = PROMPT + 2
"""Tokens, and dollars, of a first call."""
BUDGETS: list[tuple[dict[str, Any], str]] = [
    ({"turns": 1}, "the run has spent its budget of 1 turn"),
    ({"tokens": SPENT + PROMPT}, f"the run has spent its budget of {SPENT + PROMPT} tokens"),
    ({"cost": float(SPENT)}, f"the run has spent its budget of {SPENT} US dollars"),
]


def ended(proxy: Proxy, access: dict[str, Any]) -> tuple[str, float | None]:
    """End a run as its session would, all well; give what is on record."""
    body = {"status": "completed", "reward": 0.5}
    answer = proxy.control.post(f"/runs/{access['run']}/finish", json=body).json()
    with proxy.journal() as journal:
        run = journal.run(access["run"])
    assert run is not None and run.status == answer["status"]
    return run.status, run.reward


@pytest.mark.parametrize("protocol", list(PATHS))
@pytest.mark.parametrize("stream", [False, True])
def test_a_run_ends_as_limit_or_timed_out(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """The reward stays; with wall time, calls in flight end too, in a stream that has begun as well."""
    hold = threading.Event()
    slow: list[Step] = [Tokens([301]), Wait(hold), Finish()]

    def play(request: dict[str, Any], number: int) -> list[Step]:
        return sampled(301, 260) if number <= len(BUDGETS) else slow

    template = toy_template(PIECES)
    with ScriptedEngine(play) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=template, prices=PRICES) as proxy:
            for limits, what in BUDGETS:
                access = proxy.run(limits=limits)
                assert say(proxy, access, protocol, HELLO, stream=stream).text == "ok"
                for _ in range(2):
                    refused(proxy, access, what, protocol, stream)
                assert ended(proxy, access) == ("limit", 0.5)
            access = proxy.run(limits={"seconds": 0.5})
            answer = send(proxy, access, protocol, body_of(protocol, HELLO, max_tokens=4, stream=stream))
            hold.set()
            seen = read(protocol, answer)
            assert seen.finish is None
            assert seen.error is not None and "the run has spent its budget of 0.5 s of wall time" in seen.error
            assert [call.status for call in proxy.calls(access["run"])] == [CallStatus.ABORTED]
            refused(proxy, access, "0.5 s of wall time", protocol, stream)
            assert ended(proxy, access) == ("timed_out", 0.5)
            assert len(engine.log) == len(BUDGETS) + 1


def test_what_a_run_has_spent_outlives_the_proxy(model: Path, tmp_path: Path) -> None:
    """Spent before: refused, and ended as that. Not spent before: what was used counts on."""
    with ScriptedEngine(lambda request, number: sampled(301, 260)) as engine:
        store, template = tmp_path / "s.db", toy_template(PIECES)
        with running(model, store, engine.url, template=template, prices=PRICES) as proxy:
            over = [proxy.run(limits=limits) for limits, _ in BUDGETS]
            for access, (_, what) in zip(over, BUDGETS, strict=True):
                say(proxy, access, "chat", HELLO)
                refused(proxy, access, what)
            left = proxy.run(limits={"turns": 2})
            say(proxy, left, "chat", HELLO)
        with running(model, store, engine.url, template=template, prices=PRICES) as proxy:
            for access, (_, what) in zip(over, BUDGETS, strict=True):
                refused(proxy, access, what)
                assert ended(proxy, access) == ("limit", 0.5)
            say(proxy, left, "chat", [{"role": "user", "content": "hi hi"}])
            refused(proxy, left, "the run has spent its budget of 2 turns")
            assert ended(proxy, left) == ("limit", 0.5)
