"""A tiny random model, and real engine processes on free ports with a client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB, CONTEXT, EOS = 320, 256, 1


def make_model(folder: Path, seed: int, **changes: Any) -> Any:
    """Write a random Qwen3 (grouped heads, tied head) whose greedy outputs vary."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "eos_token_id": EOS,
    }
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**settings, **changes})).eval()
    model.generation_config = transformers.GenerationConfig(eos_token_id=EOS)
    model.save_pretrained(folder)
    return model


@dataclass
class Answer:
    """One generation, streamed or not."""

    ids: list[int]
    logprobs: list[float]
    reason: str
    stop_reason: Any
    spans: list[tuple[str, int, int]]
    chunks: list[dict[str, Any]]


@dataclass
class Engine:
    """A client of one engine process."""

    url: str
    process: subprocess.Popen[str]
    request_log: Path

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 60) -> Any:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        return urllib.request.urlopen(request, timeout=timeout)

    def call(self, path: str, body: Any = None) -> tuple[int, Any]:
        """POST and return (status, JSON)."""
        try:
            with self.post(path, body) as response:
                text = response.read()
                return response.status, json.loads(text) if text else None
        except urllib.error.HTTPError as err:
            return err.code, json.loads(err.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def generate(
        self,
        prompt: list[int],
        *,
        stream: bool = False,
        on_chunk: Callable[[dict[str, Any]], None] | None = None,
        request: dict[str, Any] | None = None,
        **params: Any,
    ) -> Answer:
        """Generate, greedily unless told otherwise, and read the whole answer."""
        body = {"token_ids": prompt, "sampling_params": {"temperature": 0, "logprobs": 0, **params}, "stream": stream}
        with self.post("/inference/v1/generate", body | (request or {})) as response:
            if not stream:
                chunks = [json.loads(response.read())]
            else:
                lines = []
                for raw in response:
                    if line := raw.decode().strip():
                        lines.append(line)
                        if on_chunk is not None and line != "data: [DONE]":
                            on_chunk(json.loads(line[6:]))
                assert lines[-1] == "data: [DONE]"
                chunks = [json.loads(line[6:]) for line in lines[:-1]]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        last = choices[-1]
        assert all(choice["weight_versions"] is None for choice in choices[:-1])
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert [entry["token_id"] for entry in content] == ids
        return Answer(
            ids,
            [entry["logprob"] for entry in content],
            last["finish_reason"],
            last["stop_reason"],
            [(s["version"], s["start"], s["end"]) for s in last["weight_versions"]],
            chunks,
        )

    def load_weights(self, path: Path, version: str) -> None:
        for route, body in (
            ("init_weight_transfer_engine", {"init_info": {}}),
            ("start_weight_update", None),
            ("update_weights", {"update_info": {"path": str(path)}}),
            ("finish_weight_update", {"weight_version": version}),
        ):
            assert self.call(f"/{route}", body)[0] == 200


@contextmanager
def running_engine(folder: Path, log: Path, *options: str) -> Iterator[Engine]:
    command = [
        sys.executable,
        "-m",
        "gyre_sdk.trainer.engines.embedded",
        "--model",
        str(folder),
        "--port",
        "0",
        "--request-log",
        str(log),
        *options,
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        line = process.stdout.readline()
        watchdog.cancel()
        match = re.fullmatch(r"gyre-engine ready on (http://127\.0\.0\.1:\d+) version=(\S+)\n", line)
        assert match, f"not a ready line: {line!r}"
        yield Engine(match[1], process, log)
    finally:
        process.terminate()
        process.wait(15)
        process.stdout.close()
