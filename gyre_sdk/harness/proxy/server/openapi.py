"""`GET /openapi.json`: what the proxy serves, as an OpenAPI 3.1 document."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server.agent_schemas import SCHEMAS, Schema, list_of, open_object, ref
from gyre_sdk.harness.proxy.server.control import CloseRun, EndRun, FinishRun, OpenLane, OpenRun
from gyre_sdk.harness.proxy.server.replicas import DrainReplica, SetReplicas
from gyre_sdk.journal import CallSummary
from gyre_sdk.records import LaneRecord, RunRecord, RunStatus

_STRUCTS = (
    OpenRun, OpenLane, CloseRun, FinishRun, EndRun, SetReplicas, DrainReplica, ReplicaSpec,
    RunRecord, LaneRecord, CallSummary,
)  # fmt: skip
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_GIVEN = ("lane", "api_key", "base_url", "anthropic_base_url")
_ACCESS = open_object(dict.fromkeys(_GIVEN, _TEXT), _GIVEN)
_RUN = open_object({"run": _TEXT, "version": {"type": "integer"}, **_ACCESS["properties"]}, ("run", "version", *_GIVEN))
_USED = open_object({"calls": _COUNT, "sampled_tokens": _COUNT}, ("calls", "sampled_tokens"))
_ENDED = open_object({"status": {"enum": [status.value for status in RunStatus]}}, ("status",))
_VERSION = open_object({"version": {"type": "integer"}}, ("version",))
_DRAINED = open_object({"finished": _COUNT, "moved": _COUNT}, ("finished", "moved"))
_REPLICA = open_object(
    {"url": _TEXT, "version": {"type": "integer"}, "state": _TEXT, "calls": _COUNT, "tokens": _COUNT},
    ("url", "version", "state", "calls", "tokens"),
)
_REPLICAS = open_object({"replicas": list_of(_REPLICA)}, ("replicas",))
_MODEL = open_object({"id": _TEXT}, ("id",))
_OK = open_object({"status": {"const": "ok"}}, ("status",))
_HEALTH = open_object(
    {"status": {"enum": ["ok", "waiting", "degraded"]}, "replicas_serving": _COUNT, "replicas": {"type": "object"}},
    ("status", "replicas_serving", "replicas"),
)
_SAID = open_object({"id": _TEXT}, ("id",))
_COUNTED = open_object({"input_tokens": _COUNT}, ("input_tokens",))
_SHOWN = {"allOf": [ref("RunRecord"), open_object({"lanes": list_of(ref("LaneRecord")), "open": {"type": "boolean"}})]}
_STATUS = open_object(
    {"version": {"type": "integer"}, "calls_in_flight": _COUNT, "runs_open": _COUNT, "store": _TEXT, **_REPLICAS["properties"]},
    ("version", "replicas", "calls_in_flight", "runs_open", "store"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Operation:
    method: str
    path: str
    does: str
    answer: Schema | None
    """None for an empty answer."""
    body: str = ""
    """Name of the body's schema."""
    error: str = "GyreError"
    key: str = ""
    """`agent`, `service` or none."""
    query: tuple[tuple[str, Schema, bool], ...] = ()
    """Name, schema, whether it is required."""
    streams: bool = False
    form: str = "application/json"


def _agent(method: str, path: str, does: str, answer: Schema, body: str = "", **more: Any) -> _Operation:
    error = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
    return _Operation(method, path, does, answer, body, error, "agent", **more)


def _control(method: str, path: str, does: str, answer: Schema, body: str = "", **more: Any) -> _Operation:
    return _Operation(method, f"/gyre/v1{path}", does, answer, body, key="service", **more)


