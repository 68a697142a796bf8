"""A replica dies with streams on it: how soon the proxy notices, how soon the streams go on elsewhere, and that none fails."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from proxy import systems
from proxy.children import Child
from proxy.load import Lane, ask_streamed, pause_engine, said
from proxy.model import Model
from proxy.stub import STREAMED

KINDS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}
"""What is sent to the replica: its connections break, or nothing comes any more."""
_PAUSE = 100
"""Milliseconds between the tokens of a replica."""
_POLL = 0.01
"""Seconds between looks at the proxy's table of replicas."""
_BEGUN = 2
"""Tokens that every stream has brought when the signal is sent."""
_SPREAD = 0.2
"""Seconds over which the rounds' signals are spread, as they meet the proxy at any moment between two of its looks."""
_LONGEST = 60.0
"""Seconds after which something that should come is given up."""


@dataclass
class _Stream:
    """What an agent saw of one answer."""

    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each of `texts` came, by `time.perf_counter`."""
    problem: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has brought `_BEGUN` tokens, or ended."""


@dataclass
class _Found:
    """Seconds from the signals to what was waited for, and what went wrong."""

    noticed: list[float] = field(default_factory=list)
    next_token: list[float] = field(default_factory=list)
    calls: int = 0
    moved: int = 0
    errors: list[str] = field(default_factory=list)


def death(model: Model, home: Path, rounds: int, streams: int) -> dict[str, Any]:
    """Kill and stop a replica `rounds` times each, with `streams` streams on it and as many on the other one.

    Each replica samples one token over and over, so that an agent's text tells where each token came from. `noticed` ends
    when the proxy's table calls the replica gone, `next_token` when an agent has the first token from the other replica.
    """
    home.mkdir()
    places = _two_words(model)
    words = [_bare(model.pieces[place]) for place in places]
    found = {kind: _Found() for kind in KINDS}
    with ExitStack() as leaving:
        other = systems.start_stub(_saying(model, places[1]))
        leaving.callback(other.kill)
        system = systems.gyre(model, other.greeting["url"], home)
        leaving.callback(system.child.kill)
        for number in range(rounds):
            victim = systems.start_stub(_saying(model, places[0]))
            leaving.callback(victim.kill)
            for kind in ("hang", "kill"):
                lanes = system.open_lanes(2 * streams)
                pair = victim, other.greeting["url"]
                asyncio.run(_round(lanes, *pair, KINDS[kind], _SPREAD * number / rounds, words, found[kind]))
    return {
        "rounds": rounds,
        "streams": streams,
        "calls": sum(one.calls for one in found.values()),
        "moved": sum(one.moved for one in found.values()),
        "errors": sum(len(one.errors) for one in found.values()),
        "first_errors": [error for one in found.values() for error in one.errors][:5],
        "noticed_s": {kind: _summary(one.noticed) for kind, one in found.items()},
        "next_token_s": {kind: _summary(one.next_token) for kind, one in found.items()},
    }


async def _round(
    lanes: Sequence[Lane],
    victim: Child,
    other: str,
    sent: signal.Signals,
    later: float,
    words: list[str],
    found: _Found,
) -> None:
    """Put half of the streams on each replica, send the signal `later` seconds after, wait for all that follows."""
    url = victim.greeting["url"]
    half = len(lanes) // 2
    streams = [_Stream() for _ in lanes]
    timeout = aiohttp.ClientTimeout(total=_LONGEST)
    table = f"{lanes[0].base_url.removesuffix('/v1')}/gyre/v1/replicas"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for engine in (url, other):
            await pause_engine(session, engine, _PAUSE)
        async with asyncio.timeout(_LONGEST), asyncio.TaskGroup() as group:
            for serving, part in (([url], slice(half)), ([url, other], slice(half, None))):
                await _announce(session, table, serving)
                for lane, stream in zip(lanes[part], streams[part], strict=True):
                    group.create_task(_listen(session, lane, stream))
                for stream in streams[part]:
                    await stream.begun.wait()
            await asyncio.sleep(later)
            began = time.perf_counter()
            os.kill(victim.pid, sent)
            await _until_gone(session, table, url)
            found.noticed.append(time.perf_counter() - began)
            await pause_engine(session, other, 0)
        if sent is signal.SIGSTOP:
            os.kill(victim.pid, signal.SIGCONT)
    found.calls += len(streams)
    for stream, moves in zip(streams, [True] * half + [False] * half, strict=True):
        problem = stream.problem or _wrong(stream.texts, words, moves)
        if problem:
            found.errors.append(problem)
        elif moves:
            found.moved += 1
            moved = next(at for at, text in zip(stream.times, stream.texts, strict=True) if words[1] in text)
            found.next_token.append(moved - began)


async def _listen(session: aiohttp.ClientSession, lane: Lane, stream: _Stream) -> None:
    try:
        async with ask_streamed(session, lane, 0) as answer:
            if answer.status != 200:
                stream.problem = f"HTTP {answer.status}: {(await answer.read())[:200]!r}"
                return
            async for line in answer.content:
                if b'"error"' in line:
                    stream.problem = line[:200].decode(errors="replace")
                if text := said(line):
                    stream.texts.append(text)
                    stream.times.append(time.perf_counter())
                if len(stream.texts) >= _BEGUN:
                    stream.begun.set()
    except (aiohttp.ClientError, OSError) as error:
        stream.problem = f"{type(error).__name__}: {error}"
    finally:
        stream.begun.set()


async def _announce(session: aiohttp.ClientSession, table: str, urls: list[str]) -> None:
    body = {"replicas": [{"url": url} for url in urls]}
    async with session.put(table, json=body, headers=systems.SERVICE) as answer:
        answer.raise_for_status()


async def _until_gone(session: aiohttp.ClientSession, table: str, url: str) -> None:
    while True:
        async with session.get(table, headers=systems.SERVICE) as answer:
            replicas = msgspec.json.decode(await answer.read())["replicas"]
        if any((item["url"], item["state"]) == (url, "gone") for item in replicas):
            return
        await asyncio.sleep(_POLL)


def _wrong(texts: list[str], words: Sequence[str], moves: bool) -> str:
    """Say what is wrong with an answer: it has every token, those of the first replica first, if it began there."""
    text, total = _bare("".join(texts)), STREAMED - 1
    first = text.count(words[0])
    if text != words[0] * first + words[1] * (total - first):
        return f"an answer is not whole: {text!r}"
    return "" if (0 < first < total) == moves else f"{first} of {total} tokens of an answer came from the first replica"


def _bare(text: str) -> str:
    """Return a text without spaces: a template takes those around an answer away."""
    return text.replace(" ", "")


def _two_words(model: Model) -> tuple[int, int]:
    """Return the places of two tokens whose texts do not hold one another."""
    first = _bare(model.pieces[0])
    for at, piece in enumerate(model.pieces[:-1]):
        word = _bare(piece)
        if word not in first and first not in word:
            return 0, at
    raise ValueError("the stub's tokens all have one text; give --tokens more")


def _saying(model: Model, place: int) -> Model:
    """Return a model whose stub samples one token over and over."""
    count = len(model.ids) - 1
    return replace(
        model, ids=[model.ids[place]] * count + model.ids[-1:], pieces=[model.pieces[place]] * count + model.pieces[-1:]
    )


def _summary(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3)}
