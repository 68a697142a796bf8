"""Two cells of real vLLM (its CPU build): agents across forced role switches, and weights that come while a cell trains."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from trainer.cells.cells_kit import Fleet, Forced, Hand, check_calls, converse_all, fleet, moves, until, weights
from training_kit import make_model
from vllm_environment import VLLM_PYTHON, environment

from gyre_sdk.trainer.cells.load import kv_tokens
from gyre_sdk.trainer.config import EngineConfig
from gyre_sdk.trainer.engines import vllm
from gyre_sdk.trainer.processes import ChildSpec
from gyre_sdk.trainer.transports import Replica

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RUNS, CALLS, TOKENS, SWITCHES = 4, 6, 16, 4
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
"""vLLM's CPU kernels want heads of 32; weights large enough that no two tokens are about equally likely."""
ENGINE = EngineConfig(
    kind="vllm",
    python=VLLM_PYTHON,
    max_batch=16,
    options=["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"],
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("cells")
    make_model(folder / "model", **SHAPE)

    def replica(found: Fleet, number: int) -> ChildSpec:
        return ChildSpec(
            f"cell-{number}-replica",
            lambda port: vllm.command(ENGINE, found.publisher.current, port, transport="file"),
            "/health",
            folder / f"cell-{number}.log",
            python=VLLM_PYTHON,
            environment={**vllm.ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            patience=600.0,
            on_death=found.publisher.lost,
            on_ready=found.publisher.returned,
        )

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        with fleet(folder, folder / "model", 2, replica) as found:
            yield found


def test_agents_do_not_notice_switches_of_vllm(served: Fleet) -> None:
    """The core goes to training and back while agents run; answers are those of a quiet fleet, byte for byte."""
    quiet = converse_all(served.service, RUNS, CALLS, TOKENS)
    enough = threading.Event()
    watching = threading.Thread(
        target=lambda: (until(lambda: served.switches() >= SWITCHES, "cells switch", 300), enough.set())
    )

    def before(call: int) -> None:
        if call == CALLS - 1:
            assert enough.wait(300)

    with served.manager(served.cells(), Hand("cell-1"), decide=Forced([1, -1]), drain_s=0.1):
        watching.start()
        found = converse_all(served.service, RUNS, CALLS, TOKENS, before)
        watching.join()
    assert [said for _, said in found] == [said for _, said in quiet]
    check_calls(served.store, [run for run, _ in [*quiet, *found]], CALLS, TOKENS, {0})
    assert not [state for state, _ in moves(served.events, "cell-0") if state == "failed"]
    assert len(moves(served.events, "cell-0")) >= 5 * SWITCHES / 2


def test_vllm_that_slept_serves_what_was_published_meanwhile(served: Fleet) -> None:
    """Its keys and values of before are gone with the weights: the answer is that of the version on record."""
    policy: dict[str, Any] = weights(served)
    cell = served.cells()[0]
    assert (kv_tokens(cell.url) or 0) >= 1024, "the plan's capacity is measured from it"
    served.publisher.withdraw(cell.url, 0.0)
    with Replica(cell.url, 0) as replica:
        cell.parking.park(replica)
        assert replica.is_paused()
        changed = {name: tensor * 1.5 if "down_proj" in name else tensor for name, tensor in policy.items()}
        version = served.publisher.publish(changed, step=1)
        assert replica.version() != str(version) and replica.is_paused()
        phases = served.publisher.restore(cell.url)
        assert phases["load"] > 0
        assert replica.version() == str(version) and not replica.is_paused()
    served.publisher.withdraw(served.urls[1], 0.0)
    (run, first), *_ = converse_all(served.service, 1, 2, TOKENS)
    served.publisher.restore(served.urls[1])
    served.publisher.withdraw(cell.url, 0.0)
    (again, second), *_ = converse_all(served.service, 1, 2, TOKENS)
    served.publisher.restore(cell.url)
    assert first == second
    check_calls(served.store, [run, again], 2, TOKENS, {version})
