"""What the proxy counts: valid Prometheus text, true numbers, and who may read it."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from proxy_engine import Error, ScriptedEngine, Tokens, say
from proxy_kit import Proxy, running
from proxy_toy import END, toy_template

from gyre_sdk.harness.proxy.routing import ReplicaSpec, Routes
from gyre_sdk.harness.proxy.server.metrics import Counter, Histogram, Metrics, MetricsPage, loopback

_LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[0-9.e+-]+)')
USER = {"role": "user", "content": "hi"}


def parsed(text: str) -> dict[str, float]:
    """Read an exposition strictly: every sample belongs to the family announced before it."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    family = kind = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            assert line.split()[2] == family
            kind = line.split()[3]
        else:
            match = _LINE.fullmatch(line)
            assert match, line
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            assert match[1] in {family + suffix for suffix in suffixes}
            assert line.rsplit(" ", 1)[0] not in samples
            samples[line.rsplit(" ", 1)[0]] = float(match[3])
    return samples


def scrape(proxy: Proxy) -> dict[str, float]:
    answer = proxy.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.text)


def test_counts_are_true(model: Path, tmp_path: Path) -> None:
    plays = [[Tokens([65]), Error()], say(66, END), say(67, END)]
    with ScriptedEngine(lambda request, number: plays[number - 1]) as engine:
        with running(model, tmp_path / "s.db", engine.url, versions={engine.url: 4}, template=toy_template()) as proxy:
            before = scrape(proxy)
            assert before["gyre_calls_in_flight"] == 0
            assert before["gyre_call_seconds_count"] == 0
            access = proxy.run()
            assert proxy.chat(access, {"messages": [USER]}).status_code == 200
            assert proxy.chat(access, {"messages": [{"role": "user", "content": "else"}]}).status_code == 200
            after = scrape(proxy)
            calls = proxy.calls()
    assert after['gyre_calls_total{dialect="chat",status="complete"}'] == 2
    assert after['gyre_attempts_total{end="finished"}'] == 2
    assert after['gyre_attempts_total{end="broken"}'] == 1
    assert after['gyre_tokens_total{kind="sampled"}'] == sum(len(call.sampled_ids) for call in calls) == 5
    assert after['gyre_tokens_total{kind="prompt"}'] == sum(len(call.prompt_ids) for call in calls)
    forks = [call.fork_reason for call in calls if call.fork_reason]
    assert forks and all(after[f'gyre_forks_total{{reason="{reason}"}}'] == forks.count(reason) for reason in forks)
    assert after["gyre_first_token_seconds_count"] == after["gyre_call_seconds_count"] == 2
    assert after['gyre_call_seconds_bucket{le="+Inf"}'] == 2
    assert after["gyre_durable_seconds_count"] == 2
    states = {state: after[f'gyre_replica_state{{replica="{engine.url}",state="{state}"}}'] for state in STATES}
    assert states == {"serving": 1, "draining": 0, "paused": 0, "gone": 0}
    assert after[f'gyre_replica_version{{replica="{engine.url}"}}'] == 4
    assert after[f'gyre_replica_attempts{{replica="{engine.url}"}}'] == 0
    assert any(name.startswith("gyre_build_info{") for name in after)


STATES = ("serving", "draining", "paused", "gone")


def test_health_says_whether_replicas_serve(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path / "s.db", template=toy_template()) as proxy:
        assert proxy.http.get("/healthz").json() == {"status": "ok", "replicas_serving": 0, "replicas": {}}


def test_labels_are_escaped_and_buckets_add_up() -> None:
    counter = Counter("a_total", "A.", "what")
    counter.add('x"\\\n', by=3)
    assert list(counter.lines())[2:] == ['a_total{what="x\\"\\\\\\n"} 3']
    histogram = Histogram("b_seconds", "B.", (0.1, 1.0))
    for seconds in (0.1, 0.5, 5.0):
        histogram.observe(seconds)
    assert list(histogram.lines())[2:] == [
        'b_seconds_bucket{le="0.1"} 1',
        'b_seconds_bucket{le="1.0"} 2',
        'b_seconds_bucket{le="+Inf"} 3',
        "b_seconds_sum 5.6",
        "b_seconds_count 3",
    ]


@pytest.mark.parametrize(
    ("host", "open_"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("gateway.example", False)],
)  # fmt: skip
def test_metrics_are_open_on_loopback_only(host: str, open_: bool) -> None:
    assert loopback(host) is open_


async def test_the_guard_guards_metrics_and_not_health() -> None:
    def guard(handler):  # type: ignore[no-untyped-def]
        async def refuse(request: web.Request) -> web.StreamResponse:
            return web.Response(status=401)

        return refuse

    page = MetricsPage(Metrics(), Routes([ReplicaSpec("http://a")]), lambda: 0, guard)
    app = web.Application()
    app.add_routes(page.pages())
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        assert (await client.get("/metrics")).status_code == 401
        health = (await client.get("/healthz")).json()
        assert health == {"status": "ok", "replicas_serving": 1, "replicas": {"serving": 1}}
    await runner.cleanup()
