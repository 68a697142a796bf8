"""Two cells of real vLLM (its CPU build) that share keys and values: a training, agents across forced role switches, and
weights that come while a cell trains."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from long_calls import LONG, long_call, metric
from trainer.cells.cells_kit import Fleet, Forced, Hand, check_calls, converse_all, moves, until, weights
from training_kit import CONFIG, make_training
from transformers import AutoModelForCausalLM
from vllm_environment import IN_ONE, VLLM_PYTHON, environment

from gyre_sdk.events import Event, SwitchMeasured
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.cells.rates import cache_tokens
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import train
from gyre_sdk.trainer.transports import Replica

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RUNS, CALLS, TOKENS, SWITCHES = 4, 6, 16, 4
BLOCK, FILE, FILES = 32, 64, 4
"""Tokens that a block of the cache holds, a file holds; files of a long prompt, at least."""
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
"""vLLM's CPU kernels want heads of 32; weights large enough that no two tokens are about equally likely."""
SETTINGS = f"""
[agent.options]
max_tokens = 64
[cells]
count = 2
hysteresis = 0.0
drain_s = 0.2
[engine]
kind = "vllm"
python = "{VLLM_PYTHON}"
max_batch = 16
options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--block-size", "{BLOCK}"]
[engine.kv]
memory_gib = 0.0625
blocks_per_chunk = {FILE // BLOCK}
"""
TOLERANCE = 2e-4
"""Nats between vLLM's kernels and transformers'."""


def written(served: Trained) -> int:
    """Return how many files there are of the version that is served."""
    version = str(served.publisher.current.version)
    return sum(len(list((layout / version).rglob("*.bin"))) for layout in served.keys.glob("*"))


def sampled(url: str, ids: list[int], count: int, salt: str) -> list[int]:
    """Return what a replica samples greedily after these tokens."""
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": count}
    body = {"model": "policy", "token_ids": ids, "cache_salt": salt, "sampling_params": settings}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


class Trained(Fleet):
    """The processes of a training on two cells that share keys and values, once it has ended."""

    def __init__(self, folder: Path) -> None:
        self.events: list[Event] = []
        config = load_config(make_training(folder, CONFIG + SETTINGS, **SHAPE), ["rollout.staleness=0"])
        self.model, self.store = config.policy.model, config.store.path
        self.stack = Stack(config, self.events.append, base=folder)
        self.stack.__enter__()
        try:
            self.report = train(config, stack=self.stack)
        except BaseException:
            self.close()
            raise
        self.told = list(self.events)
        """What it told."""
        assert self.stack._keys is not None
        self.keys = self.stack._keys
        self.publisher, self.service = self.stack.publisher, self.stack.service
        self.urls, self.launched = self.stack.replicas, self.stack.cells

    def close(self) -> None:
        self.stack.__exit__(None, None, None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment(), **IN_ONE}.items():
            patch.setenv(name, value)
        found = Trained(tmp_path_factory.mktemp("cells"))
        yield found
        found.close()


def test_a_training_on_cells_that_share_keys(served: Trained) -> None:
    """What they sampled is what the trainer computes; keys were written, and the store is sound."""
    report, told = served.report, served.told
    assert (report.steps, report.skipped, report.version) == (3, 0, 3)
    assert report.metrics["sampling/sampling_logp_difference/max"] < TOLERANCE
    assert "training" in {event.to for event in told if isinstance(event, SwitchMeasured)}
    assert any(served.keys.rglob("*.bin"))
    done = subprocess.run([sys.executable, "-m", "gyre_sdk.cli", "fsck", str(served.store)], capture_output=True)
    assert done.returncode == 0, done.stdout


def test_agents_do_not_notice_switches_of_vllm(served: Trained) -> None:
    """The core goes to training and back while agents run; answers are those of a quiet fleet, byte for byte."""
    served.events.clear()
    version = served.publisher.current.version
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
    check_calls(served.store, [run for run, _ in [*quiet, *found]], CALLS, TOKENS, {version})
    assert not [state for state, _ in moves(served.events, "cell-0") if state == "failed"]
    assert len(moves(served.events, "cell-0")) >= 5 * SWITCHES / 2


def test_vllm_that_slept_serves_what_was_published_meanwhile(served: Trained) -> None:
    """Its keys and values of before are gone with the weights: the answer is that of the version on record."""
    policy: dict[str, Any] = weights(served)
    cell = served.cells()[0]
    page = httpx.get(f"{cell.url}/metrics", trust_env=False).text
    assert (cache_tokens(page) or 0) >= 1024, "the plan's capacity is measured from it"
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


def test_a_call_that_is_cut_finds_its_prefix_at_the_other_cell(served: Trained) -> None:
    """Its cell goes to training: the other takes its keys from the folder, and goes on as a quiet cell would."""
    policy, (one, other) = weights(served), served.urls
    served.publisher.publish(policy, step=2)
    before = metric(other, "external_prefix_cache_hits_total")
    with ThreadPoolExecutor(1) as pool:
        for number in range(1, 20):
            served.publisher.withdraw(other, 0.0)
            begun = metric(one, "generation_tokens_total")
            files = written(served)
            running = pool.submit(long_call, served.service, served.store, number)
            until(lambda begun=begun: metric(one, "generation_tokens_total") > begun, "the core's cell has the call")
            until(lambda files=files: written(served) >= files + FILES, "what it was asked is in the folder")
            served.publisher.restore(other)
            forced = Forced([1], live=lambda running=running: not running.done())
            with served.manager(served.cells(), Hand("cell-1"), decide=forced):
                call = running.result(300)
            with Journal(served.store, "r") as journal:
                attempts = journal.attempts(call.call)
            if len(attempts) > 1:
                break
    assert [attempt.replica for attempt in attempts] == served.urls
    found = metric(other, "external_prefix_cache_hits_total") - before
    assert found >= FILES * FILE
    served.publisher.publish(policy, step=3)  # the same weights as another version: nothing of the old one is found
    hits = [metric(url, "external_prefix_cache_hits_total") for url in served.urls]
    quiet = long_call(served.service, served.store, number)
    assert quiet.prompt_ids == call.prompt_ids and quiet.sampled_ids == call.sampled_ids
    assert [metric(url, "external_prefix_cache_hits_total") for url in served.urls] == hits


