"""A run in memory for lanes: the real history and a classifier, without sockets, replicas or tokens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_sdk.harness.proxy.dialects import Dialect, ModelRequest
from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall, tools_identity
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.dialects.history import History
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages
from gyre_sdk.harness.proxy.dialects.responses import Responses
from gyre_sdk.harness.proxy.lanes import Asked, Assigned, CallView, Classifier, LaneView
from gyre_sdk.records import MAIN, CallId, LaneId

GOLDEN = Path(__file__).parents[2] / "golden" / "clients"
DIALECTS: dict[str, Dialect] = {
    "/v1/messages": AnthropicMessages(),
    "/v1/responses": Responses(),
    "/v1/chat/completions": ChatCompletions(),
}


@dataclass(frozen=True)
class Line:
    """One request of a recording, parsed as the proxy parses it."""

    run: int
    request: ModelRequest
    headers: Mapping[str, str]
    answer: Message


@dataclass(frozen=True)
class Pending:
    """A call that was asked and not answered."""

    call: CallId
    lane: LaneId
    tools: tuple[dict[str, Any], ...]
    messages: tuple[Message, ...]
    assigned: Assigned


def recording(name: str) -> list[Line]:
    """Return the model requests of a recording of ours, in order."""
    return parsed([json.loads(text) for text in (GOLDEN / f"{name}.jsonl").read_text().splitlines()])


def parsed(lines: Iterable[dict[str, Any]]) -> list[Line]:
    """Return the model requests among a recording's lines."""
    return [_line(line) for line in lines if "answer" in line]


def said(text: str, *calls: ToolCall) -> Message:
    """Return an assistant's message."""
    return Message("assistant", text, tool_calls=calls)


class MemoryRun:
    """What the proxy keeps of a run: its history, lanes and recent calls."""

    def __init__(self, classifier: Classifier) -> None:
        self.lanes: dict[LaneId, LaneView] = {}
        self.parent_calls: dict[LaneId, CallId | None] = {}
        self.reasons: list[str] = []
        self._classifier = classifier
        self._history = History()
        self._calls: list[CallView] = []
        self._count = 0
        self._open(Assigned(None, MAIN, MAIN))

    def exchange(self, line: Line) -> LaneId:
        """Ask and answer at once; return the lane."""
        pending = self.ask(line.request.messages, line.request.tools, line.request.fields, line.headers)
        self.answer(pending, line.answer)
        return pending.lane

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        fields: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Pending:
        """Have a request assigned to a lane."""
        match = self._history.match("", tools, messages)
        asked = Asked(
            tuple(messages),
            tuple(tools),
            fields or {},
            headers=headers or {},
            continues=CallId(match.recorded.call) if match.recorded else None,
            continues_lane=LaneId(match.recorded.lane) if match.recorded else None,
        )
        assigned = self._classifier.assign(asked, list(self.lanes.values()), self._calls)
        self.reasons.append(assigned.reason)
        name = self._open(assigned) if assigned.lane is None else assigned.lane
        lane, self._count = self.lanes[name], self._count + 1
        call = CallId(f"c{self._count}")
        self.lanes[name] = dataclasses.replace(
            lane,
            last_call=call,
            last_used=self._count,
            opening=lane.opening or tuple(messages),
            tools=tools_identity(tools),
            thread=assigned.thread,
        )
        return Pending(call, name, tuple(tools), match.messages, assigned)

    def answer(self, pending: Pending, answer: Message) -> None:
        """Record the answer of a request."""
        self._history.add(
            pending.call, pending.lane, pending.tools, pending.messages, answer, [1], [2], parent=None, shared=0
        )
        self._calls.append(CallView(pending.call, pending.lane, answer.content, answer.tool_calls))
        lane = self.lanes[pending.lane]
        self.lanes[pending.lane] = dataclasses.replace(lane, latest=(*pending.messages, answer))

    def _open(self, assigned: Assigned) -> LaneId:
        name = LaneId(f"l{len(self.lanes)}")
        self.lanes[name] = LaneView(
            name, assigned.role, assigned.name, assigned.parent, thread=assigned.thread, tool_call=assigned.tool_call
        )
        self.parent_calls[name] = assigned.parent_call
        return name


def structure(run: MemoryRun, lanes: Iterable[LaneId]) -> list[tuple[str, str, str | None, str | None]]:
    """Return role, name, parent's name and parent call of lanes."""
    return [
        (
            (lane := run.lanes[name]).role,
            lane.name,
            run.lanes[lane.parent].name if lane.parent else None,
            run.parent_calls[name],
        )
        for name in lanes
    ]


def _line(line: dict[str, Any]) -> Line:
    dialect = DIALECTS[line["path"].partition("?")[0]]
    request = dialect.parse(json.dumps(line["body"]).encode())
    calls = [
        ToolCall(call["id"], call["name"].replace("/", "__"), json.dumps(call["arguments"]))
        for call in line["answer"]["calls"]
    ]
    return Line(line["run"], request, line["headers"], said(line["answer"]["text"], *calls))
