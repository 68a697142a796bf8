"""Publication to real vLLM: what it samples from afterwards is what the trainer holds, whatever happens on the way.

Tolerance: 2e-4 nats between vLLM's float32 kernels and transformers' (seen: 3e-6), where neighbouring versions differ by
more than 0.01. One server for the module: the one that a training with adapters starts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from training_kit import CONFIG, make_training
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_environment import VLLM_PYTHON, environment

from gyre_sdk.errors import PublishError
from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.stack import Stack
from gyre_sdk.trainer.training import train
from gyre_sdk.trainer.transports import Replica, make
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, full_weights

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOLERANCE = 2e-4
PROMPTS = [list(range(start, start + 40)) for start in (3, 11, 20)]
ENGINE = f"""
[policy.lora]
r = 4
alpha = 12
[engine]
kind = "vllm"
python = "{VLLM_PYTHON}"
max_batch = 16
options = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
"""
SHAPE = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2}
"""vLLM's CPU kernels want heads of 32; weights large enough that versions differ."""


class Served:
    """A training's processes with vLLM as the engine, and a publisher of files to the same server."""

    def __init__(self, folder: Path) -> None:
        path = make_training(folder, CONFIG + ENGINE, **SHAPE)
        self.events: list[Any] = []
        self.config = load_config(path, ["train.steps=2", "rollout.staleness=0"])
        self.base = self.config.policy.model
        self.stack = Stack(self.config, self.events.append, base=folder)
        self.stack.__enter__()
        (self.url,) = self.stack.publisher._locks
        self.folder = WeightFolder(self.base, folder / "files", 10_000_000)
        self.publisher = self.publisher_of("file", "one")

    def publisher_of(self, transport: str, owner: str) -> Publisher:
        publisher = Publisher(
            self.stack.ledger,
            self.folder,
            PolicyFiles(0, self.base, ""),
            observer=lambda event: None,
            transport=make(transport, self.folder, self.base, owner),
            patience=300.0,
        )
        publisher.connect([self.url], None)
        return publisher

    def policy(self, seed: int | None) -> Any:
        """The policy that starts, or a random one of its shape."""
        if seed is None:
            return AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.base)).float().eval()

    def adapted(self, seed: int) -> Any:
        """The policy that starts with a random adapter, whose scale is no power of two."""
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules="all-linear")
        model = get_peft_model(self.policy(None), config)
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.1)
        return model.eval()

    def replica(self) -> Replica:
        return Replica(self.url, self.publisher.current.version)

    def sample(self, prompt: list[int], count: int = 6, **more: Any) -> dict[str, Any]:
        params = {"temperature": 1.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0, "seed": 1}
        body = {"token_ids": prompt, "sampling_params": params, **more}
        response = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=300)
        assert response.status_code == 200, response.text
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    def close(self) -> None:
        self.publisher.close()
        self.folder.remove()
        self.stack.__exit__(None, None, None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        found = Served(tmp_path_factory.mktemp("publication"))
        yield found
        found.close()


def error(model: Any, prompt: list[int], choice: dict[str, Any], start: int = 0, end: int | None = None) -> float:
    """The largest difference between a choice's log-probs and the model's."""
    ids = choice["token_ids"]
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([prompt + ids])).logits[0].log_softmax(-1)
    own = [logp[len(prompt) - 1 + place, token].item() for place, token in enumerate(ids)]
    given = [content["logprob"] for content in choice["logprobs"]["content"]]
    return max(abs(a - b) for a, b in list(zip(own, given, strict=True))[start:end])


def versions(choice: dict[str, Any]) -> list[str]:
    return [span["version"] for span in choice["weight_versions"]]


def test_a_training_samples_from_what_it_trained(served: Served) -> None:
    """Two steps of adapters: calls name the version that they are recorded under; then the trained model is served."""
    report = train(served.config, stack=served.stack)
    assert (report.steps, report.versions, report.skipped) == (2, 2, 0)
    assert report.metrics["sampling/sampling_logp_difference/max"] < TOLERANCE
    calls = list(served.stack.journal.calls())
    assert {span.version for call in calls for span in call.versions} == {0, 1}
    publisher = served.stack.publisher
    name = publisher._transport.request_name(publisher.current)
    for prompt in PROMPTS:
        assert error(served.stack.model().eval(), prompt, served.sample(prompt, model=name)) < TOLERANCE


