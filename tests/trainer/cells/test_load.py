"""What is measured of replicas and live runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cells_kit import Pages, answering
from export_kit import USER, Talk, says

from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import CallId, CallStatus, LaneId, RunId, Sampling, VersionSpan
from gyre_sdk.trainer.cells.capacity import Load, carried
from gyre_sdk.trainer.cells.health import Health
from gyre_sdk.trainer.cells.load import LoadMeter
from gyre_sdk.trainer.cells.rates import RateMeter, cache_tokens
from gyre_sdk.trainer.transports.replica import Replica

METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="512"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_the_size_of_a_cache_is_read_from_metrics() -> None:
    assert cache_tokens(METRICS) == 512 * 16
    assert cache_tokens(METRICS.replace('"512"', '"None"')) is None
    assert cache_tokens("other_total 3\n") is None


class Metrics(Pages):
    """Answers as a replica does that has a cache of 512 blocks and serves version 3."""

    def page(self, path: str) -> str:
        return METRICS if path == "/metrics" else '{"weight_version": "3"}'


@pytest.fixture
def replica() -> Iterator[str]:
    with answering(Metrics) as url:
        yield url


def test_a_proxy_of_the_environment_is_not_asked(replica: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens where it would be."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    meter = RateMeter(lambda: [replica])
    meter.beat()
    meter.stop()
    assert meter.kv_tokens == 512 * 16
    health = Health(Now(), 1.0)
    health.watch([replica])
    health.beat()
    assert health.answers(replica)
    with Replica(replica, 3) as one, ServiceClient(replica, "key") as service:
        assert one.version() == "3"
        assert service.model_http.get(replica).status_code == 200
        assert service._http.get(replica).status_code == 200


class Now:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    def time(self) -> float:
        return self.at


def rates(url: str) -> RateMeter:
    """Return what has looked at a replica once."""
    meter = RateMeter(lambda: [url])
    meter.beat()
    meter.stop()
    return meter


def open_call(journal: Journal, talk: Talk, *, prompt: int) -> CallId:
    """Record that a call of a run began."""
    call = CallId(f"{talk.run}-open-{prompt}")
    intent = CallIntent(
        call=call,
        run=RunId(talk.run),
        lane=LaneId(f"{talk.run}-main"),
        role="main",
        parent=None,
        fork_reason=None,
        shared=0,
        prompt_ids=list(range(prompt)),
        sampling=Sampling(),
        request={},
        messages=[USER],
        received_at=talk.at,
    )
    journal.call_received(intent).result()
    return call


def end_call(journal: Journal, call: CallId, *, sampled: int) -> None:
    """Record what it sampled."""
    chunk = TokenChunk(0, list(range(sampled)), [-0.5] * sampled, [VersionSpan(0, 0, sampled)])
    ended = journal.call_ended(
        call, CallStatus.COMPLETE, at=200.0, sampled=chunk, finish_reason="stop", answer=says("one")
    )
    ended.result()


def test_contexts_of_live_runs_bound_what_a_cell_carries(tmp_path: Path, replica: str) -> None:
    clock = Now()
    with Journal(tmp_path / "s.db") as journal:
        meter = LoadMeter(journal, rates(replica), clock)
        first, second = (Talk(journal, run, group="g", member=n) for n, run in enumerate("ab"))
        assert meter() == Load(kv_tokens=8192, context_tokens=None)
        first.turn([USER], says("one"), tokens=7)  # 3 + 7
        second.turn([USER], says("one"), tokens=17)  # 3 + 17
        assert meter().context_tokens is None, "it looks again after a while only"
        clock.at += 60
        assert meter().context_tokens == 15
        assert carried(meter(), 1000).runs == pytest.approx(8192 / 15)
        second.end(1.0)
        first.turn([USER], says("two"), tokens=7)  # 10 + 3 + 7
        clock.at += 60
        assert meter() == Load(kv_tokens=8192, context_tokens=20)


def test_a_replica_that_does_not_say_leaves_the_bound(tmp_path: Path) -> None:
    with Journal(tmp_path / "s.db") as journal:
        assert LoadMeter(journal, rates("http://127.0.0.1:9"))() == Load()


def test_tokens_of_a_call_that_was_open_are_counted_when_they_come(tmp_path: Path, replica: str) -> None:
    """Also of one that was open, or had ended, before anybody looked; calls of runs that ended do not hold it up."""
    clock = Now()
    with Journal(tmp_path / "s.db") as journal:
        one, other = (Talk(journal, run, group="g", member=n) for n, run in enumerate("ab"))
        one.turn([USER], says("one"), tokens=7)  # 3 + 7
        call = open_call(journal, other, prompt=20)
        meter = LoadMeter(journal, rates(replica), clock)
        assert meter().context_tokens == (10 + 20) / 2
        one.turn([USER], says("two"), tokens=7)  # 10 + 3 + 7, after one that is open
        clock.at += 60
        assert meter().context_tokens == (20 + 20) / 2
        end_call(journal, call, sampled=30)
        clock.at += 60
        assert meter().context_tokens == (20 + 50) / 2
        open_call(journal, other, prompt=60)
        other.end(1.0)
        clock.at += 60
        assert meter().context_tokens == 20
        assert meter._read == journal.call_summaries()[-1].seq
