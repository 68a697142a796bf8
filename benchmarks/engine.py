"""Sampled tokens per second of the embedded engine, and of vLLM's CPU build in the same run when it is there.

    python benchmarks/engine.py [--model DIR] [--vllm-python .venv-vllm/bin/python] [--seconds 6]

Without --model a random model of the demo's shape is made. Three loads, each at 1, 8 and 32 requests at a time:
`turns` is what agents do (each prompt continues the last one, 150-350 tokens, 12 sampled), `fresh` has unrelated
prompts (150 tokens, 12 sampled), `long` samples 256 tokens from 32. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

LOADS = {"turns": (150, 12), "fresh": (150, 12), "long": (32, 256)}
CONCURRENCY = (1, 8, 32)


def make_demo_model(folder: Path) -> None:
    """Write a random model of the demo's shape."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=704,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            eos_token_id=1,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=1)
    model.save_pretrained(folder)


async def one_call(http: aiohttp.ClientSession, url: str, prompt: list[int], count: int, seed: int) -> list[int]:
    """Stream one request as the proxy does and return its tokens."""
    params = {"temperature": 1.0, "max_tokens": count, "ignore_eos": True, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": params, "stream": True, "request_id": f"bench-{seed}"}
    ids: list[int] = []
    async with http.post(f"{url}/inference/v1/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ids += choice["token_ids"]
    assert len(ids) == count, f"{len(ids)} of {count} tokens came back"
    return ids


async def tokens_per_second(url: str, load: str, concurrency: int, seconds: float) -> float:
    """Keep `concurrency` requests running for a while; count tokens of requests that ended inside it."""
    length, count = LOADS[load]
    done, end, numbers = 0, 0.0, iter(range(10**9))

    async def worker(http: aiohttp.ClientSession, rng: random.Random) -> None:
        nonlocal done
        history: list[int] = []
        while time.monotonic() < end:
            if load != "turns" or len(history) > 350:
                history = []
            fresh = 40 if history else length
            history = history + [rng.randrange(2, 700) for _ in range(fresh)]
            history += await one_call(http, url, history, count, next(numbers))
            done += count

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as http:
        await one_call(http, url, list(range(2, 2 + length)), count, next(numbers))
        start = time.monotonic()
        end = start + seconds
        async with asyncio.TaskGroup() as group:
            for i in range(concurrency):
                group.create_task(worker(http, random.Random(i)))
        return done / (time.monotonic() - start)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(command: list[str], port: int, cwd: str, env: dict[str, str]) -> Iterator[str]:
    """Run a server until /health answers; end it afterwards."""
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **env}, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + 300
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=2).close()
                    break
                except (urllib.error.URLError, OSError):
                    if process.poll() is not None or time.monotonic() > deadline:
                        output.seek(0)
                        sys.exit(f"{command[0]} did not start:\n{output.read()[-2000:].decode(errors='replace')}")
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def measure(name: str, command: list[str], port: int, seconds: float, env: dict[str, str]) -> dict[str, float]:
    """Print and return tokens/s for every load and concurrency."""
    out = {}
    with serving(command, port, tempfile.gettempdir(), env) as url:
        for load in LOADS:
            for concurrency in CONCURRENCY:
                rate = asyncio.run(tokens_per_second(url, load, concurrency, seconds))
                out[f"{load}/{concurrency}"] = round(rate, 1)
                print(f"{name:9s} {load:6s} {concurrency:3d} requests: {rate:8.0f} sampled tokens/s", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder; default: a random one of the demo's shape")
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--seconds", type=float, default=6.0, help="per measurement")
    parser.add_argument("--engine-arg", action="append", default=[], help="passed on to the embedded engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model
        if model is None:
            model = Path(scratch) / "model"
            make_demo_model(model)
        model, port = model.resolve(), free_port()
        root = str(Path(__file__).resolve().parent.parent)
        results = {
            "embedded": measure(
                "embedded",
                [
                    sys.executable,
                    "-m",
                    "gyre_sdk.trainer.engines.embedded",
                    "--model",
                    str(model),
                    "--port",
                    str(port),
                    *options.engine_arg,
                ],
                port,
                options.seconds,
                {"PYTHONPATH": root},
            )
        }
        python = options.vllm_python.absolute()  # not resolve(): a venv is found through the link's own place
        if python.exists():
            port = free_port()
            skip = [] if (model / "tokenizer.json").exists() else ["--skip-tokenizer-init"]
            results["vllm"] = measure(
                "vllm",
                [
                    str(python),
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    "--model",
                    str(model),
                    "--port",
                    str(port),
                    "--enable-scale-out",
                    "--logprobs-mode",
                    "processed_logprobs",
                    "--dtype",
                    "float32",
                    *skip,
                ],
                port,
                options.seconds,
                {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1"},
            )
            results["ratio"] = {
                key: round(value / results["vllm"][key], 2) for key, value in results["embedded"].items()
            }
            for key, ratio in results["ratio"].items():
                print(f"embedded / vllm {key:9s}: {ratio:.2f}")
        else:
            print(f"vLLM: not measured, {python} is not there")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
