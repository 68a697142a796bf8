"""What recording costs: calls through the proxy against calls straight to a scripted engine, in interleaved rounds.

    python benchmarks/proxy.py [--connections 32] [--calls 2000] [--rounds 3] [--tokens 32] [--turns 4]

Engine, proxy and load generator are processes of their own. Prints one JSON object: medians over rounds of calls/s and
p50 latency, CPU time per call of the proxy process, and the rate at which the disk syncs, which bounds serial calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def make_model(folder: Path) -> Path:
    """Write a tokenizer: bytes and Qwen3's control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in _PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def engine(pipe: Any, tokens: int, chunk: int, end: int) -> None:
    """Serve `tokens` fixed tokens, `chunk` at a time, and a stop."""
    ids = [(97 - 33) + at % 20 for at in range(tokens - 1)] + [end]

    def event(part: list[int], last: bool) -> bytes:
        choice = {
            "index": 0,
            "token_ids": part,
            "logprobs": {"content": [{"token_id": i, "logprob": -1.5, "rank": 1, "top_logprobs": []} for i in part]},
            "finish_reason": "stop" if last else None,
            "stop_reason": None,
            "weight_versions": [{"version": "1", "start": 0, "end": tokens}] if last else None,
        }
        return b"data: " + json.dumps({"request_id": "x", "choices": [choice]}).encode() + b"\n\n"

    parts = [ids[at : at + chunk] for at in range(0, tokens, chunk)]
    events = [event(part, part is parts[-1]) for part in parts]

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for item in events:
            await response.write(item)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", health)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(serve())


def proxy(pipe: Any, model: Path, store: Path, url: str, profile: str) -> None:
    """Serve; answer `cpu` on the pipe with this process's CPU seconds."""
    import threading

    from gyre_sdk.harness.proxy.routing import ReplicaSpec
    from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings

    server = ProxyServer(ProxySettings(store=store, model=model, replicas=(ReplicaSpec(url, 1),), service_key="key"))

    def answer() -> None:
        while pipe.recv() == "cpu":
            pipe.send(time.process_time())
        server.stop()

    def started(address: str) -> None:
        pipe.send(address)
        threading.Thread(target=answer, daemon=True).start()

    if profile:
        import cProfile

        cProfile.runctx(
            "asyncio.run(server.serve(started))", {"asyncio": asyncio}, {"server": server, "started": started}, profile
        )
    else:
        asyncio.run(server.serve(started))


async def direct(url: str, connections: int, calls: int, prompt: list[int]) -> list[float]:
    """Ask the engine itself; give latencies."""
    body = json.dumps({"token_ids": prompt, "sampling_params": {}, "stream": True}).encode()
    times: list[float] = []

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def agent() -> None:
            for _ in range(calls // connections):
                began = time.perf_counter()
                async with session.post(f"{url}/inference/v1/generate", data=body) as answer:
                    await answer.read()
                times.append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(agent())
    return times


async def recorded(url: str, connections: int, calls: int, turns: int, stream: bool) -> list[float]:
    """Ask through the proxy, in runs of `turns` calls that build on each other; give latencies."""
    times: list[float] = []
    guard = {"Authorization": "Bearer key"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def agent() -> None:
            for _ in range(max(1, calls // connections // turns)):
                async with session.post(f"{url}/gyre/v1/runs", json={"task": "bench"}, headers=guard) as answer:
                    access = await answer.json()
                headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
                messages = [
                    {"role": "system", "content": "You repair small programs. Answer with one command."},
                    {"role": "user", "content": "The test in tests/test_parser.py fails. Find out why and repair it."},
                ]
                for turn in range(turns):
                    body = json.dumps({"model": "policy", "messages": messages, "stream": stream}).encode()
                    began = time.perf_counter()
                    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
                        said = await answer.read()
                        assert answer.status == 200, said
                    times.append(time.perf_counter() - began)
                    if not stream:
                        messages.append(json.loads(said)["choices"][0]["message"])
                        messages.append({"role": "user", "content": f"Result {turn}: 3 passed, 1 failed"})
                await session.post(
                    f"{url}/gyre/v1/runs/{access['run']}/end", json={"status": "completed"}, headers=guard
                )

        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(agent())
    return times


def syncs_per_second(folder: Path) -> float:
    """Append 4 KiB and fsync, for half a second."""
    count, began = 0, time.perf_counter()
    with (folder / "sync").open("wb") as file:
        while time.perf_counter() - began < 0.5:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            count += 1
    return count / (time.perf_counter() - began)


def main() -> None:
    """Run the rounds and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--calls", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=1, help="tokens per event of the engine")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--profile", default="", help="write a cProfile of the proxy's event loop here")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows: dict[str, list[float]] = {
        name: [] for name in ("direct", "proxy", "p50_direct_ms", "p50_ms", "p50_one_ms", "cpu_ms")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder)
        end = Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id("<|im_end|>")
        here, there = context.Pipe()
        served = context.Process(target=engine, args=(there, options.tokens, options.chunk, end), daemon=True)
        served.start()
        engine_url = here.recv()
        mine, its = context.Pipe()
        process = context.Process(target=proxy, args=(its, model, folder / "store.db", engine_url, options.profile))
        process.start()
        url = mine.recv()

        def cpu() -> float:
            mine.send("cpu")
            return float(mine.recv())

        asyncio.run(recorded(url, 4, 64, options.turns, options.stream))
        for _ in range(options.rounds):
            began = time.perf_counter()
            times = asyncio.run(direct(engine_url, options.connections, options.calls, list(range(64)) * 3))
            rows["direct"].append(len(times) / (time.perf_counter() - began))
            rows["p50_direct_ms"].append(1000 * statistics.median(times))
            before, began = cpu(), time.perf_counter()
            times = asyncio.run(recorded(url, options.connections, options.calls, options.turns, options.stream))
            rows["proxy"].append(len(times) / (time.perf_counter() - began))
            rows["cpu_ms"].append(1000 * (cpu() - before) / len(times))
            rows["p50_ms"].append(1000 * statistics.median(times))
            rows["p50_one_ms"].append(
                1000 * statistics.median(asyncio.run(recorded(url, 1, 60, options.turns, options.stream)))
            )
        result = {name: round(statistics.median(values), 2) for name, values in rows.items()}
        result["syncs_per_second"] = round(syncs_per_second(folder))
        mine.send("stop")
        process.join(20)
        served.terminate()
        result["calls"] = options.calls
        result["store_bytes"] = (folder / "store.db").stat().st_size
    print(json.dumps(result))


if __name__ == "__main__":
    main()
