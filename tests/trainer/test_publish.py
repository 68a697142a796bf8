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

from gyre_sdk.errors import PublishError
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.ledger import Ledger, State
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder, full_weights


class Served:
    """An engine under supervision, and a publisher to it."""

    def __init__(self, tmp_path: Path) -> None:
        self.base = tmp_path / "base"
        tiny_model().save_pretrained(self.base)
        self.journal = Journal(tmp_path / "store.db")
        self.ledger = Ledger(self.journal)
        self.folder = WeightFolder(self.base, tmp_path / "out", 100_000)
        self.events: list[Any] = []
        self.publisher = Publisher(
            self.ledger, self.folder, PolicyFiles(0, self.base, ""), observer=self.events.append, patience=60.0
        )

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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
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
    assert served.greedy() == (expected(tiny_model(0)), "0")
    other = tiny_model(1)
    assert served.publisher.publish(full_weights(other), step=1) == 1
    assert served.greedy() == (expected(other), "1")
    assert served.publisher.publish(full_weights(tiny_model(2)), step=2) == 2
    assert served.greedy() == (expected(tiny_model(2)), "2")
    assert served.ledger.state.versions == {n: (State.PUBLISHED, n) for n in range(3)}
    assert sorted(path.name for path in served.folder.root.iterdir()) == ["v1", "v2"]
    assert [event.version for event in served.events] == [1, 2]


def test_an_engine_that_dies_comes_back_with_the_current_weights(served: Served) -> None:
    other = tiny_model(1)
    served.publisher.publish(full_weights(other), step=1)
    os.kill(served.child.pid, signal.SIGKILL)
    while len(served.events) < 2:
        time.sleep(0.05)
    assert served.greedy() == (expected(other), "1")


def test_a_publication_survives_the_death_of_the_engine(served: Served) -> None:
    other = tiny_model(1)
    os.kill(served.child.pid, signal.SIGKILL)
    assert served.publisher.publish(full_weights(other), step=1) == 1
    assert served.greedy() == (expected(other), "1")


def test_a_session_that_a_dead_trainer_left_open_is_ended(served: Served) -> None:
    assert httpx.post(f"{served.url}/start_weight_update", json={}).status_code == 200
    served.publisher.publish(full_weights(tiny_model(1)), step=1)
    assert served.greedy()[1] == "1"


def test_weights_of_another_model_are_refused_by_name(served: Served) -> None:
    weights = full_weights(tiny_model(1))
    weights["model.odd.weight"] = torch.zeros(2)
    with pytest.raises(
        PublishError, match=rf"replica {served.url} refused version 1 at update_weights.*model\.odd\.weight"
    ):
        served.publisher.publish(weights, step=1)
    assert served.greedy()[1] == "0"
    assert served.ledger.allocate_version(1, at=0.0) == 2  # a number that did not get through is not used again


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
    for step in range(1, 4):
        served.publisher.publish(full_weights(tiny_model(step)), step=step)
    stop.set()
    thread.join()
    assert seen == sorted(seen)
