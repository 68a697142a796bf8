"""Lanes of agents that have one key for everything: keeps what a `Classifier` decides by, and opens lanes for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gyre_sdk.harness.proxy.dialects.canonical import Message, ModelRequest, tools_identity
from gyre_sdk.harness.proxy.dialects.history import Match
from gyre_sdk.harness.proxy.lanes import Asked, Assigned, CallView, Classifier, LaneView
from gyre_sdk.records import CallId, LaneId, LaneRecord

_CALLS = 1024
"""Recent calls that a sub-agent's start is looked for in."""


class Sorter:
    """What is known of the lanes under one key. One request at a time, under `lock`."""

    def __init__(self, key: LaneRecord, classifier: Classifier) -> None:
        self.lock = asyncio.Lock()
        self._classifier = classifier
        self._views = {key.lane: LaneView(key.lane, key.role, key.name, key.parent)}
        self._calls: deque[CallView] = deque(maxlen=_CALLS)
        self._asked = 0

    def decide(self, request: ModelRequest, match: Match, headers: Mapping[str, str]) -> Assigned:
        """Return the lane of a request."""
        asked = Asked(
            messages=request.messages,
            tools=request.tools,
            fields=request.fields,
            dialect=request.dialect,
            headers=headers,
            continues=CallId(match.recorded.call) if match.recorded else None,
            continues_lane=LaneId(match.recorded.lane) if match.recorded else None,
        )
        return self._classifier.assign(asked, list(self._views.values()), list(self._calls))

    def knows(self, lane: LaneId) -> bool:
        """Tell whether a lane is under this key."""
        return lane in self._views

    def opened(self, record: LaneRecord, thread: str = "", tool_call: str = "") -> None:
        """Note a lane that was opened under the key."""
        self._views[record.lane] = LaneView(
            record.lane, record.role, record.name, record.parent, thread=thread, tool_call=tool_call
        )

    def asked(
        self,
        lane: LaneId,
        call: CallId,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        thread: str | None = None,
    ) -> None:
        """Note a request of a lane; `thread` None leaves the program's name of the conversation as it is."""
        view, self._asked = self._views[lane], self._asked + 1
        self._views[lane] = replace(
            view,
            last_call=call,
            last_used=self._asked,
            opening=view.opening or tuple(messages),
            tools=tools_identity(tools),
            thread=view.thread if thread is None else thread,
        )

    def answered(self, lane: LaneId, call: CallId, messages: Sequence[Message], answer: Message) -> None:
        """Note the answer of a request, `messages` in the form that is recorded."""
        view = self._views.get(lane)
        if view is not None:
            self._views[lane] = replace(view, latest=(*messages, answer))
            self._calls.append(CallView(call, lane, answer.content, answer.tool_calls))