def test_files_replace_the_weights_and_no_cached_prefix_outlives_them(served: Served) -> None:
    """Also the head that is tied to the embedding, of which vLLM's CPU kernels keep a copy of their own."""
    served.publisher.start()
    before, salt = served.policy(None), "the same for all"
    for prompt in PROMPTS * 2:  # the second time from the cache
        assert error(before, prompt, served.sample(prompt, cache_salt=salt)) < TOLERANCE
    for seed in (1, 2):
        model = served.policy(seed)
        version = served.publisher.publish(model, step=seed)
        for prompt in PROMPTS * 2:
            choice = served.sample(prompt, cache_salt=salt)
            assert versions(choice) == [str(version)]
            assert error(model, prompt, choice) < TOLERANCE
            assert error(before, prompt, choice) > 0.1
        before = model
    with served.replica() as replica:
        assert not replica.is_paused()


def test_a_call_goes_on_over_a_publication_with_each_token_labelled(served: Served) -> None:
    """Clients that ask without a break, for answers of different lengths: one of them is soon in the middle of its own."""
    first = served.policy(2)
    models = {str(served.publisher.publish(first, step=2)): first}
    enough = threading.Event()
    found: list[tuple[int, dict[str, Any]]] = []

    def ask(tokens: int) -> None:
        while not enough.is_set():
            found.append((tokens, served.sample(PROMPTS[0], tokens)))

    clients = [threading.Thread(target=ask, args=(tokens,)) for tokens in (500, 700, 900)]
    for client in clients:
        client.start()
    try:
        for seed in range(3, 12):
            answered, model = len(found), served.policy(seed)
            models[str(served.publisher.publish(model, step=3))] = model
            while len(found) < answered + 2 * len(clients) and any(client.is_alive() for client in clients):
                time.sleep(0.01)
            if any(len(versions(choice)) > 1 for _, choice in found):
                break
    finally:
        enough.set()
        for client in clients:
            client.join()
    for tokens, choice in found:
        assert len(choice["token_ids"]) == tokens and choice["finish_reason"] == "length"
        assert choice["weight_versions"][0]["start"] == 0 and choice["weight_versions"][-1]["end"] == tokens
    mixed = [choice for _, choice in found if len(versions(choice)) > 1]
    for choice in (*mixed[:3], found[0][1], found[-1][1]):  # computing them all takes minutes
        for span in choice["weight_versions"]:
            assert error(models[span["version"]], PROMPTS[0], choice, span["start"], span["end"]) < TOLERANCE
    published = sorted(models, key=int)
    assert mixed
    for _, choice in found:
        place = published.index(versions(choice)[0])
        assert versions(choice) == published[place : place + len(versions(choice))]


def test_older_versions_and_other_trainers_are_refused(served: Served, tmp_path: Path) -> None:
    model = served.policy(3)
    version = served.publisher.publish(model, step=3)
    folder = WeightFolder(served.base, tmp_path, 10_000_000)
    older = folder.write(1, full_weights(served.policy(5)))
    with served.replica() as replica:
        transport = make("file", served.folder, served.base, "one")
        with pytest.raises(PublishError, match=rf"serves version {version}, newer than version 1"):
            transport.bring(replica, older)
        replica.start()
        info = {"path": str(older.file), "version": 1, "owner": "one"}
        with pytest.raises(PublishError, match=rf"refused: version 1 is older than version {version}"):
            replica.update(info)
        with pytest.raises(PublishError, match="trainer 'one' publishes here, trainer 'two' cannot"):
            replica.claim("two")
        replica.start()
        with pytest.raises(PublishError, match="trainer 'one' publishes here, not trainer 'two'"):
            replica.update({**info, "version": 99, "owner": "two"})
    folder.remove()
    choice = served.sample(PROMPTS[1])
    assert versions(choice) == [str(version)] and error(model, PROMPTS[1], choice) < TOLERANCE


