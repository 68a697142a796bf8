"""OpenAI responses: the events of a streamed answer.

One item is open at a time. It closes when the next one begins or the answer ends, so the last item closes knowing
whether the answer was cut. A call of a custom tool or of the shell is held until it is whole: only then is it known
whether its own form can hold what the model wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects import AnswerStream, Choice, TokenText
from gyre_sdk.harness.proxy.dialects.canonical import Delta, ModelRequest, Part, ToolCall
from gyre_sdk.harness.proxy.dialects.responses.answer import (
    error_object,
    item_status,
    message_item,
    reasoning_item,
    response_object,
    text_part,
    usage_of,
)
from gyre_sdk.harness.proxy.dialects.responses.logprobs import TokenFinder, shown_token
from gyre_sdk.harness.proxy.dialects.responses.request import WITH_SEALED, included
from gyre_sdk.harness.proxy.dialects.responses.tools import Kind, call_item, tools_of
from gyre_sdk.harness.proxy.sse import SseEvent, encode_event

_encode = msgspec.json.Encoder().encode


class ResponseStream(AnswerStream):
    """Events of a streamed response."""

    def __init__(self, request: ModelRequest, name: str, at: float) -> None:
        self._request, self._name, self._at = request, name, at
        self._tools = tools_of(request.fields)
        self._sealed = included(request.fields, WITH_SEALED)
        self._events = 0
        self._out: list[bytes] = []
        self._items: list[dict[str, Any]] = []
        self._begun = {Part.REASONING: 0, Part.CONTENT: 0, Part.CALL: 0}
        self._part: Part | None = None
        """Kind of the open item."""
        self._item_id = ""
        self._texts: list[str] = []
        self._call = ToolCall("", "")
        self._found: list[TokenText] = []
        self._tokens = TokenFinder()
        self._waiting: list[Delta] = []
        """Deltas whose tokens have not come yet, where the request asked for log-probs."""
        self._status = "in_progress"
        self._reasoning_tokens = 0
        self._cached_tokens: int | None = None

    def start(self, prompt_tokens: int) -> bytes:
        """See `AnswerStream.start`."""
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, response=self._response("in_progress"))
        return self._flush()

    def deltas(self, index: int, deltas: Sequence[Delta], tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.deltas`."""
        self._waiting += deltas
        if self._request.logprobs and not tokens:
            return b""
        self._tokens.add(tokens)
        self._take()
        return self._flush()

    def finish(self, index: int, choice: Choice, tokens: Sequence[TokenText] = ()) -> bytes:
        """See `AnswerStream.finish`."""
        self._tokens.add(tokens)
        self._take()
        if self._part is None and not self._items:
            self._open(Part.CONTENT)
        self._status, self._reasoning_tokens = item_status(choice), choice.reasoning_tokens
        self._cached_tokens = choice.cached_tokens
        self._close(self._status)
        return self._flush()

    def end(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """See `AnswerStream.end`."""
        usage = usage_of(prompt_tokens, completion_tokens, self._reasoning_tokens, self._cached_tokens)
        response = response_object(self._request, self._name, self._at, self._status, self._items, usage)
        self._emit(f"response.{self._status}", response=response)
        return self._flush()

    def error(self, error: ProtocolError) -> bytes:
        """See `AnswerStream.error`. Clients look for one of two events; both are given."""
        head = b"" if self._events else self.start(0)
        found = error_object(error)
        flat = {key: found[key] for key in ("code", "message", "param")}
        self._emit("error", **flat, error=found)
        response = response_object(self._request, self._name, self._at, "failed", self._items, error=error)
        self._emit("response.failed", response=response)
        return head + self._flush()

    # -- items -------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        deltas, self._waiting = self._waiting, []
        for delta in deltas:
            if delta.part is Part.ARGUMENTS:
                self._arguments(delta.text)
            elif delta.call is not None:
                self._open(Part.CALL, delta.call)
                self._arguments(delta.call.arguments)
            elif delta.text:
                if self._part is not delta.part:
                    self._open(delta.part)
                self._text(delta.text)

    def _open(self, part: Part, call: ToolCall | None = None) -> None:
        """Close the open item and begin one."""
        self._close("completed")
        place, self._begun[part] = self._begun[part], self._begun[part] + 1
        self._part, self._texts, self._found = part, [], []
        self._item_id = f"{self._name}_{place}"
        if call is not None:
            self._call = ToolCall(call.id, call.name)
            if not self._held():
                self._added(call_item(self._call, self._tools.get(call.name), self._item_id, "in_progress"))
        elif part is Part.REASONING:
            self._item_id = f"rs_{self._item_id}"
            self._added(reasoning_item(self._item_id, "", "in_progress", sealed=False))
            self._content("response.content_part.added", part={"type": "reasoning_text", "text": ""})
        else:
            self._item_id = f"msg_{self._item_id}"
            self._added(message_item(self._item_id, None, "in_progress"))
            self._content("response.content_part.added", part=text_part(""))

    def _text(self, text: str) -> None:
        self._texts.append(text)
        if self._part is Part.REASONING:
            self._content("response.reasoning_text.delta", delta=text)
            return
        tokens = self._tokens.take(text) if self._request.logprobs else ()
        self._found += tokens
        self._content("response.output_text.delta", delta=text, logprobs=[shown_token(token) for token in tokens])

    def _arguments(self, text: str) -> None:
        if text:
            self._texts.append(text)
            if not self._held():
                self._of_item("response.function_call_arguments.delta", f"fc_{self._item_id}", delta=text)

    def _held(self) -> bool:
        tool = self._tools.get(self._call.name)
        return tool is not None and tool.kind is not Kind.FUNCTION

    def _close(self, status: str) -> None:
        """End the open item, if there is one."""
        part, text = self._part, "".join(self._texts)
        self._part = None
        if part is Part.CALL:
            self._close_call(text, status)
        elif part is Part.REASONING:
            item = reasoning_item(self._item_id, text, status, sealed=self._sealed)
            self._content("response.reasoning_text.done", text=text)
            self._content("response.content_part.done", part={"type": "reasoning_text", "text": text})
            self._done(item)
        elif part is Part.CONTENT:
            item = message_item(self._item_id, text, status, self._found)
            [shown] = item["content"]
            self._content("response.output_text.done", text=text, logprobs=shown["logprobs"])
            self._content("response.content_part.done", part=shown)
            self._done(item)

    def _close_call(self, arguments: str, status: str) -> None:
        call = ToolCall(self._call.id, self._call.name, arguments)
        item = call_item(call, self._tools.get(call.name), self._item_id, status)
        if self._held():
            empty: dict[str, Any] = {key: "" for key in ("input", "arguments") if key in item}
            self._added({**item, **empty, "status": "in_progress"})
            if item["type"] == "custom_tool_call":
                if item["input"]:
                    self._of_item("response.custom_tool_call_input.delta", item["id"], delta=item["input"])
                self._of_item("response.custom_tool_call_input.done", item["id"], input=item["input"])
            elif item["type"] == "function_call" and arguments:
                self._of_item("response.function_call_arguments.delta", item["id"], delta=arguments)
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": arguments}
            self._of_item("response.function_call_arguments.done", item["id"], **done)
        self._done(item)

    # -- events ------------------------------------------------------------------------------------------------------

    def _added(self, item: dict[str, Any]) -> None:
        self._emit("response.output_item.added", output_index=len(self._items), item=item)

    def _done(self, item: dict[str, Any]) -> None:
        self._emit("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)

    def _content(self, kind: str, **more: Any) -> None:
        self._of_item(kind, self._item_id, content_index=0, **more)

    def _of_item(self, kind: str, item_id: str, **more: Any) -> None:
        self._emit(kind, item_id=item_id, output_index=len(self._items), **more)

    def _emit(self, kind: str, **more: Any) -> None:
        event = {"type": kind, "sequence_number": self._events, **more}
        self._events += 1
        self._out.append(encode_event(SseEvent(_encode(event), kind)))

    def _flush(self) -> bytes:
        out, self._out = b"".join(self._out), []
        return out

    def _response(self, status: str) -> dict[str, Any]:
        return response_object(self._request, self._name, self._at, status)
