"""Publication to the real embedded engine: new weights under a new version, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from tiny_policy import VOCAB, tiny_model

from gyre_sdk.errors import PublishError, SettingsError
from gyre_sdk.events import ProcessRestarted, VersionPublished
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.engines.fingerprint import fingerprint
from gyre_sdk.trainer.ledger import Ledger, State
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Replica, make
from gyre_sdk.trainer.transports.file import FileTransport
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, adapter_weights, full_weights


class Served:
    """An engine under supervision, and a publisher to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.base = tmp_path / "base"
        tiny_model().save_pretrained(self.base)
        self.journal = Journal(tmp_path / "store.db")
        self.ledger = Ledger(self.journal)
        self.folder = WeightFolder(self.base, tmp_path / "out", 100_000)
        self.events: list[Any] = []
        self.publisher = self.make()

        def command(port: int) -> list[str]:
            files = self.publisher.current
            return [
                "gyre_sdk.trainer.engines.embedded",
                *("--model", str(files.folder), "--version", str(files.version), "--port", str(port)),
            ]

        self.child = Child(
            ChildSpec("engine", command, "gyre-engine ready on", tmp_path / "engine.log"), self.events.append
        )
        self.child.begin()
        self.url = self.child.wait()
        self.publisher.connect([self.url], None)

    def make(self, patience: float = 60.0, start: PolicyFiles | None = None) -> Publisher:
        return Publisher(
            self.ledger,
            self.folder,
            start or PolicyFiles(0, self.base, ""),
            observer=self.events.append,
            transport=FileTransport(self.folder, "one"),
            patience=patience,
        )

    def close(self) -> None:
        self.child.stop()
        self.folder.remove()
        self.journal.close()

    def greedy(self) -> tuple[list[int], str]:
        body = {
            "token_ids": [1, 5, 9, 13],
            "sampling_params": {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 0},
        }
        choice = httpx.post(f"{self.url}/inference/v1/generate", json=body, timeout=60).json()["choices"][0]
        return choice["token_ids"], choice["weight_versions"][0]["version"]

    @property
    def version(self) -> int:
        """The newest one."""
        return self.publisher.current.version

    def publish(self, seed: int) -> int:
        return self.publisher.publish(full_weights(tiny_model(seed)), step=seed)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("served"))
    yield found
    found.close()


@pytest.fixture
def served(shared: Served) -> Served:
    """One for most tests: it serves the first weights, under a new version."""
    shared.publish(0)
    shared.events.clear()
    return shared


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Served]:
    """One of the test's own."""
    found = Served(tmp_path)
    yield found
    found.close()


def expected(model: Any) -> list[int]:
    ids = [1, 5, 9, 13]
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1, :VOCAB].argmax()))
    return ids[4:]


def test_published_weights_are_what_is_sampled_from(served: Served) -> None:
    start = served.version
    assert served.greedy() == (expected(tiny_model(0)), str(start))
    for seed in (1, 2):
        assert served.publish(seed) == start + seed
        assert served.greedy() == (expected(tiny_model(seed)), str(start + seed))
    assert [served.ledger.state.versions[start + n] for n in range(3)] == [(State.PUBLISHED, n) for n in range(3)]
    assert {path.name for path in served.folder.root.iterdir()} == {f"v{start + 1}", f"v{start + 2}"}
    told = [event.version for event in served.events if isinstance(event, VersionPublished)]
    assert told == [start + 1, start + 2]


def test_an_engine_that_dies_comes_back_with_the_current_weights(mortal: Served) -> None:
    """And a publication survives its death."""
    assert mortal.greedy() == (expected(tiny_model(0)), "0")
    assert mortal.publish(1) == 1
    os.kill(mortal.child.pid, signal.SIGKILL)
    while not any(isinstance(event, ProcessRestarted) for event in mortal.events):
        time.sleep(0.05)
    assert mortal.greedy() == (expected(tiny_model(1)), "1")
    os.kill(mortal.child.pid, signal.SIGKILL)
    assert mortal.publish(2) == 2
    assert mortal.greedy() == (expected(tiny_model(2)), "2")
    assert mortal.ledger.state.versions == {n: (State.PUBLISHED, n) for n in range(3)}


