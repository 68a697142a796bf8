"""A store with groups of runs that talked: messages, tools, tokens, rewards; and a secret where agents leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    CallId,
    CallStatus,
    GroupId,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object", "properties": {}}},
    }
]
KEY = "gy-" + "k" * 43
SYSTEM = {"role": "system", "content": "You work."}
USER = {"role": "user", "content": "Say water."}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def calls_tool(command: str) -> dict[str, Any]:
    call = {"id": "t1", "name": "bash", "arguments": f'{{"command": "{command}"}}'}
    return says("", reasoning="I look.", tool_calls=[call])


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "t1"}


class Talk:
    """A run as it is recorded: each answer continues the tokens before it."""

    def __init__(self, journal: Journal, run: str, *, group: str | None, member: int = 0) -> None:
        self.journal, self.run, self.at = journal, run, 100.0
        record = RunRecord(
            RunId(run), f"task-{group}", 100.0, GroupId(group) if group else None, member, metadata={"api_key": KEY}
        )
        lane = LaneRecord(LaneId(f"{run}-main"), RunId(run), "main", "main", None, 100.0)
        journal.open_run(record, lane, f"digest-{run}").result()
        self.tokens: list[int] = []
        self.messages: list[dict[str, Any]] = []
        self.number = 0
        self.parent: str | None = None

    def turn(
        self,
        new: list[dict[str, Any]],
        answer: dict[str, Any],
        *,
        tokens: int = 4,
        sampled: list[int] | None = None,
        hosted: bool = False,
        version: int = 0,
    ) -> str:
        """Record a call that adds messages and gets an answer; return its id."""
        name, prompt = self._received(new, hosted)
        ids = [] if hosted else (sampled or [100 + self.number * 7 + n for n in range(tokens)])
        chunk = TokenChunk(0, ids, [-0.5] * len(ids), [VersionSpan(version, 0, len(ids))] if ids else [])
        ended = self.journal.call_ended(
            name, CallStatus.COMPLETE, at=self.at, sampled=chunk, finish_reason="stop", answer=answer
        )
        ended.result()
        self.journal.call_delivered(name).result()
        self.tokens, self.parent = prompt + ids, None if hosted else name
        self.messages = [*self.messages, answer]
        return name

    def fails(self, new: list[dict[str, Any]]) -> None:
        """Record a call that adds messages and ends before there is an answer."""
        name, _ = self._received(new, hosted=False)
        nothing = TokenChunk(0, [], [], [])
        self.journal.call_ended(name, CallStatus.FAILED, at=self.at, sampled=nothing, error="no replica").result()

    def _received(self, new: list[dict[str, Any]], hosted: bool) -> tuple[CallId, list[int]]:
        name = CallId(f"{self.run}-c{self.number}")
        self.number += 1
        self.messages += new
        prompt = [] if hosted else [*self.tokens, *(10 + len(self.tokens) + n for n in range(3))]
        intent = CallIntent(
            call=name,
            run=RunId(self.run),
            lane=LaneId(f"{self.run}-main"),
            role="main",
            parent=CallId(self.parent) if self.parent else None,
            fork_reason=None,
            shared=len(self.tokens) if self.parent and not hosted else 0,
            prompt_ids=prompt,
            sampling=Sampling(),
            request={"dialect": "chat", "body": {"tools": TOOLS, "metadata": {"secret": KEY}}, "hosted": hosted},
            messages=list(self.messages),
            received_at=self.at,
        )
        self.at += 1
        self.journal.call_received(intent).result()
        return name, prompt

    def end(self, reward: float | None) -> None:
        status = RunStatus.COMPLETED if reward is not None else RunStatus.SCORER_ERROR
        self.journal.end_run(RunId(self.run), status, at=self.at, reward=reward).result()


def make_store(path: Path) -> Path:
    """Group g: a (1.0), b (0.5), c (0.0), u (unscored); group flat: two runs with 1.0; h: hosted, outside groups (0.9)."""
    with Journal(path) as journal:
        for member, (run, reward) in enumerate({"a": 1.0, "b": 0.5, "c": 0.0, "u": None}.items()):
            talk = Talk(journal, run, group="g", member=member)
            if run == "c":
                talk.turn([SYSTEM, USER], says("Wine."), sampled=[200, 201])
            else:
                talk.turn([SYSTEM, USER], calls_tool("env"))
                talk.turn([result(f"API={KEY}")], says("Water." if run == "a" else "Water and wine."))
            talk.end(reward)
        for member, run in enumerate(("f0", "f1")):
            talk = Talk(journal, run, group="flat", member=member)
            talk.turn([SYSTEM, USER], says("Water."))
            talk.end(1.0)
        talk = Talk(journal, "h", group=None)
        talk.turn([SYSTEM, USER], calls_tool("ls"), hosted=True)
        talk.turn([result("nothing")], says("Water, said a hosted model."), hosted=True)
        talk.end(0.9)
    return path
