"""Engines shared by the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_process import VOCAB, Engine, make_model, running_engine


@pytest.fixture(scope="session")
def model_a(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The model that engines start with, and the transformers object."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("model-a")
    model = make_model(folder, 0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [Path(__file__).read_text()],
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder, model


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Other weights of the same shape."""
    folder = tmp_path_factory.mktemp("model-b")
    return folder, make_model(folder, 1)


@pytest.fixture(scope="session")
def start(model_a: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Start engines that live until the end of the session."""
    with ExitStack() as stack:

        def run(*options: str, folder: Path | None = None) -> Engine:
            log = tmp_path_factory.mktemp("log") / "requests.jsonl"
            return stack.enter_context(running_engine(folder or model_a[0], log, *options))

        yield run


@pytest.fixture(scope="session")
def shared_engine(start: Callable[..., Engine]) -> Engine:
    return start("--version", "7")


@pytest.fixture
def engine(shared_engine: Engine, model_a: tuple[Path, Any]) -> Iterator[Engine]:
    """One engine for most tests, given back running, with the first weights, under version 7."""
    yield shared_engine
    shared_engine.call("/resume")
    if json.loads(shared_engine.get("/weight_info"))["weight_version"] != "7":
        shared_engine.load_weights(model_a[0] / "model.safetensors", "7")
