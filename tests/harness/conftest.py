"""Fixtures: a recording service on a scripted engine, a small byte-level BPE with Qwen3's special tokens, and Qwen3's own vocabulary where it is at hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from crash_kit import Template
from proxy_kit import SHARED
from session_kit import engine, service  # noqa: F401 - fixtures
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_TEXT = """You are a helpful agent. Use the bash tool to run a command.
system user assistant tool {"name": "bash", "arguments": {"command": "ls -la"}}
The answer is water and wine. Let me check the tests. I will run the tests. naïve 北京 🙂
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a tokenizer of about 400 tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT] * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    return folder


@pytest.fixture(scope="session")
def forks() -> Iterator[Template]:
    """What starts processes that are to be killed, quickly."""
    with closing(Template()) as template:
        yield template


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with Qwen3's own vocabulary."""
    source = SHARED / "data" / "tokenizers" / "qwen3"
    if not (source / "tokenizer.json.gz").is_file():
        pytest.skip(f"{source}/tokenizer.json.gz is missing: the real Qwen3 vocabulary")
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder
