"""One conversation in any protocol: chat messages to each protocol's body, each protocol's answer to one form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
from messages_kit import check_grammar, events_of
from proxy_kit import Proxy, sse

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "incomplete": "length",
}


@dataclass
class Seen:
    """What an agent sees of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Each with id, name and arguments as text."""
    finish: str | None = None
    """`stop`, `length` or `tool_calls`; None where the answer has no good end."""
    error: str | None = None
    prompt_tokens: int = 0
    name: str = ""
    """Id of the answer."""

    def message(self) -> dict[str, Any]:
        """Return it as a chat message."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        if self.calls:
            said["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in self.calls
            ]
        return said


def body_of(protocol: str, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the request body of a protocol for chat messages and chat's names of fields."""
    tools = [tool["function"] for tool in more.pop("tools", ())]
    body: dict[str, Any] = {"model": "policy", **more}
    if protocol == "chat":
        shown = [{"type": "function", "function": tool} for tool in tools]
        return body | {"messages": messages} | ({"tools": shown} if tools else {})
    limit = body.pop("max_tokens", None)
    if protocol == "messages":
        stop = body.pop("stop", None)
        shown = [{"input_schema" if key == "parameters" else key: tool[key] for key in tool} for tool in tools]
        system = [item["content"] for item in messages if item["role"] == "system"]
        body |= {"max_tokens": limit or 1024, "messages": _blocks(messages)}
        body |= {"stop_sequences": stop} if stop else {}
        body |= {"system": "\n".join(system)} if system else {}
    else:
        shown = [{"type": "function", **tool} for tool in tools]
        body |= {"input": _items(messages)} | ({"max_output_tokens": limit} if limit else {})
    return body | ({"tools": shown} if tools else {})


def _blocks(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user":
            found.append({"role": "user", "content": message["content"]})
        elif message["role"] == "assistant":
            blocks: list[dict[str, Any]] = []
            if message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"})
            if message.get("content"):
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls") or ():
                given = json.loads(call["function"]["arguments"] or "{}")
                blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
            found.append({"role": "assistant", "content": blocks})
        elif message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if found and isinstance(found[-1]["content"], list) and found[-1]["role"] == "user":
                found[-1]["content"].append(result)
            else:
                found.append({"role": "user", "content": [result]})
    return found


def _items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
            )
            continue
        if message.get("reasoning_content"):
            text = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
            items.append({"type": "reasoning", "summary": [], "content": text})
        if message.get("content"):
            items.append({"role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def send(proxy: Proxy, access: dict[str, Any], protocol: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    """Send a body as plain HTTP."""
    key = (
        {"x-api-key": access["api_key"]} if protocol == "messages" else {"Authorization": f"Bearer {access['api_key']}"}
    )
    return proxy.http.post(PATHS[protocol], json=body, headers={**key, **headers})


def say(proxy: Proxy, access: dict[str, Any], protocol: str, messages: list[dict[str, Any]], **more: Any) -> Seen:
    """Ask, and read the answer, which must be good."""
    answer = send(proxy, access, protocol, body_of(protocol, messages, **more))
    assert answer.status_code == 200, answer.text
    seen = read(protocol, answer)
    assert seen.error is None and seen.finish is not None, answer.text
    return seen


def read(protocol: str, answer: httpx.Response) -> Seen:
    """Return what an answer says, streamed or not."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    if not streamed:
        body = answer.json()
        if answer.status_code != 200:
            return Seen(error=body["error"]["message"])
        return {"chat": _chat, "messages": _message, "responses": _response}[protocol](body)
    return {"chat": _chat_stream, "messages": _message_stream, "responses": _response_stream}[protocol](answer)


def _chat(body: dict[str, Any]) -> Seen:
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    seen = Seen(message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"])
    seen.prompt_tokens, seen.name = body["usage"]["prompt_tokens"], body["id"]
    return seen


def _chat_stream(answer: httpx.Response) -> Seen:
    seen = Seen()
    events = sse(answer.text)
    for event in events:
        if event == "[DONE]":
            continue
        if "error" in event:
            seen.error = event["error"]["message"]
            continue
        for choice in event["choices"]:
            delta = choice["delta"]
            seen.text += delta.get("content") or ""
            seen.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    seen.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                seen.calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
            seen.finish = choice.get("finish_reason") or seen.finish
    assert (events[-1] == "[DONE]") == (seen.error is None)
    return seen


def _message(body: dict[str, Any]) -> Seen:
    seen = Seen(finish=FINISHES[body["stop_reason"]], name=body["id"], prompt_tokens=body["usage"]["input_tokens"])
    for block in body["content"]:
        _add_block(seen, block, json.dumps(block.get("input")))
    return seen


def _add_block(seen: Seen, block: dict[str, Any], arguments: str) -> None:
    match block["type"]:
        case "thinking":
            assert block["signature"]
            seen.reasoning += block["thinking"]
        case "text":
            seen.text += block["text"]
        case "tool_use":
            seen.calls.append({"id": block["id"], "name": block["name"], "arguments": arguments})


def _message_stream(answer: httpx.Response) -> Seen:
    seen = Seen()
    assert "[DONE]" not in answer.text
    events = events_of(answer.content)
    blocks: list[tuple[dict[str, Any], list[str]]] = []
    for event in events:
        match event["type"]:
            case "message_start":
                seen.name = event["message"]["id"]
                seen.prompt_tokens = event["message"]["usage"]["input_tokens"]
            case "content_block_start":
                blocks.append((dict(event["content_block"]), []))
            case "content_block_delta":
                block, parts = blocks[event["index"]]
                for key, value in event["delta"].items():
                    if key == "partial_json":
                        parts.append(value)
                    elif key != "type":
                        block[key] = block.get(key, "") + value
            case "message_delta":
                seen.finish = FINISHES[event["delta"]["stop_reason"]]
            case "error":
                seen.error = event["error"]["message"]
    if seen.error is None:
        check_grammar(events)
        for block, parts in blocks:
            _add_block(seen, block, "".join(parts))
    return seen


def _response(body: dict[str, Any]) -> Seen:
    seen = Seen(name=body["id"], prompt_tokens=(body["usage"] or {}).get("input_tokens", 0))
    if body["status"] == "failed":
        return Seen(error=body["error"]["message"])
    for item in body["output"]:
        match item["type"]:
            case "reasoning":
                seen.reasoning += "".join(part["text"] for part in item["content"])
            case "message":
                seen.text += "".join(part["text"] for part in item["content"])
            case "function_call":
                seen.calls.append({"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]})
    whole = "tool_calls" if seen.calls else "stop"
    seen.finish = {"completed": whole, "incomplete": "length"}[body["status"]]
    return seen


def _response_stream(answer: httpx.Response) -> Seen:
    events = [event for event in sse(answer.text) if event != "[DONE]"]
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == sorted(set(numbers))
    assert events[0]["type"] == "response.created"
    last = events[-1]
    if last["type"] == "error":
        return Seen(error=last["message"])
    ends = [event for event in events if event["type"] in ("response.completed", "response.incomplete")]
    assert ends in ([], [last])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    if ends:
        assert [item["id"] for item in done] == [item["id"] for item in last["response"]["output"]]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == _response(last["response"]).text
    return _response(last["response"])