_OPERATIONS = (
    _agent("post", "/v1/chat/completions", "OpenAI chat completions", _SAID, "ChatRequest", streams=True),
    _agent("post", "/v1/completions", "OpenAI's older completions", _SAID, "CompletionRequest", streams=True),
    _agent("post", "/v1/responses", "OpenAI responses", _SAID, "ResponsesRequest", streams=True),
    _agent("get", "/v1/responses/{response}", "A response of the key's run", _SAID),
    _agent("post", "/v1/responses/{response}/cancel", "End a response that is in flight", _SAID),
    _agent("post", "/v1/messages", "Anthropic messages", _SAID, "MessagesRequest", streams=True),
    _agent("post", "/v1/messages/count_tokens", "Count a prompt's tokens", _COUNTED, "CountRequest"),
    _agent("get", "/v1/models", "The one model", open_object({"data": list_of(_MODEL)}, ("data",))),
    _agent("get", "/v1/models/{model}", "A model: any name is served, by the one policy", _MODEL),
    _control("post", "/runs", "Open a run and its main lane", _RUN, "OpenRun"),
    _control("get", "/runs/{run}", "What is on record of a run", _SHOWN),
    _control("post", "/runs/{run}/lanes", "Open a further lane of a run", _ACCESS, "OpenLane"),
    _control("post", "/runs/{run}/lanes/{lane}/release", "Give a parent's key back to the parent", open_object()),
    _control("post", "/runs/{run}/lanes/{lane}/revoke", "Make a lane's key open nothing, for good", open_object()),
    _control("post", "/runs/{run}/close", "Refuse new calls; bound those in flight", _USED, "CloseRun"),
    _control("post", "/runs/{run}/end", "Record the terminal state of a run", _ENDED, "EndRun"),
    _control("post", "/runs/{run}/finish", "Close and end a run in one step", _ENDED, "FinishRun"),
    _control("get", "/status", "What is going on", _STATUS),
    _control("get", "/replicas", "Each replica's state and load", _REPLICAS),
    _control("put", "/replicas", "Replace the table of replicas", _VERSION, "SetReplicas"),
    _control("post", "/replicas", "Add a replica, or tell its new version", _VERSION, "ReplicaSpec"),
    _control("delete", "/replicas", "Forget a replica", _DRAINED, query=(("url", _TEXT, True),)),
    _control("post", "/replicas/drain", "Take a replica out of service", _DRAINED, "DrainReplica"),
    _control(
        "get", "/calls", "Calls after a sequence number, without tokens",
        open_object({"calls": list_of(ref("CallSummary"))}, ("calls",)),
        query=(("after", _COUNT, False), ("run", _TEXT, False)),
    ),
    _Operation("head", "/", "Whether anything listens here", None),
    _Operation("get", "/health", "That the process serves", _OK),
    _Operation("get", "/healthz", "That the process serves, and how many replicas do", _HEALTH),
    _Operation("get", "/metrics", "Counts for Prometheus; open on loopback only, else with the service key", _TEXT,
               form="text/plain"),
    _Operation("get", "/openapi.json", "This document", open_object({"openapi": _TEXT}, ("openapi",))),
)  # fmt: skip


def document() -> dict[str, Any]:
    """Return the document."""
    _, structs = msgspec.json.schema_components(_STRUCTS, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "gyre proxy",
            "version": version("gyre-sdk"),
            "summary": "Recorded model access for agents in four protocols, and its control API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": {**SCHEMAS, **structs},
            "securitySchemes": {
                "agent": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Key of a lane; reaches its own run only.",
                },
                "agent_x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "agent_api_key": {"type": "apiKey", "in": "header", "name": "api-key"},
                "service": {"type": "http", "scheme": "bearer", "description": "The service key."},
            },
        },
    }


def page() -> web.RouteDef:
    """Return the route that serves the document."""
    body = msgspec.json.encode(document())

    async def show(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    return web.get("/openapi.json", show)


_PARAMETER = re.compile(r"\{(\w+)\}")
_SECURITY: dict[str, list[dict[str, list[str]]]] = {
    "": [],
    "service": [{"service": []}],
    "agent": [{"agent": []}, {"agent_x_api_key": []}, {"agent_api_key": []}],
}


def _described(operation: _Operation) -> dict[str, Any]:
    name = _PARAMETER.sub(r"by_\1", operation.path).strip("/").replace("/", "_").replace(".", "_")
    parameters = [_parameter(found, "path", _TEXT, True) for found in _PARAMETER.findall(operation.path)]
    parameters += [_parameter(found, "query", schema, required) for found, schema, required in operation.query]
    good: dict[str, Any] = {"description": "Done"}
    if operation.answer is not None:
        good["content"] = {operation.form: {"schema": operation.answer}}
    if operation.streams:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    shown: dict[str, Any] = {
        "operationId": f"{operation.method}_{name}".rstrip("_"),
        "summary": operation.does,
        "security": _SECURITY[operation.key],
        "responses": {"200": good, "default": _failure(operation.error)},
    }
    if parameters:
        shown["parameters"] = parameters
    if operation.body:
        shown["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref(operation.body)}}}
    return shown


def _parameter(name: str, place: str, schema: Schema, required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _failure(schema: str) -> dict[str, Any]:
    return {"description": "What is wrong", "content": {"application/json": {"schema": ref(schema)}}}
