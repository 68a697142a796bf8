"""What is measured of replicas and live runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cells_kit import Pages, answering
from export_kit import USER, Talk, says

from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cells.capacity import Load, carried
from gyre_sdk.trainer.cells.health import Health
from gyre_sdk.trainer.cells.load import LoadMeter, kv_tokens, parsed
from gyre_sdk.trainer.transports.replica import Replica

METRICS = """# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="512"} 1.0
vllm:num_requests_running{engine="0"} 0.0
"""


def test_the_size_of_a_cache_is_read_from_metrics() -> None:
    assert parsed(METRICS) == 512 * 16
    assert parsed(METRICS.replace('"512"', '"None"')) is None
    assert parsed("other_total 3\n") is None


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
    assert kv_tokens(replica) == 512 * 16
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


def test_contexts_of_live_runs_bound_what_a_cell_carries(tmp_path: Path, replica: str) -> None:
    clock = Now()
    with Journal(tmp_path / "s.db") as journal:
        meter = LoadMeter(journal, lambda: replica, clock)  # type: ignore[arg-type]
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
        assert LoadMeter(journal, lambda: "http://127.0.0.1:9")() == Load()
