"""Which sequences of events are a stream of the Responses protocol, and what a client makes of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TERMINAL = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
_DONE_TEXT = ("text", "arguments", "input", "diff", "refusal")


class Grammar:
    """Takes events one by one and fails an assertion at the first that may not come there."""

    def __init__(self) -> None:
        self.events = 0
        self.name = ""
        self.open: dict[int, str] = {}
        self.done: dict[int, dict[str, Any]] = {}
        self.parts: set[tuple[str, int]] = set()
        self.texts: dict[tuple[str, str, int], str] = {}
        self.end: dict[str, Any] | None = None
        self.broken = False

    def take(self, event: dict[str, Any]) -> None:
        assert self.end is None, f"{event['type']} after the end"
        assert event.get("sequence_number", self.events) == self.events
        kind = event["type"]
        if self.events == 0:
            assert kind == "response.created"
            self.name = event["response"]["id"]
        self.events += 1
        if "response" in event:
            assert event["response"]["id"] == self.name
        if self.broken:
            assert kind == "response.failed"
        if kind in TERMINAL:
            self._finish(kind, event["response"])
        elif kind == "error":
            self.broken = True
        elif kind == "response.output_item.added":
            assert event["output_index"] == len(self.open) + len(self.done)
            self.open[event["output_index"]] = event["item"]["id"]
        elif kind == "response.output_item.done":
            assert self.open.pop(event["output_index"]) == event["item"]["id"]
            self.done[event["output_index"]] = event["item"]
        elif "item_id" in event:
            self._inside(kind.removeprefix("response."), event)

    def _inside(self, kind: str, event: dict[str, Any]) -> None:
        item, place = event["item_id"], event.get("content_index", event.get("summary_index", 0))
        assert self.open[event["output_index"]] == item
        stem, _, step = kind.rpartition(".")
        key = (item, stem, place)
        if stem.endswith("part"):
            (self.parts.add if step == "added" else self.parts.remove)((item, place))
        elif step == "delta":
            assert not stem.endswith("text") or (item, place) in self.parts
            self.texts[key] = self.texts.get(key, "") + event["delta"]
        elif step == "done":
            [text] = [event[name] for name in _DONE_TEXT if name in event]
            assert self.texts.pop(key, "") == text

    def _finish(self, kind: str, response: dict[str, Any]) -> None:
        self.end = response
        assert response["status"] == TERMINAL[kind]
        assert self.broken <= (kind == "response.failed")
        if kind != "response.failed":
            assert not self.open
            assert not self.parts
            done = [self.done[at] for at in range(len(self.done))]
            assert [_readable(item) for item in response["output"]] == [_readable(item) for item in done]
            usage = response["usage"]
            assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def _readable(item: dict[str, Any]) -> dict[str, Any]:
    """Leave out what OpenAI encrypts anew each time it shows an item."""
    return {key: value for key, value in item.items() if key != "encrypted_content"}


def check(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Check a whole stream; return its final response."""
    grammar = Grammar()
    for event in events:
        grammar.take(event)
    assert grammar.end is not None
    return grammar.end
