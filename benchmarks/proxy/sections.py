"""What is measured: throughput, what a kill leaves, latency at one connection, a thousand agents. Growth is in `growth`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from proxy import systems
from proxy.load import Lane, Load, converse, driven, headers_of, over, pause_engine, stream_gaps
from proxy.model import Model
from proxy.systems import BOTH, OURS, WORKERS, System

CONNECTIONS, TURNS = 32, 4
DIRECT = "engine"


def throughput(running: list[System], rounds: int, seconds: float, brief: str) -> dict[str, Any]:
    """Measure calls/s at 32 connections in interleaved rounds of `seconds` per system.

    The number of calls of a round follows from the rate before it; runs are opened outside the timed part. `brief` is text
    that every conversation starts with, the same in all.
    """
    rates: dict[str, list[float]] = {system.name: [] for system in running}
    cpu: dict[str, list[float]] = {system.name: [] for system in running}
    p50: dict[str, list[float]] = {system.name: [] for system in running}
    errors: list[str] = []
    expected = {system.name: _round(system, CONNECTIONS, brief, errors)[0].rate for system in running}
    for number in range(rounds):
        for system in running[number % len(running) :] + running[: number % len(running)]:
            count = max(CONNECTIONS, round(expected[system.name] * seconds / TURNS / CONNECTIONS) * CONNECTIONS)
            load, used = _round(system, count, brief, errors)
            rates[system.name].append(load.rate)
            cpu[system.name].append(1000 * used / max(1, len(load.times)))
            p50[system.name].append(1000 * statistics.median(load.times or [0.0]))
            expected[system.name] = load.rate
    names = [system.name for system in running]
    medians = {name: statistics.median(rates[name]) for name in names}
    return {
        "connections": CONNECTIONS,
        "turns": TURNS,
        "calls_per_second": _rounded(medians),
        "rounds": {name: [round(rate, 1) for rate in rates[name]] for name in names},
        "p50_ms": _rounded({name: statistics.median(p50[name]) for name in names}),
        "cpu_ms_per_call": _rounded({name: statistics.median(cpu[name]) for name in names}),
        "gyre_over": _rounded({name: medians[OURS] / medians[name] for name in names if name != OURS}),
        "workers_over": _rounded({name: medians[WORKERS] / medians[name] for name in names if name != WORKERS}),
        "errors": errors[:5],
    }


def killed(running: Sequence[System], calls: int) -> dict[str, Any]:
    """Answer `calls` calls through each system, SIGKILL it, and count what its disk holds."""
    found: dict[str, Any] = {}
    for system in running:
        before = system.stored()
        lanes = system.open_lanes(calls // TURNS)
        load = driven(lanes, CONNECTIONS, TURNS)
        system.child.kill()
        kept = system.stored() - before
        found[system.name] = {"answered": len(load.times), "on_disk": kept, "errors": load.errors[:3]}
    return found


def latency(running: Sequence[System], engine: str, calls: int, streams: int) -> dict[str, Any]:
    """Measure, one connection and one call at a time, what each system adds to the engine itself.

    Calls alternate over the systems; `ttft` is the time to the first text of a streamed answer of 64 chunks that the
    engine sends at once, `ttft_paced` of one that it sends 1 ms apart.
    """
    names = [DIRECT, *(system.name for system in running)]
    lanes = {system.name: system.open_lanes(calls // TURNS + 4) for system in running}
    lanes[DIRECT] = [Lane(f"{engine}/v1", "none")] * len(next(iter(lanes.values())))
    ours = [lane for name in BOTH for lane in lanes.get(name, ())]
    whole, streamed, errors = asyncio.run(_serial(names, lanes, engine, calls, streams))
    systems.end_runs(ours)
    result: dict[str, Any] = {"p50_ms": _rounded({name: 1000 * statistics.median(whole[name]) for name in names})}
    result["added_p50_ms"] = _added(whole, names)
    for kind, times in streamed.items():
        result[f"{kind}_p50_ms"] = _rounded({name: 1000 * statistics.median(times[name]) for name in names})
        result[f"added_{kind}_ms"] = _added(times, names)
    result["errors"] = errors[:5]
    return result


def agents(model: Model, engine: str, home: Path, count: int, calls: int) -> dict[str, Any]:
    """Connect `count` agents at once, each with a run and a connection of its own, and have each make its calls."""
    home.mkdir()
    system = systems.gyre(model, engine, home)
    try:
        lanes = system.open_lanes(count)
        before = system.child.peak_bytes()
        load = asyncio.run(_crowd(lanes, calls))
        peak = system.child.peak_bytes()
        system.child.kill()
    finally:
        system.child.kill()
    return {
        "agents": count,
        "answered": len(load.times),
        "on_disk": system.stored(),
        "errors": len(load.errors),
        "first_errors": load.errors[:3],
        "calls_per_second": round(load.rate, 1),
        "slowest_s": round(max(load.times, default=0.0), 2),
        "idle_mib": round(before / 2**20),
        "peak_mib": round(peak / 2**20),
    }


def _round(system: System, lanes: int, brief: str, errors: list[str]) -> tuple[Load, float]:
    """Drive one round; return what came of it and the CPU seconds of the system's processes."""
    opened = system.open_lanes(lanes)
    before = system.child.cpu()
    load = driven(opened, CONNECTIONS, TURNS, brief)
    used = system.child.cpu() - before
    errors += [f"{system.name}: {text}" for text in load.errors]
    if system.name in BOTH:
        systems.end_runs(opened)
    return load, used