def test_a_call_that_is_cut_goes_on_with_its_prefix_computed_again(served: Trained) -> None:
    """At the other cell under the same weights, which finds none of its keys, and back at the first under newer ones.

    Nobody serves meanwhile. Each token is on record with the weights that it was sampled from, and their log-prob.
    """
    policy, (one, other) = weights(served), served.urls
    changed = {name: tensor * 1.5 if "down_proj" in name else tensor for name, tensor in policy.items()}
    published = [served.publisher.publish(policy, step=200)]

    def sampled_by(url: str) -> float:
        return metric(url, "generation_tokens_total")

    served.publisher.withdraw(other, 0.0)
    with ThreadPoolExecutor(1) as pool:
        begun = sampled_by(one)
        running = pool.submit(long_call, served.service, served.store, 30)
        until(
            lambda: sampled_by(one) > begun and written(served) >= FILES, "it is under way, with its keys in the folder"
        )
        assert served.publisher.withdraw(one, 0.0).moved == 1
        for file in served.keys.rglob("*.bin"):
            file.unlink()
        begun, hits = sampled_by(other), metric(other, "external_prefix_cache_hits_total")
        served.publisher.restore(other)
        until(lambda: sampled_by(other) > begun, "it goes on at the other")
        assert served.publisher.withdraw(other, 0.0).moved == 1
        assert metric(other, "external_prefix_cache_hits_total") == hits
        published.append(served.publisher.publish(changed, step=201))
        served.publisher.restore(one)
        call = running.result(300)
    served.publisher.restore(other)
    with Journal(served.store, "r") as journal:
        attempts, calls = journal.attempts(call.call), list(journal.calls(call.run))
    assert calls == [call] and len(call.sampled_ids) == len(call.logprobs) == LONG
    assert [attempt.replica for attempt in attempts] == [one, other, one]
    cuts = [attempt.tokens_to for attempt in attempts]
    assert 0 < cuts[0] < cuts[1] < LONG and [attempt.tokens_from for attempt in attempts] == [0, *cuts[:-1]]
    spans = [(span.version, span.start, span.end) for span in call.versions]
    assert spans == [(published[0], 0, cuts[1]), (published[1], cuts[1], LONG)]
    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32).eval()
    path = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
    for held, (_, start, end) in zip((policy, changed), spans, strict=True):
        model.load_state_dict(held, strict=False)
        with torch.no_grad():
            logp = model(input_ids=path).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        own = logp.gather(-1, path[0, len(call.prompt_ids) :, None])[:, 0]
        for wanted in (own, logp.max(-1).values):  # the likeliest was sampled
            assert (wanted - torch.tensor(call.logprobs))[start:end].abs().max() < TOLERANCE


def test_keys_of_older_weights_are_never_used(served: Trained) -> None:
    """Not by a request that brings the salt of an older version, nor by a call that was under way when weights changed."""
    policy = weights(served)
    changed = {name: tensor * 1.5 if "down_proj" in name else tensor for name, tensor in policy.items()}
    one, other = served.urls
    ids = [3 + 7 * n % 60 for n in range(FILES * FILE)]
    served.publisher.publish(policy, step=99)
    before = sampled(one, ids, TOKENS, "s")
    until(lambda: written(served) >= FILES, "it is in the folder")
    hits = metric(other, "external_prefix_cache_hits_total")
    assert sampled(other, ids, TOKENS, "s") == before
    assert metric(other, "external_prefix_cache_hits_total") - hits >= (FILES - 1) * FILE
    with ThreadPoolExecutor(1) as pool:
        for number in range(100, 120):
            begun = sum(metric(url, "generation_tokens_total") for url in served.urls)
            running = pool.submit(long_call, served.service, served.store, number)
            until(
                lambda begun=begun: sum(metric(url, "generation_tokens_total") for url in served.urls) > begun,
                "it is under way",
            )
            version = served.publisher.publish(policy if number % 2 else changed, step=number)
            call = running.result(300)
            if len(call.versions) > 1:
                break
    if number % 2:
        version = served.publisher.publish(changed, step=number + 1)
    hits = metric(one, "external_prefix_cache_hits_total")
    after = sampled(one, ids, TOKENS, "s")
    assert metric(one, "external_prefix_cache_hits_total") == hits
    assert after == sampled(one, ids, TOKENS, "t") == sampled(other, ids, TOKENS, "s") != before

    new = call.versions[-1]
    if new.version != version:
        served.publisher.publish(policy, step=number + 2)
    rest = sampled(other, [*call.prompt_ids, *call.sampled_ids[: new.start]], LONG - new.start, "u")
    assert call.sampled_ids[new.start :] == rest
