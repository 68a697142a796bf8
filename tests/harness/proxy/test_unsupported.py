"""What the proxy does not do is refused in the protocol's own form, with what to do in its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from protocols_kit import PATHS
from proxy_engine import say
from proxy_kit import Proxy
from test_fidelity_cases import scripted

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA=="}
TEXT_ONLY = "this model reads text only: leave it out, or say it in a text part"


@pytest.fixture(scope="module")
def proxy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with scripted(model, tmp_path_factory.mktemp("unsupported"), {}, say(260)) as (proxy, _):
        yield proxy


def user(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("protocol", "body", "param", "said"),
    [
        ("chat", {"messages": user(IMAGE)}, "messages[0].content[0]", TEXT_ONLY),
        ("chat", {"messages": user({"type": "file", "file": {}})}, "messages[0].content[0]", TEXT_ONLY),
        ("chat", {"messages": user({"type": "input_audio"})}, "messages[0].content[0]", TEXT_ONLY),
        ("messages", {"messages": user({"type": "image", "source": SOURCE})}, None, TEXT_ONLY),
        ("messages", {"messages": user({"type": "document", "source": SOURCE})}, None, TEXT_ONLY),
        ("messages", {"messages": [{"role": "assistant", "content": "so"}]}, None, "begin with a user message"),
        ("responses", {"input": user({"type": "input_image"})}, "input[0].content[0]", TEXT_ONLY),
        ("responses", {"input": user({"type": "input_file"})}, "input[0].content[0]", TEXT_ONLY),
        ("responses", {"input": "go", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ("responses", {"input": "go", "prompt": {"id": "pmpt_1"}}, "prompt", "instructions and input"),
    ],
)
def test_fields(proxy: Proxy, protocol: str, body: dict[str, Any], param: str | None, said: str) -> None:
    key = {"Authorization": f"Bearer {proxy.run()['api_key']}"}
    limit = {"max_tokens": 8} if protocol == "messages" else {}
    answer = proxy.http.post(PATHS[protocol], json={"model": "policy", **limit, **body}, headers=key)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert said in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    if protocol == "messages":
        assert error["type"] == "invalid_request_error"
    else:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/responses/compact", "ask the model for a summary"),
        ("/v1/conversations", "previous_response_id"),
        ("/v1/conversations/conv_1/items", "previous_response_id"),
        ("/v1/files", "text only"),
        ("/v1/images/generations", "text only"),
        ("/v1/embeddings", "text only"),
        ("/v1/batches", "one by one"),
    ],
)
def test_paths(proxy: Proxy, path: str, said: str) -> None:
    answer = proxy.http.post(path, json={}, headers={"Authorization": f"Bearer {proxy.run()['api_key']}"})
    assert answer.status_code in (404, 405)
    error = answer.json()["error"]
    assert said in error["message"] and "is not offered" in error["message"]
    assert error["code"] in ("not_found", "method_not_allowed")