def test_wrong_weights_under_the_right_label_are_found_and_replaced(served: Served) -> None:
    """A planted damage: one weight of one layer, loaded under the version's own label."""
    version = served.publisher.publish(served.policy(3), step=3)
    files = served.publisher.current
    damaged = load_file(files.file)
    damaged["model.layers.1.mlp.down_proj.weight"][3, 5] += 0.5
    path = files.folder.parent / "damaged.safetensors"
    save_file(damaged, path)
    with served.replica() as replica:
        replica.start()
        with pytest.raises(PublishError, match="has digest"):
            replica.update({"path": str(path), "version": version, "owner": "one", "digest": files.digest})
        replica.start()
        replica.update({"path": str(path), "version": version, "owner": "one"})
        with replica.paused():
            replica.finish(str(version))
        assert replica.version() == str(version)
        transport: Any = make("file", served.folder, served.base, "one")
        verdict = transport.compare(replica, files)
        assert verdict.differing == ["model.layers.1.mlp.down_proj.weight"] and verdict.compared == len(damaged)
        with pytest.raises(PublishError, match=r"1 of \d+ tensors differ, first 'model\.layers\.1\.mlp\.down_proj"):
            verdict.require(replica, version)
    path.unlink()
    served.publisher.start()
    with served.replica() as replica:
        assert transport.compare(replica, files).good
    assert error(served.policy(3), PROMPTS[2], served.sample(PROMPTS[2])) < TOLERANCE


def test_adapters_are_served_by_versioned_names(served: Served) -> None:
    """Each request gets the adapter that it names, from caches of its own; a second training does not disturb them."""
    base = served.policy(None)
    served.publisher.publish(base, step=4)
    one = f"one{uuid.uuid4().hex[:6]}"
    publisher, other = served.publisher_of("lora", one), served.publisher_of("lora", "two")
    publisher.start()
    models: dict[str, Any] = {}
    for seed in (1, 2, 3):
        model = served.adapted(seed)
        models[f"{one}-v{publisher.publish(model, step=seed)}"] = model
        if seed == 1:
            other.publish(served.adapted(9), step=1)
        for name, model in list(models.items())[-2:]:  # the newest, and the one before it
            for prompt in PROMPTS:
                choice = served.sample(prompt, model=name, cache_salt="the same for all")
                assert error(model, prompt, choice) < TOLERANCE
                assert error(base, prompt, choice) > 0.01
    with served.replica() as replica:
        held = [name for name in replica.models() if name.startswith(f"{one}-v")]
        assert held == list(models)[1:]  # the first is not served any more
        with pytest.raises(PublishError, match="newer than version 1"):
            publisher._transport.bring(replica, PolicyFiles(1, served.base, "", adapter=served.base))
    assert error(base, PROMPTS[0], served.sample(PROMPTS[0])) < TOLERANCE
    with pytest.raises(PublishError, match="publishes adapters, not full weights"):
        publisher.publish(full_weights(base), step=5)


def test_a_server_that_dies_during_a_publication_comes_back_with_the_new_weights(served: Served) -> None:
    """It starts with the base alone; calls go to it again once it holds the adapter."""
    publisher, model = served.stack.publisher, served.adapted(6)
    killed = threading.Timer(0.02, lambda: os.kill(served.stack.pids()["engine"], signal.SIGKILL))
    killed.start()
    version = publisher.publish(model, step=6)
    killed.join()
    deadline = time.monotonic() + 600
    while not any(type(event).__name__ == "ProcessRestarted" for event in served.events) or not publisher._serving:
        assert time.monotonic() < deadline  # killed before, in, or after the update
        served.stack.check()
        time.sleep(0.2)
    name = publisher._transport.request_name(publisher.current)
    rows = served.stack.service.status()["replicas"]
    assert [(row["url"], row["version"], row["state"]) for row in rows] == [(served.url, version, "serving")]
    for prompt in PROMPTS:
        assert error(model, prompt, served.sample(prompt, model=name)) < TOLERANCE