async def _serial(
    names: list[str], lanes: dict[str, list[Lane]], engine: str, calls: int, streams: int
) -> tuple[dict[str, list[float]], dict[str, dict[str, list[float]]], list[str]]:
    whole: dict[str, list[float]] = {name: [] for name in names}
    streamed: dict[str, dict[str, list[float]]] = {
        kind: {name: [] for name in names} for kind in ("ttft", "ttft_paced")
    }
    errors: list[str] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60)) as session:
        for _ in range(calls // TURNS):
            for name in names:
                load = Load()
                await converse(over(session), lanes[name].pop(), TURNS, load)
                whole[name] += load.times
                errors += [f"{name}: {text}" for text in load.errors]
        for kind, pause in (("ttft", 0), ("ttft_paced", 1)):
            await pause_engine(session, engine, pause)
            for number in range(streams):
                for name in names:
                    gaps = await stream_gaps(session, lanes[name][-1], number + 1000 * pause)
                    streamed[kind][name].append(gaps[0])
        await pause_engine(session, engine, 0)
    return whole, streamed, errors


async def _crowd(lanes: Sequence[Lane], calls: int) -> Load:
    """Open a connection per lane, wait until all are open, then let each make its calls."""
    load, ready, open_ = Load(), asyncio.Event(), 0

    async def agent(lane: Lane) -> None:
        nonlocal open_
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=300)
        async with aiohttp.ClientSession(connector=connector) as session:
            try:
                async with session.get(f"{lane.base_url}/models", headers=headers_of(lane)) as answer:
                    await answer.read()
            except aiohttp.ClientError as error:
                load.errors.append(f"could not connect: {error}")
            open_ += 1
            if open_ == len(lanes):
                ready.set()
            await ready.wait()
            await converse(over(session), lane, calls, load)

    async with asyncio.TaskGroup() as group:
        for lane in lanes:
            group.create_task(agent(lane))
        await ready.wait()
        began = time.perf_counter()
    load.seconds = time.perf_counter() - began
    return load


def _added(times: dict[str, list[float]], names: list[str]) -> dict[str, float]:
    base = statistics.median(times[DIRECT])
    return _rounded({name: 1000 * (statistics.median(times[name]) - base) for name in names if name != DIRECT})


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3 if value < 100 else 1) for name, value in values.items()}
