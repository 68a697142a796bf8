"""Budgets of lanes, enforced by the proxy in every protocol, and what of lanes outlives the process that kept it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from protocols_kit import PATHS, body_of, read, say, send
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait
from proxy_engine import say as sampled
from proxy_kit import Proxy, running
from proxy_toy import toy_template
from test_fidelity_cases import scripted

from gyre_sdk.harness.proxy.server.budgets import Prices
from gyre_sdk.records import CallStatus

PIECES = {"hi": 300, "ok": 301}
HELLO = [{"role": "user", "content": "hi"}]
PROMPT = 5
"""Tokens of `HELLO` in the toy's template."""
PROTOCOLS = pytest.mark.parametrize("protocol", list(PATHS))


def refused(proxy: Proxy, access: dict[str, Any], what: str, protocol: str = "chat", stream: bool = False) -> None:
    """Ask once more, with other words; the answer must be the protocol's own error."""
    body = body_of(protocol, [{"role": "user", "content": "hi!"}], max_tokens=4, stream=stream)
    answer = send(proxy, access, protocol, body)
    error = answer.json()["error"]
    assert answer.status_code == 403
    assert what in error["message"]
    if protocol == "messages":
        assert answer.json()["type"] == "error" and error["type"] == "permission_error"
    else:
        assert error["code"] == "limit_exceeded"


