"""The OpenAPI document describes what is served, all of it, and is valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from proxy_engine import ScriptedEngine, say
from proxy_kit import Proxy, running
from proxy_toy import toy_template

from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings

METHODS = {"get", "put", "post", "delete", "head", "patch", "options", "trace"}


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the operations by method and path."""
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the schema of a POST's body, with everything that it refers to."""
    schema = operations(document)[("POST", path)]["requestBody"]["content"]["application/json"]["schema"]
    return {**schema, "components": document["components"]}


def valid(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_document_is_valid_and_complete(model: Path, tmp_path: Path) -> None:
    """Every route is described, and nothing else is."""
    server = ProxyServer(ProxySettings(store=tmp_path / "s.db", model=model), toy_template())
    server.start_in_thread()
    try:
        proxy = Proxy(server.url, server.service_key, tmp_path / "s.db")
        answer = proxy.http.get("/openapi.json")
        assert answer.headers["content-type"].startswith("application/json")
        document = answer.json()
        OpenAPIV31SpecValidator(document).validate()
        assert set(operations(document)) == server.routes
        names = [operation["operationId"] for operation in operations(document).values()]
        assert len(names) == len(set(names))
    finally:
        server.stop()


BODIES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "n": 2, "anything": {"else": 1}},
        [{"messages": []}, {"temperature": 101}, {"n": 0}, {"n": 17}, {"stop": 3}, {"messages": [{"role": "king"}]}],
    ),
    (
        "/v1/completions",
        {"prompt": [1, 2], "max_tokens": 3},
        [{"prompt": ""}, {"prompt": None}, {"max_tokens": 0}, {"logprobs": 21}],
    ),
    (
        "/v1/responses",
        {"input": "x", "store": False, "include": ["reasoning.encrypted_content"]},
        [{"input": 3}, {"include": "x"}, {"stream": "yes"}, {"max_output_tokens": 0}, {"reasoning": "high"}],
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "system": [{"type": "text", "text": "s"}]},
        [{"max_tokens": None}, {"temperature": 1.5}, {"stop_sequences": [1]}, {"messages": "x"}, {"system": 3}],
    ),
    (
        "/gyre/v1/runs",
        {"task": "t", "limits": {"tokens": 5}},
        [{"task": 3}, {"limits": {"tokens": "many"}}, {"member": "x"}, {"unknown": 1}],
    ),
]


@pytest.mark.parametrize(("path", "good", "changes"), BODIES, ids=[row[0] for row in BODIES])
def test_bodies_mean_what_the_document_says(
    model: Path, tmp_path: Path, path: str, good: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    """What the schemas of bodies allow is served; what they exclude is refused with a message in its error's schema."""
    with ScriptedEngine(lambda request, number: say(104, 260)) as engine:
        with running(model, tmp_path / "s.db", engine.url, template=byte_template()) as proxy:
            document = proxy.http.get("/openapi.json").json()
            schema = body_of(document, path)
            failure = operations(document)[("POST", path)]["responses"]["default"]["content"]["application/json"]
            key = proxy.service_key if path.startswith("/gyre") else proxy.run()["api_key"]
            headers = {"Authorization": f"Bearer {key}"}
            assert valid(schema, good)
            answer = proxy.http.post(path, json=good, headers=headers)
            assert answer.status_code == 200, answer.text
            answered = operations(document)[("POST", path)]["responses"]["200"]["content"]["application/json"]
            assert valid({**answered["schema"], "components": document["components"]}, answer.json()), answer.text
            for change in changes:
                wrong = {**good, **change}
                assert not valid(schema, wrong), change
                answer = proxy.http.post(path, content=json.dumps(wrong), headers=headers)
                assert answer.status_code == 400, (change, answer.text)
                assert valid({**failure["schema"], "components": document["components"]}, answer.json()), answer.text


def byte_template() -> Template:
    """Return the toy template without pieces: every text is its bytes."""
    return toy_template({})
