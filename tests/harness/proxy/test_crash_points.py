"""kill -9 of the proxy, then of a replica, at 100 random points of runs of 50 calls: promises 1, 2 and 6 each time.

Agents retry as SDKs do. A point is a number of bytes that reached agents, of commits to the store, or of tokens that
engines sampled. When a run has ended, the next one takes over with the points that are left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from crash_kit import SERVICE_KEY, Killable, KillableEngine, KillableProxy, Logged, Template, answer, read_log
from proxy_kit import arguments
from tokenizers import Tokenizer

from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord, CallStatus

POINTS = 100
SEED = 20
LIMIT = 24
"""Tokens per answer at most."""
LANES, TURNS, PAIRS = 4, 10, 5
"""Lanes with a conversation each, and one lane with pairs of parallel calls: 50 calls."""
ANSWERED = (CallStatus.COMPLETE, CallStatus.DELIVERED)


@dataclass
class Vocabulary:
    letters: list[int]
    end: int
    texts: dict[int, str]
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """By prompt, those that were computed before."""

    def text(self, ids: list[int]) -> str:
        return "".join(self.texts[token] for token in ids if token != self.end)

    def answer(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self.answers:
            self.answers[key] = answer(prompt, LIMIT, self.letters, self.end)
        return self.answers[key]


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    letters = {letter: tokenizer.token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz"}
    end = tokenizer.token_to_id("<|im_end|>")
    return Vocabulary(list(letters.values()), end, {token: letter for letter, token in letters.items()})


@dataclass
class Got:
    """What reached an agent for one request, over all its connections."""

    lane: str
    body: dict[str, Any]
    whole: str | None = None
    """The answer, once its end has arrived."""
    name: str = ""
    """Of the answer, as the protocol names it."""
    partial: str = ""
    """Text that the last connection brought before it was cut."""
    tries: int = 0


@dataclass
class Stage:
    """Processes, agents, and the counts that points are made of."""

    proxy: KillableProxy
    engines: list[KillableEngine]
    store: Path
    vocabulary: Vocabulary
    bytes: int = 0
    commits: int = 0
    version: int = 0
    got: list[Got] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    continued: int = 0
    """Attempts that went on from sampled tokens."""
    restarted: int = 0
    """Attempts after the first that began at the start: what was cut had brought nothing."""
    points: int = 0
    """Points at which both were killed."""
    places: list[int] = field(default_factory=list)
    """Answers that agents had in whole when the proxy was killed, kill by kill."""

    def counts(self, watching: sqlite3.Connection | None) -> dict[str, int]:
        if watching is not None:
            [version] = watching.execute("PRAGMA data_version").fetchone()
            self.commits += version != self.version
            self.version = version
        logged = sum(os.stat(engine.log).st_size for engine in self.engines if engine.log.exists())
        return {"bytes": self.bytes, "commits": self.commits, "tokens": logged}


# -- agents ---------------------------------------------------------------------------------------------------------


async def ask(stage: Stage, http: aiohttp.ClientSession, key: str, got: Got) -> str:
    """Ask until the whole answer is there. Answers that are not streamed are retried by the SDK, which says so."""
    while got.whole is None:
        headers = {"Authorization": f"Bearer {key}"}
        if not got.body["stream"]:
            headers["x-stainless-retry-count"] = str(got.tries)
        got.tries += 1
        try:
            async with http.post(f"{stage.proxy.url}/v1/chat/completions", json=got.body, headers=headers) as reply:
                if reply.status >= 500:
                    assert reply.headers["x-should-retry"] == "true", await reply.text()
                    continue
                assert reply.status == 200, await reply.text()
                await (stream(stage, reply, got) if got.body["stream"] else whole(stage, reply, got))
        except aiohttp.ClientError:
            await asyncio.sleep(0.01)
    return got.whole


async def whole(stage: Stage, reply: aiohttp.ClientResponse, got: Got) -> None:
    data = await reply.read()
    stage.bytes += len(data)
    said = json.loads(data)
    [choice] = said["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    got.name, got.whole = said["id"], choice["message"]["content"]


async def stream(stage: Stage, reply: aiohttp.ClientResponse, got: Got) -> None:
    """Read a stream; only its end marker makes the answer whole."""
    got.partial, finish = "", None
    async for line in reply.content:
        stage.bytes += len(line)
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            assert finish in ("stop", "length")
            got.whole = got.partial
            return
        event = json.loads(line[6:])
        if "error" in event:
            assert event["error"]["code"] in ("no_replica", "replicas_failing", "internal_error", "store_failed"), event
            return
        got.name = event["id"]
        for choice in event["choices"]:
            got.partial += choice["delta"].get("content") or ""
            finish = choice.get("finish_reason") or finish


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def converse(stage: Stage, http: aiohttp.ClientSession, access: dict[str, Any], number: int) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        messages.append(user(f"turn {turn} of {number}"))
        body = {"model": "p", "messages": list(messages), "max_tokens": LIMIT, "temperature": 0}
        got = Got(access["lane"], {**body, "stream": (turn + number) % 2 == 0})
        stage.got.append(got)
        said = await ask(stage, http, access["api_key"], got)
        messages.append({"role": "assistant", "content": said})


async def side_by_side(stage: Stage, http: aiohttp.ClientSession, access: dict[str, Any]) -> None:
    for turn in range(PAIRS):
        pair = []
        for side in range(2):
            body = {"model": "p", "messages": [user(f"pair {turn} {side}")], "max_tokens": LIMIT, "temperature": 0}
            pair.append(Got(access["lane"], {**body, "stream": side == 0}))
        stage.got += pair
        await asyncio.gather(*(ask(stage, http, access["api_key"], got) for got in pair))


async def act(stage: Stage) -> str:
    """Carry out a run of 50 calls; give its name."""
    control = {"Authorization": f"Bearer {SERVICE_KEY}"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:

        async def post(path: str, **body: Any) -> dict[str, Any]:
            async with http.post(f"{stage.proxy.url}/gyre/v1{path}", json=body, headers=control) as reply:
                assert reply.status == 200, await reply.text()
                return dict(await reply.json())

        main = await post("/runs", task="t")
        run = main["run"]
        lanes = [await post(f"/runs/{run}/lanes", parent=main["lane"], name=f"s{n}") for n in range(LANES)]
        stage.changed.set()
        await asyncio.gather(
            side_by_side(stage, http, main),
            *(converse(stage, http, access, number) for number, access in enumerate(lanes)),
        )
        return str(run)


# -- the killer -----------------------------------------------------------------------------------------------------


async def reach(stage: Stage, chance: random.Random) -> None:
    """Wait for a random point ahead."""
    kind, steps = chance.choice([("bytes", 800), ("commits", 8), ("tokens", 800)])
    with closing(sqlite3.connect(stage.store)) as watching:
        goal = stage.counts(watching)[kind] + chance.randint(1, steps)
        while stage.counts(watching)[kind] < goal:  # noqa: ASYNC110  processes are watched
            await asyncio.sleep(0.0005)


async def kill(stage: Stage, chance: random.Random, wanted: int) -> None:
    """Kill the proxy and then a replica, at one point after another, and start what was killed again."""
    await stage.changed.wait()
    while stage.points < wanted:
        await reach(stage, chance)
        stage.places.append(sum(got.whole is not None for got in stage.got))
        await strike(stage, stage.proxy)
        await reach(stage, chance)
        await strike(stage, chance.choice(stage.engines))
        stage.points += 1


async def strike(stage: Stage, process: Killable) -> None:
    process.kill()
    check_store(stage)
    await asyncio.shield(asyncio.to_thread(process.start))


def check_store(stage: Stage) -> list[CallRecord]:
    """Promise 1: the store opens as it is, and holds all that reached agents, partial answers included.

    Of promises 2 and 6, what holds at any time: prompts go on from what they follow, and tokens are those of a call that
    nothing disturbed, as far as they go. Returns the calls.
    """
    with closing(sqlite3.connect(stage.store)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with Journal(stage.store, "r") as journal:
        calls = {call.call: call for call in journal.calls()}
    for got in stage.got:
        if not got.name:
            continue
        call = calls[f"c-{got.name.removeprefix('chatcmpl-')}"]
        text = stage.vocabulary.text(call.sampled_ids)
        if got.whole is not None:
            assert call.status in ANSWERED
            assert text == got.whole
        else:
            assert text.startswith(got.partial)
    for call in calls.values():
        undisturbed = stage.vocabulary.answer(call.prompt_ids)
        assert call.sampled_ids == undisturbed[: len(call.sampled_ids)]
        assert len(call.logprobs) == len(call.sampled_ids)
        assert call.sampled_ids == undisturbed or call.status not in ANSWERED
        if call.prompt_ids and call.parent is not None and call.fork_reason is None:
            parent = calls[call.parent]
            before = [*parent.prompt_ids, *parent.sampled_ids]
            assert call.shared == len(before)
            assert call.prompt_ids[: call.shared] == before
    return list(calls.values())


def check_end(stage: Stage, run: str) -> None:
    """Promises 1, 2 and 6 over a whole run."""
    calls = check_store(stage)
    with Journal(stage.store, "r") as journal:
        assert [call.call for call in journal.calls(run)] == [call.call for call in calls]
        attempts = {call.call: journal.attempts(call.call) for call in calls}
    assert len(stage.got) == LANES * TURNS + 2 * PAIRS == 50
    answered = [call for call in calls if call.status in ANSWERED]
    assert sorted(call.call for call in answered) == sorted(
        f"c-{got.name.removeprefix('chatcmpl-')}" for got in stage.got
    )
    assert len(answered) == len(calls) == 50, "no call is sampled twice"
    log = read_log(*(engine.log for engine in stage.engines))
    names = [item.request_id for items in attempts.values() for item in items]
    assert len(names) == len(set(names))
    for call in calls:
        check_attempts(call, attempts[call.call], log)
        stage.continued += sum(item.tokens_from > 0 for item in attempts[call.call])
        stage.restarted += sum(item.tokens_from == 0 for item in attempts[call.call][1:])
    check_paths(calls)


def check_attempts(call: CallRecord, attempts: list[Any], log: dict[str, Logged]) -> None:
    """What is recorded is what engines were sent and sampled, attempt by attempt."""
    assert attempts[-1].end in ("finished", "broken")
    for item in attempts:
        logged = log.get(item.request_id)
        ids = call.sampled_ids[item.tokens_from : item.tokens_to]
        if logged is None:
            assert not ids, "an attempt that no engine has seen brought nothing"
            continue
        assert logged.prompt == [*call.prompt_ids, *call.sampled_ids[: item.tokens_from]]
        assert logged.sampled[: len(ids)] == ids
        if item.end == "finished":
            assert logged.sampled == ids
    assert [item.tokens_from for item in attempts] == [0, *(item.tokens_to for item in attempts[:-1])]
    assert attempts[-1].tokens_to == len(call.sampled_ids)


def check_paths(calls: list[CallRecord]) -> None:
    """Promise 2: each conversation is one path, and no call of it forked."""
    lanes: dict[str, list[CallRecord]] = {}
    for call in calls:
        lanes.setdefault(call.lane, []).append(call)
    conversations = [lane for lane in lanes.values() if len(lane[-1].prompt_ids) > 2 * len(lane[0].prompt_ids)]
    assert len(conversations) == LANES
    for lane in conversations:
        assert [call.parent for call in lane[1:]] == [call.call for call in lane[:-1]]
        assert all(call.fork_reason is None for call in lane)


# -- the test -------------------------------------------------------------------------------------------------------


@contextmanager
def staged(template: Template, model: Path, folder: Path, vocabulary: Vocabulary) -> Iterator[Stage]:
    folder.mkdir()
    facts = (vocabulary.letters, vocabulary.end)
    engines = [KillableEngine(template, folder / f"engine{number}.log", *facts) for number in (0, 1)]
    for engine in engines:
        engine.start()
    store = folder / "s.db"
    proxy = KillableProxy(template, arguments(model, store, *(engine.url for engine in engines)))
    proxy.start()
    try:
        yield Stage(proxy, engines, store, vocabulary)
    finally:
        for process in (proxy, *engines):
            process.kill()


async def play(stage: Stage, chance: random.Random, wanted: int) -> None:
    killer = asyncio.create_task(kill(stage, chance, wanted))
    acting = asyncio.create_task(act(stage))
    try:
        await asyncio.wait([killer, acting], return_when=asyncio.FIRST_COMPLETED)
        if killer.done():
            await killer  # no points left, or a check that failed
        run = await acting
    finally:
        for task in (killer, acting):
            task.cancel()
        await asyncio.gather(killer, acting, return_exceptions=True)
    check_end(stage, run)


@pytest.mark.timeout(600)
def test_kills_at_random_points_of_runs(model: Path, tmp_path: Path, forks: Template, vocabulary: Vocabulary) -> None:
    chance, runs = random.Random(SEED), 0
    points = continued = restarted = 0
    fifths = [0] * 5
    while points < POINTS:
        with staged(forks, model, tmp_path / str(runs), vocabulary) as stage:
            asyncio.run(play(stage, chance, POINTS - points))
        points, runs = points + stage.points, runs + 1
        continued, restarted = continued + stage.continued, restarted + stage.restarted
        for place in stage.places:
            fifths[min(place // 10, 4)] += 1
    assert points == POINTS and runs >= 5, "the points are spread over several runs"
    assert min(fifths) >= POINTS / 20, f"and over the whole of a run: {fifths}"
    assert min(continued, restarted) > POINTS / 10, "kills fell while tokens were sampled, and before"
