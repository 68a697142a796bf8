"""One run that grows: what it stores per token, what each call costs, and what another agent's stream feels of it."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from proxy import systems
from proxy.load import Lane, headers_of, pause_engine, stream_gaps
from proxy.model import Model, texts

_PAUSE = 5
"""Milliseconds between the chunks of the stream that runs beside the last calls."""
_LAST = 10
"""Calls at the end over which CPU is measured."""


@dataclass
class _Growth:
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the proxy per call."""
    json_loads: list[float] = field(default_factory=list)
    """CPU seconds that parsing the same body takes, per call, with the standard library."""
    msgspec_decode: list[float] = field(default_factory=list)
    """The same with msgspec."""
    wall: list[float] = field(default_factory=list)
    tokens: int = 0
    """Of the last call: prompt and answer."""
    body_bytes: int = 0
    gaps: list[float] = field(default_factory=list)
    """Seconds between chunks of the other stream."""
    gaps_alone: list[float] = field(default_factory=list)
    """The same while the proxy does nothing else."""


def growth(model: Model, engine: str, home: Path, calls: int, step: int) -> dict[str, Any]:
    """Make `calls` calls, each with `step` new tokens; then ten small ones beside another agent's stream.

    CPU is that of the proxy process from before a call until its answer is there and its writes have settled.
    """
    home.mkdir()
    system = systems.gyre(model, engine, home, "--context", str(2 * calls * step + 10_000))
    try:
        lane, other = system.open_lanes(2)
        grown = asyncio.run(_grow(lane, other, engine, system.child.cpu, texts(model, step), calls))
        peak = system.child.peak_bytes()
        system.child.stop()
    finally:
        system.child.kill()
    stored = systems.checkpointed_bytes(home)
    last = slice(calls - min(_LAST, calls // 2), calls)
    first = slice(1, 1 + min(_LAST, calls // 2))

    def above(part: slice) -> float:
        return 1000 * (statistics.fmean(grown.cpu[part]) - statistics.fmean(grown.json_loads[part]))

    return {
        "vocabulary": model.vocabulary,
        "calls": calls,
        "tokens": grown.tokens,
        "body_mib": round(grown.body_bytes / 2**20, 2),
        "stored_bytes": stored,
        "bytes_per_token": round(stored / grown.tokens, 2),
        "cpu_ms_above_json_first": round(above(first), 1),
        "cpu_ms_above_json_last": round(above(last), 1),
        "cpu_ms_last": round(1000 * statistics.fmean(grown.cpu[last]), 1),
        "json_ms_last": round(1000 * statistics.fmean(grown.json_loads[last]), 1),
        "msgspec_ms_last": round(1000 * statistics.fmean(grown.msgspec_decode[last]), 1),
        "wall_ms_last": round(1000 * statistics.fmean(grown.wall[last]), 1),
        "largest_gap_ms": round(1000 * max(grown.gaps), 1),
        "largest_gap_alone_ms": round(1000 * max(grown.gaps_alone), 1),
        "peak_mib": round(peak / 2**20),
    }


async def _grow(lane: Lane, other: Lane, engine: str, cpu: Callable[[], float], new: Any, calls: int) -> _Growth:
    grown = _Growth()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You repair small programs."}]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def call(text: str) -> None:
            messages.append({"role": "user", "content": text})
            body = msgspec.json.encode({"model": "policy", "messages": messages, "max_tokens": 256})
            grown.json_loads.append(_cpu_of(json.loads, body))
            grown.msgspec_decode.append(_cpu_of(msgspec.json.decode, body))
            before, began = cpu(), time.perf_counter()
            async with session.post(
                f"{lane.base_url}/chat/completions", data=body, headers=headers_of(lane)
            ) as response:
                said = await response.read()
                assert response.status == 200, said[:500]
            grown.wall.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
            grown.cpu.append(cpu() - before)
            answer = msgspec.json.decode(said)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            grown.tokens = usage["prompt_tokens"] + usage["completion_tokens"]
            grown.body_bytes = len(body)

        for _ in range(calls):
            await call(next(new))
        await pause_engine(session, engine, _PAUSE)
        for number in range(3):
            grown.gaps_alone += (await stream_gaps(session, other, number))[1:]

        async def watch(stop: asyncio.Event) -> None:
            number = 100
            while not stop.is_set():
                grown.gaps += (await stream_gaps(session, other, number))[1:]
                number += 1

        stop = asyncio.Event()
        watching = asyncio.create_task(watch(stop))
        for number in range(min(_LAST, calls // 2)):
            await call(f"Result {number}: 3 passed, 1 failed.")
        stop.set()
        await watching
        await pause_engine(session, engine, 0)
    return grown


def _cpu_of(parse: Callable[[bytes], Any], body: bytes) -> float:
    began = time.process_time()
    parse(body)
    return time.process_time() - began
