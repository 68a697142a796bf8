"""JSON schemas of the agents' protocols: what the proxy reads of a body, with its types and bounds. The rest passes."""

from __future__ import annotations

from typing import Any

from gyre_sdk.harness.proxy.dialects.fields import MAX_CHOICES

Schema = dict[str, Any]
_LARGEST = 1 << 31


def ref(name: str) -> Schema:
    """Return a reference to a named schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def open_object(properties: Schema | None = None, required: tuple[str, ...] = ()) -> Schema:
    """Return the schema of an object that may have further fields."""
    schema: Schema = {"type": "object", "additionalProperties": True}
    if properties:
        schema["properties"] = properties
    if required:
        schema["required"] = list(required)
    return schema


def list_of(items: Schema, **bounds: int) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": items, **bounds}


def _integer(low: int, high: int) -> Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": ["boolean", "null"]}
_ANY_OBJECT = _optional(open_object())
_STOPS: Schema = {"anyOf": [_TEXT, list_of(_TEXT), {"type": "null"}]}
_PARTS: Schema = {"anyOf": [_TEXT, list_of(ref("Part")), {"type": "null"}]}
_SAMPLING: Schema = {
    "top_p": _number(0, 1),
    "seed": {"type": ["integer", "null"]},
    "stop_token_ids": _optional(list_of({"type": "integer", "minimum": 0})),
    **{
        name: {"type": ["number", "null"]}
        for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    },
    "min_tokens": {"type": ["integer", "null"]},
    "logit_bias": _ANY_OBJECT,
    "bad_words": _optional(list_of(_TEXT)),
    "allowed_token_ids": _optional(list_of({"type": "integer"})),
    "ignore_eos": _FLAG,
    "include_stop_str_in_output": _FLAG,
}
_OPENAI: Schema = {
    "model": _TEXT,
    "stream": _FLAG,
    "temperature": _number(0, 100),
    "top_k": _integer(-1, _LARGEST),
    **_SAMPLING,
}
_CHOICES = _integer(1, MAX_CHOICES)

SCHEMAS: dict[str, Schema] = {
    "Part": open_object({"type": _TEXT, "text": _TEXT}, ("type",)),
    "ChatMessage": open_object(
        {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
            "content": _PARTS,
            "tool_calls": _optional(list_of(ref("ChatToolCall"))),
            "tool_call_id": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
        },
        ("role",),
    ),
    "ChatToolCall": open_object({"id": _TEXT, "function": ref("ChatFunctionCall")}, ("function",)),
    "ChatFunctionCall": open_object({"name": _TEXT, "arguments": _TEXT}, ("name",)),
    "ChatTool": open_object(
        {
            "type": {"const": "function"},
            "function": open_object({"name": _TEXT, "description": _TEXT, "parameters": open_object()}, ("name",)),
        },
        ("function",),
    ),
    "ChatRequest": open_object(
        {
            **_OPENAI,
            "messages": list_of(ref("ChatMessage"), minItems=1),
            "max_tokens": _integer(1, _LARGEST),
            "max_completion_tokens": _integer(1, _LARGEST),
            "stop": _STOPS,
            "n": _CHOICES,
            "logprobs": _FLAG,
            "top_logprobs": _integer(0, 20),
            "return_tokens_as_token_ids": _FLAG,
            "tools": _optional(list_of(ref("ChatTool"))),
            "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, open_object(), {"type": "null"}]},
            "parallel_tool_calls": _FLAG,
            "stream_options": _ANY_OBJECT,
            "response_format": _ANY_OBJECT,
            "structured_outputs": _ANY_OBJECT,
            "chat_template_kwargs": _ANY_OBJECT,
            "continue_final_message": _FLAG,
            "add_generation_prompt": _FLAG,
        },
        ("messages",),
    ),
    "CompletionRequest": open_object(
        {
            **_OPENAI,
            "prompt": {
                "anyOf": [
                    {"type": "string", "minLength": 1},
                    ref("TokenIds"),
                    list_of({"anyOf": [{"type": "string", "minLength": 1}, ref("TokenIds")]}, minItems=1, maxItems=64),
                ]
            },
            "max_tokens": _integer(1, _LARGEST),
            "stop": _STOPS,
            "n": _CHOICES,
            "best_of": _CHOICES,
            "logprobs": {"anyOf": [_FLAG, _integer(0, 20)]},
            "return_tokens_as_token_ids": _FLAG,
            "stream_options": _ANY_OBJECT,
            "structured_outputs": _ANY_OBJECT,
        },
        ("prompt",),
    ),
    "TokenIds": list_of({"type": "integer", "minimum": 0, "maximum": _LARGEST - 1}, minItems=1),
    "ResponsesItem": open_object(
        {"type": _TEXT, "role": _TEXT, "content": _PARTS, "id": _TEXT, "call_id": _TEXT, "name": _TEXT}
    ),
    "ResponsesTool": open_object({"type": _TEXT, "name": _TEXT, "parameters": _ANY_OBJECT}, ("type",)),
    "ResponsesRequest": open_object(
        {
            **_OPENAI,
            "input": {"anyOf": [_TEXT, list_of(ref("ResponsesItem"))]},
            "instructions": {"type": ["string", "null"]},
            "previous_response_id": {"type": ["string", "null"]},
            "max_output_tokens": _integer(1, _LARGEST),
            "store": _FLAG,
            "background": _FLAG,
            "include": _optional(list_of(_TEXT)),
            "tools": _optional(list_of(ref("ResponsesTool"))),
            "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, open_object(), {"type": "null"}]},
            "parallel_tool_calls": _FLAG,
            "reasoning": _ANY_OBJECT,
            "text": _ANY_OBJECT,
            "metadata": _ANY_OBJECT,
            "top_logprobs": _integer(0, 20),
        },
    ),
    "MessagesBlock": open_object(
        {"type": _TEXT, "text": _TEXT, "tool_use_id": _TEXT, "name": _TEXT, "input": open_object()}, ("type",)
    ),
    "MessagesMessage": open_object(
        {
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {"anyOf": [_TEXT, list_of(ref("MessagesBlock"))]},
        },
        ("role", "content"),
    ),
    "MessagesTool": open_object(
        {"type": {"type": ["string", "null"]}, "name": _TEXT, "description": _TEXT, "input_schema": open_object()},
        ("name",),
    ),
    "CountRequest": open_object(
        {
            "model": _TEXT,
            "messages": list_of(ref("MessagesMessage"), minItems=1),
            "system": {"anyOf": [_TEXT, list_of(ref("MessagesBlock")), {"type": "null"}]},
            "tools": _optional(list_of(ref("MessagesTool"))),
            "tool_choice": _ANY_OBJECT,
            "thinking": _ANY_OBJECT,
        },
        ("messages",),
    ),
    "MessagesRequest": {
        "allOf": [
            ref("CountRequest"),
            open_object(
                {
                    **_SAMPLING,
                    "stream": _FLAG,
                    "temperature": _number(0, 1),
                    "top_k": _integer(0, _LARGEST),
                    "max_tokens": {"type": "integer", "minimum": 1, "maximum": _LARGEST},
                    "stop_sequences": _STOPS,
                    "output_config": _ANY_OBJECT,
                },
                ("max_tokens",),
            ),
        ]
    },
    "OpenAIError": open_object(
        {
            "error": open_object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "code": {"type": ["string", "null"]},
                    "param": {"type": ["string", "null"]},
                },
                ("message", "type", "code", "param"),
            )
        },
        ("error",),
    ),
    "AnthropicError": open_object(
        {"type": {"const": "error"}, "error": open_object({"type": _TEXT, "message": _TEXT}, ("type", "message"))},
        ("type", "error"),
    ),
    "GyreError": open_object(
        {
            "error": open_object(
                {"message": _TEXT, "code": _TEXT, "param": {"type": ["string", "null"]}}, ("message", "code", "param")
            )
        },
        ("error",),
    ),
}
"""By name; bodies of requests and of errors."""