@PROTOCOLS
@pytest.mark.parametrize("stream", [False, True])
def test_a_lane_ends_and_its_run_goes_on(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    with scripted(model, tmp_path, PIECES, sampled(301, 260)) as (proxy, _):
        access = proxy.run()
        lane = proxy.lane(access["run"], name="helper", parent=access["lane"], limits={"turns": 1})
        assert say(proxy, lane, protocol, HELLO, stream=stream).text == "ok"
        for _ in range(2):
            refused(proxy, lane, "the lane 'helper' has spent its budget of 1 turn", protocol, stream)
        assert say(proxy, access, protocol, HELLO, stream=stream).text == "ok"
        shown = proxy.control.get(f"/runs/{access['run']}").json()
        budget = shown["budgets"][lane["lane"]]
        assert (budget["spent"], budget["limit"]) == ("1 turn", "turns")
        assert (shown["spent"], shown["usage"]["calls"], shown["status"]) == (None, 2, "running")
        body = proxy.control.post(f"/runs/{access['run']}/finish", json={"reward": 1.0})
        assert body.json()["status"] == "completed"


def test_a_budget_covers_the_lanes_below(model: Path, tmp_path: Path) -> None:
    with scripted(model, tmp_path, PIECES, sampled(301, 260)) as (proxy, engine):
        access = proxy.run()
        lane = proxy.lane(access["run"], name="helper", parent=access["lane"], limits={"tokens": 2 * (PROMPT + 2) + 3})
        below = proxy.lane(access["run"], name="below", parent=lane["lane"], limits={"turns": 9})
        say(proxy, lane, "chat", HELLO)
        say(proxy, below, "chat", HELLO)
        assert [item.request["sampling_params"]["max_tokens"] for item in engine.log] == [12, 5]
        refused(proxy, below, "the lane 'helper' has spent its budget of 17 tokens")
        refused(proxy, lane, "the lane 'helper'")
        say(proxy, access, "chat", HELLO)


def test_cost(model: Path, tmp_path: Path) -> None:
    """Dollars at the service's prices; without prices a budget of dollars is refused."""
    prices = Prices(prompt=1e6, sampled=1e6)
    with scripted(model, tmp_path, PIECES, sampled(301, 260), prices=prices) as (proxy, _):
        access = proxy.run()
        lane = proxy.lane(access["run"], name="helper", limits={"cost": PROMPT + 2.0})
        say(proxy, lane, "chat", HELLO)
        refused(proxy, lane, "7 US dollars")
    with scripted(model, tmp_path / "other", PIECES, sampled(301, 260)) as (proxy, _):
        answer = proxy.control.post(f"/runs/{proxy.run()['run']}/lanes", json={"limits": {"cost": 1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "limits.cost")
        assert "--price-prompt" in answer.json()["error"]["message"]


@PROTOCOLS
@pytest.mark.parametrize("stream", [False, True])
def test_wall_time_ends_calls_in_flight(model: Path, tmp_path: Path, protocol: str, stream: bool) -> None:
    """With an error in the protocol's form, in a stream that has begun too."""
    hold = threading.Event()
    play = [Tokens([301]), Wait(hold), Finish()]
    with scripted(model, tmp_path, PIECES, play) as (proxy, _):
        access = proxy.run()
        lane = proxy.lane(access["run"], name="late", limits={"seconds": 0.5})
        answer = send(proxy, lane, protocol, body_of(protocol, HELLO, max_tokens=4, stream=stream))
        hold.set()
        seen = read(protocol, answer)
        assert seen.error is not None and "the lane 'late' has spent its budget of 0.5 s of wall time" in seen.error
        assert [call.status for call in proxy.calls()] == [CallStatus.ABORTED]
        refused(proxy, lane, "0.5 s of wall time", protocol)
        assert say(proxy, access, protocol, HELLO, max_tokens=4, stream=stream).text == "ok"


def test_budgets_outlive_the_proxy(model: Path, tmp_path: Path) -> None:
    """What a lane has spent, and that a budget ran out, is known to the next process."""
    with ScriptedEngine(lambda request, number: sampled(301, 260)) as engine:
        store, template = tmp_path / "s.db", toy_template(PIECES)
        prices = Prices(prompt=1e6, sampled=1e6)
        with running(model, store, engine.url, template=template, prices=prices) as proxy:
            access = proxy.run()
            two = proxy.lane(access["run"], name="two", limits={"turns": 2})
            few = proxy.lane(access["run"], name="few", limits={"tokens": PROMPT + 4})
            paid = proxy.lane(access["run"], name="paid", limits={"cost": 2 * (PROMPT + 2.0)})
            say(proxy, paid, "chat", HELLO)
            say(proxy, two, "chat", HELLO)
            say(proxy, few, "chat", HELLO)
            refused(proxy, few, "9 tokens")
        with running(model, store, engine.url, template=template, prices=prices) as proxy:
            say(proxy, two, "chat", [{"role": "user", "content": "hi hi"}])
            refused(proxy, two, "the lane 'two' has spent its budget of 2 turns")
            refused(proxy, few, "the lane 'few' has spent its budget of 9 tokens")
            say(proxy, paid, "chat", HELLO)
            refused(proxy, paid, "the lane 'paid' has spent its budget of 14 US dollars")


def test_a_take_over_outlives_the_proxy(model: Path, tmp_path: Path) -> None:
    """The parent's key leads to the lane that took it over, in the next process too, until it is released."""
    with ScriptedEngine(lambda request, number: sampled(301, 260)) as engine:
        store, template = tmp_path / "s.db", toy_template(PIECES)
        with running(model, store, engine.url, template=template) as proxy:
            access = proxy.run()
            lane = proxy.lane(access["run"], role="compaction", parent=access["lane"], takes_over=True)
            inner = proxy.lane(access["run"], role="compaction", parent=lane["lane"], takes_over=True)
        with running(model, store, engine.url, template=template) as proxy:
            say(proxy, access, "chat", HELLO)
            release = f"/runs/{access['run']}/lanes/{inner['lane']}/release"
            assert proxy.control.post(release).status_code == 200
        with running(model, store, engine.url, template=template) as proxy:
            say(proxy, access, "chat", [{"role": "user", "content": "hi hi"}])
            assert proxy.control.post(f"/runs/{access['run']}/lanes/{lane['lane']}/release").status_code == 200
            say(proxy, access, "chat", [{"role": "user", "content": "hi hi hi"}])
            assert [call.lane for call in proxy.calls()] == [inner["lane"], lane["lane"], access["lane"]]


@pytest.mark.parametrize("whose", ["run", "lane"])
def test_requests_at_once_are_all_answered(model: Path, tmp_path: Path, whose: str) -> None:
    """Those beyond the budget are refused; of a lane, those within it go on; none is left without a word."""
    limits = {"turns": 3}
    with scripted(model, tmp_path, PIECES, sampled(301, 260)) as (proxy, _), ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            access = proxy.run(limits=limits) if whose == "run" else proxy.run()
            if whose == "lane":
                access = proxy.lane(access["run"], name="helper", limits=limits)
            bodies = [body_of("chat", [{"role": "user", "content": f"hi {at}"}]) for at in range(8)]
            answers = pool.map(send, [proxy] * 8, [access] * 8, ["chat"] * 8, bodies)
            found = [answer.status_code for answer in answers]
            assert set(found) <= {200, 403} and found.count(200) <= 3
            assert whose == "run" or found.count(200) == 3