def test_a_session_that_a_dead_trainer_left_open_is_ended(served: Served) -> None:
    assert httpx.post(f"{served.url}/start_weight_update", json={}).status_code == 200
    version = served.publish(1)
    assert served.greedy()[1] == str(version)


def test_weights_of_another_model_are_refused_by_name(served: Served) -> None:
    start, weights = served.version, full_weights(tiny_model(1))
    weights["model.odd.weight"] = torch.zeros(2)
    with pytest.raises(
        PublishError, match=rf"replica {served.url} refused version {start + 1} at update_weights.*model\.odd\.weight"
    ):
        served.publisher.publish(weights, step=1)
    assert served.greedy()[1] == str(start)
    assert served.ledger.allocate_version(1, at=0.0) == start + 2  # a number that did not get through is not used again


def test_a_replica_that_stays_away_is_named(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with Journal(tmp_path / "store.db") as journal:
        folder = WeightFolder(tmp_path / "base", tmp_path / "out", 10)
        start = PolicyFiles(0, tmp_path / "base", "")
        publisher = Publisher(Ledger(journal), folder, start, observer=lambda event: None, patience=0.5)
        publisher.connect(["http://127.0.0.1:9"], None)
        with pytest.raises(
            PublishError, match=r"version 1 did not reach replica http://127\.0\.0\.1:9 in 0 s.*resumes"
        ):
            publisher.publish({"w": torch.zeros(1)}, step=1)
        folder.remove()


def test_a_version_folder_is_a_model_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model().save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    folder = WeightFolder(base, tmp_path / "out", 100_000)
    weights = full_weights(tiny_model(3))
    files = folder.write(7, weights)
    assert (files.folder / "tokenizer.json").read_text() == "{}"
    assert (files.folder / "config.json").is_symlink()
    for name, tensor in load_file(files.file).items():
        assert torch.equal(tensor, weights[name])
    stale = folder.root
    again = WeightFolder(base, tmp_path / "out", 100_000)
    assert again.root == stale and list(stale.iterdir()) == []
    again.remove()


def test_small_shared_memory_is_left_alone(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, tmp_path / "out", 1 << 60)
    assert folder.root == tmp_path / "out" / "weights"


def test_publications_do_not_stop_generation(served: Served) -> None:
    stop = threading.Event()
    seen: list[str] = []

    def generate() -> None:
        while not stop.is_set():
            seen.append(served.greedy()[1])

    thread = threading.Thread(target=generate)
    thread.start()
    for seed in range(1, 4):
        served.publish(seed)
    stop.set()
    thread.join()
    assert seen == sorted(seen, key=int)


def test_older_versions_and_other_trainers_are_refused(served: Served) -> None:
    """By the engine itself, whatever the trainers think of each other; what is served stays."""
    one, two = served.publish(1), served.publish(2)
    older = served.folder.root / f"v{one}"
    other = FileTransport(served.folder, "other")
    with Replica(served.url, one) as replica:
        newer = f"serves version {two}, newer than version {one}: another trainer publishes"
        with pytest.raises(PublishError, match=newer):
            other.bring(replica, PolicyFiles(one, older, ""))
        with pytest.raises(PublishError, match="trainer 'one' publishes here, trainer 'other' cannot"):
            replica.claim("other")
        for info, message in (
            ({"version": one, "owner": "one"}, f"refused: version {one} is older than version {two}"),
            ({"version": two + 7, "owner": "other"}, "trainer 'one' publishes here, not trainer 'other'"),
            ({"version": two + 7, "owner": "one", "digest": "0"}, "has digest .*, announced was 0"),
        ):
            replica.start()
            with pytest.raises(PublishError, match=message):
                replica.update({"path": str(older / "model.safetensors"), **info})
        assert served.greedy() == (expected(tiny_model(2)), str(two))
        replica.release()
        replica.claim("other")
        replica.release()


def test_wrong_weights_under_the_right_label_are_found_and_replaced(served: Served) -> None:
    version = served.publish(1)
    damaged = full_weights(tiny_model(1))
    damaged["model.layers.0.mlp.up_proj.weight"][2, 3] += 1e-3
    files = served.folder.write(version + 99, damaged)
    transport = FileTransport(served.folder, "one")
    with Replica(served.url, version) as replica:
        replica.start()
        replica.update({"path": str(files.file), "version": version, "owner": "one"})
        replica.finish(str(version))
        verdict = transport.compare(replica, served.publisher.current)
        assert verdict.differing == ["model.layers.0.mlp.up_proj.weight"]
        with pytest.raises(PublishError, match=r"1 of \d+ tensors differ, first 'model\.layers\.0\.mlp\.up_proj"):
            verdict.require(replica, version)
        served.publisher.start()
        assert transport.compare(replica, served.publisher.current).good


def test_a_replica_that_a_dead_trainer_paused_samples_again(served: Served) -> None:
    with Replica(served.url, served.version) as replica:
        replica.post("/pause?mode=keep", {})
        version = served.publish(1)
        assert not replica.is_paused()
    assert served.greedy() == (expected(tiny_model(1)), str(version))


def test_a_replica_that_is_away_is_left_behind_and_caught_up(served: Served, tmp_path: Path) -> None:
    """Two replicas, one of them stopped: the other takes the version; the first is brought when it answers again."""
    spec = served.child.spec
    second = Child(ChildSpec("second", spec.command, spec.ready, tmp_path / "second.log"), served.events.append)
    second.begin()
    try:
        away = second.wait()
        publisher = served.make(patience=0.2, start=served.publisher.current)
        publisher.connect([served.url, away], None)
        publisher.start()
        second.stop()
        version = publisher.publish(full_weights(tiny_model(1)), step=1)
        assert set(publisher._serving) == {served.url}
        port = away.rpartition(":")[2]
        again = ChildSpec("second", spec.command, spec.ready, tmp_path / "second.log", port=int(port))
        second = Child(again, served.events.append)
        second.begin()
        second.wait()
        while away not in publisher._serving:
            time.sleep(0.05)
        assert publisher._serving[away].version == version
        publisher.close()
    finally:
        second.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_changes_with_any_bit_and_place(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {fingerprint(tensor), fingerprint(tensor.t()), fingerprint(tensor.reshape(700, 3)), fingerprint(tensor[:2])}
    for row, column in ((0, 0), (1, 349), (2, 699)):
        other = tensor.clone()
        other[row, column] = torch.nextafter(other[row, column].float(), torch.tensor(9.0)).to(dtype) + 2**-6
        seen.add(fingerprint(other))
    swapped = tensor.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    seen.add(fingerprint(swapped))
    assert len(seen) == 8
    zeros = torch.zeros(5, dtype=dtype)
    assert fingerprint(zeros) == fingerprint(-zeros)  # what a kernel makes of -0.0 is 0.0
    assert fingerprint(tensor) == fingerprint(torch.cat([zeros.new_zeros(1, 700), tensor])[1:])  # wherever it lies


def test_full_weights_of_a_wrapped_model_and_adapters_by_themselves() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model(0), LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, target_modules=["q_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    found = adapter_weights(model)
    assert sorted(found.tensors)[0] == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert (found.config["r"], found.config["lora_alpha"], found.config["target_modules"]) == (2, 3, ["q_proj"])
    q = "model.layers.0.self_attn.q_proj.weight"
    a, b = (found.tensors[f"base_model.model.{q.replace('weight', f'lora_{x}.weight')}"] for x in "AB")
    assert torch.allclose(full_weights(model)[q], tiny_model(0).state_dict()[q] + 1.5 * b @ a, atol=1e-6)
    with pytest.raises(PublishError, match=r"has none: set policy\.lora"):
        adapter_weights(tiny_model())


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU; tests/gpu has those with")
def test_nccl_needs_gpus(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"torch sees no GPU here; use engine\.transport = 'file'"):
        make("nccl", WeightFolder(tmp_path, tmp_path / "out", 10), tmp_path, "one")
