"""Settings that a trainer cannot reproduce: which they are, and what the service does with them in a group's runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from proxy_engine import ScriptedEngine, say
from proxy_kit import Proxy, running
from proxy_toy import toy_template

from gyre_sdk.harness.proxy.server import SamplingPolicy
from gyre_sdk.records import Sampling

USER: dict[str, Any] = {"role": "user", "content": "hi"}
TRUNCATED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.001},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5},
    {"repetition_penalty": 1.1},
    {"min_tokens": 2},
]
FINE: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.3, "seed": 4},
    {"temperature": 2, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "repetition_penalty": 1.0},
    {"stop": ["end"], "top_k": -1, "max_tokens": 3},
]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        (Sampling(), None),
        (Sampling(temperature=0.01), None),
        (Sampling(temperature=1.7, seed=3, stop=("x",), stop_token_ids=(4,)), None),
        (Sampling(extra={"repetition_penalty": 1.0, "min_p": 0.0, "bad_words": [], "logit_bias": {}}), None),
        (Sampling(temperature=0.0), "temperature=0"),
        (Sampling(temperature=0.009), "temperature=0.009"),
        (Sampling(top_p=0.99), "top_p=0.99"),
        (Sampling(top_k=40), "top_k=40"),
        (Sampling(extra={"repetition_penalty": 1.2}), "repetition_penalty=1.2"),
        (Sampling(extra={"presence_penalty": 1.0}), "presence_penalty=1.0"),
        (Sampling(extra={"structured_outputs": {"json_object": True}}), "structured_outputs={'json_object': True}"),
    ],
)
def test_what_a_trainer_cannot_compute(sampling: Sampling, named: str | None) -> None:
    assert sampling.irreproducible == named


@pytest.fixture
def engine() -> Any:
    with ScriptedEngine(lambda request, number: say(301)) as made:
        yield made


def ask(proxy: Proxy, settings: dict[str, Any], **run: Any) -> Any:
    return proxy.chat(proxy.run(**run), {"messages": [USER], **settings})


def test_a_service_of_a_trainer_refuses_them(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    """By name, with what to change, before the engine is asked; in groups only."""
    with running(
        model,
        tmp_path / "s.db",
        engine.url,
        template=toy_template({"hi": 300, "ok": 301}),
        sampling=SamplingPolicy.REFUSE,
    ) as proxy:
        for settings in TRUNCATED:
            (name,) = settings
            answer = ask(proxy, settings, group="g")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", name)
            assert name in error["message"] and "--sampling untrained" in error["message"]
        held = ask(proxy, {"response_format": {"type": "json_object"}}, group="g")
        assert held.status_code == 400 and "held to a grammar" in held.json()["error"]["message"]
        assert not engine.log and not proxy.calls()
        for settings in FINE:
            assert ask(proxy, settings, group="g").status_code == 200
        for settings in TRUNCATED:
            assert ask(proxy, settings).status_code == 200
        assert len(engine.log) == len(FINE) + len(TRUNCATED)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_protocol_refuses_them_in_its_own_form(
    model: Path, tmp_path: Path, engine: ScriptedEngine, path: str, stream: bool
) -> None:
    """What steers the tokens by their ids is refused whatever the service's policy; streams are refused before they begin."""
    body: dict[str, Any] = {"model": "policy", "stream": stream, "messages": [USER]}
    if path == "/v1/messages":
        body["max_tokens"] = 8
    elif path != "/v1/chat/completions":
        body["prompt" if path == "/v1/completions" else "input"] = "hi"
        del body["messages"]
    behind = [{"logit_bias": {"5": 1}}, {"allowed_token_ids": [5]}, {"bad_words": ["ok"]}]
    cut = [{"temperature": 0}, {"top_p": 0.9}]
    for policy, refused in ((SamplingPolicy.UNTRAINED, behind), (SamplingPolicy.REFUSE, [*behind, *cut])):
        store = tmp_path / f"{policy}.db"
        template = toy_template({"hi": 300, "ok": 301})
        with running(model, store, engine.url, template=template, sampling=policy) as proxy:
            headers = {"Authorization": f"Bearer {proxy.run(group='g')['api_key']}"}
            for setting in refused:
                (name,) = setting
                answer = proxy.http.post(path, json={**body, **setting}, headers=headers)
                assert answer.status_code == 400 and answer.headers["x-should-retry"] == "false", answer.text
                said = answer.json()
                error = said["error"]
                assert name in error["message"] and "while a trainer uses the run" in error["message"]
                if path == "/v1/messages":
                    assert (said["type"], error["type"]) == ("error", "invalid_request_error")
                else:
                    expected = ("invalid_request_error", "invalid_value", name)
                    assert (error["type"], error["code"], error["param"]) == expected
            assert not proxy.calls()
    assert not engine.log


def test_a_service_serves_and_records_them_by_default(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    with running(model, tmp_path / "s.db", engine.url, template=toy_template({"hi": 300, "ok": 301})) as proxy:
        for settings in TRUNCATED:
            assert ask(proxy, settings, group="g").status_code == 200
        assert ask(proxy, {"logit_bias": {"5": 1}}, group="g").status_code == 400
        assert [call.sampling.irreproducible is not None for call in proxy.calls()] == [True] * len(TRUNCATED)
