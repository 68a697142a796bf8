"""Aborts, disconnects, pauses, weights, the request log, errors and the process itself."""

from __future__ import annotations

import http.client
import json
import math
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import torch
from engine_process import CONTEXT, Answer, Engine, make_model, running_engine
from safetensors.torch import load_file, save_file

PROMPT = list(range(10, 30))
LONG = {"max_tokens": CONTEXT - len(PROMPT), "ignore_eos": True}


class Running:
    """A long streamed request in the background that can be watched and acted upon."""

    def __init__(self, engine: Engine, request_id: str = "long", **params) -> None:
        self.tokens = 0
        self.wait_for: tuple[int, threading.Event] = (1, threading.Event())
        self._thread = ThreadPoolExecutor(1)
        self._answer = self._thread.submit(
            engine.generate,
            PROMPT,
            stream=True,
            on_chunk=self._count,
            request={"request_id": request_id},
            **{**LONG, **params},
        )

    def _count(self, chunk) -> None:
        self.tokens += sum(len(choice["token_ids"]) for choice in chunk["choices"])
        if self.tokens >= self.wait_for[0]:
            self.wait_for[1].set()

    def started(self) -> Running:
        assert self.wait_for[1].wait(20), "no token came"
        return self

    def answer(self) -> Answer:
        return self._answer.result(30)


def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def running(engine: Engine) -> tuple[float, float]:
    lines = dict(line.rsplit(" ", 1) for line in engine.get("/metrics").splitlines() if not line.startswith("#"))
    values = {name.split("{")[0]: float(value) for name, value in lines.items()}
    return values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]


@pytest.fixture(scope="module")
def slow_engine(start, tmp_path_factory) -> Engine:
    """An engine whose answers take long enough to interfere."""
    folder = tmp_path_factory.mktemp("deep")
    make_model(folder, 3, num_hidden_layers=12)
    return start("--version", "1", folder=folder)


@pytest.mark.parametrize("route", ["/inference/v1/abort_requests", "/abort_requests"])
def test_abort_returns_the_tokens_so_far(slow_engine, route):
    request = Running(slow_engine).started()
    assert slow_engine.call(route, {"request_ids": ["long"]})[0] == 200  # not the prefixed id: aborts nothing
    slow_engine.call(route, {"request_ids": ["generate-tokens-long"]})
    answer = request.answer()
    assert answer.reason == "abort"
    assert 0 < len(answer.ids) < LONG["max_tokens"]
    assert answer.spans == [("1", 0, len(answer.ids))]


def test_abort_everything_and_the_header_wins(slow_engine):
    requests = [Running(slow_engine, f"r{i}") for i in range(3)]
    for request in requests:
        request.started()
    assert slow_engine.call("/abort_requests", {})[1] == {"status": "aborted", "aborted": 3}
    assert {request.answer().reason for request in requests} == {"abort"}
    with slow_engine.post(
        "/inference/v1/generate",
        {"token_ids": [5], "request_id": "body", "sampling_params": {"max_tokens": 1}},
        headers={"X-Request-Id": "header"},
    ) as response:
        assert json.loads(response.read())["request_id"] == "generate-tokens-header"
    assert slow_engine.call("/inference/v1/abort_requests", {})[0] == 400
    assert slow_engine.call("/abort_requests", b"[]")[0] == 400


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(slow_engine, stream):
    lines = len(slow_engine.request_log.read_text().splitlines()) if slow_engine.request_log.exists() else 0
    connection = http.client.HTTPConnection(urlsplit(slow_engine.url).netloc)
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": 0, **LONG}, "stream": stream, "request_id": "gone"}
    connection.request("POST", "/inference/v1/generate", json.dumps(body))
    eventually(lambda: running(slow_engine)[0] == 1)
    connection.close()
    eventually(lambda: running(slow_engine) == (0, 0))
    last = [json.loads(line) for line in slow_engine.request_log.read_text().splitlines()[lines:]][-1]
    assert (last["request_id"], last["finish_reason"]) == ("generate-tokens-gone", "abort")
    assert len(last["sampled_ids"]) < LONG["max_tokens"]


def test_pause_keep_freezes_and_queues(slow_engine):
    whole = slow_engine.generate(PROMPT, **LONG)
    request = Running(slow_engine).started()
    assert slow_engine.call("/pause?mode=keep")[1] == {"status": "paused"}
    assert json.loads(slow_engine.get("/is_paused")) == {"is_paused": True}
    with ThreadPoolExecutor(1) as pool:
        queued = pool.submit(slow_engine.generate, [5, 6, 7], max_tokens=2)
        eventually(lambda: running(slow_engine) == (1, 1))
        time.sleep(0.2)
        seen = request.tokens
        time.sleep(0.2)
        assert (request.tokens, queued.done()) == (seen, False)
        assert slow_engine.call("/resume")[1] == {"status": "resumed"}
        assert len(queued.result(20).ids) == 2
    assert request.answer().ids == whole.ids
    assert json.loads(slow_engine.get("/is_paused")) == {"is_paused": False}


def test_pause_wait_drains_and_abort_ends(slow_engine):
    request = Running(slow_engine, max_tokens=60).started()
    assert slow_engine.call("/pause?mode=wait")[0] == 200
    assert running(slow_engine)[0] == 0
    assert request.answer().reason == "length"
    slow_engine.call("/resume")
    request = Running(slow_engine).started()
    assert slow_engine.call("/pause")[0] == 200
    assert request.answer().reason == "abort"
    slow_engine.call("/resume")
    status, error = slow_engine.call("/pause?mode=later")
    assert (status, "'later'" in error["error"]["message"]) == (400, True)


def test_new_weights_change_outputs_and_old_ones_bring_them_back(engine, model_a, model_b):
    before = engine.generate(PROMPT, max_tokens=20)
    engine.load_weights(model_b[0] / "model.safetensors", "8")
    assert json.loads(engine.get("/weight_info")) == {"weight_version": "8"}
    other = engine.generate(PROMPT, max_tokens=20)
    with torch.no_grad():
        expected = model_b[1].generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert other.ids == expected[0, len(PROMPT) :].tolist() != before.ids
    assert other.spans == [("8", 0, len(other.ids))]
    engine.load_weights(model_a[0] / "model.safetensors", "9")
    after = engine.generate(PROMPT, max_tokens=20)
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)  # bit for bit
    assert after.spans == [("9", 0, len(after.ids))]


@pytest.mark.parametrize("paused", [True, False])
def test_an_update_in_mid_generation_recomputes_under_the_new_weights(slow_engine, tmp_path, paused):
    """Spans are exact per token, and no key or value of the old version is read by the new one."""
    from transformers import AutoModelForCausalLM

    folder = json.loads(slow_engine.get("/v1/models"))["data"][0]["id"]
    old = load_file(f"{folder}/model.safetensors")
    torch.manual_seed(5)
    save_file({k: v + 0.05 * torch.randn_like(v) for k, v in old.items()}, tmp_path / "new.safetensors")
    versions = [("old", old), ("new", load_file(tmp_path / "new.safetensors"))]
    slow_engine.call("/update_weight_version", {"new_version": "old"})
    request = Running(slow_engine).started()
    if paused:
        slow_engine.call("/pause?mode=keep")
    slow_engine.load_weights(tmp_path / "new.safetensors", "new")
    slow_engine.call("/resume")
    answer = request.answer()
    slow_engine.load_weights(f"{folder}/model.safetensors", "1")
    (name_a, start_a, cut), (name_b, start_b, end) = answer.spans
    assert (name_a, start_a, name_b, start_b, end) == ("old", 0, "new", cut, len(answer.ids))
    model = AutoModelForCausalLM.from_pretrained(folder)
    for (_, weights), (first, last) in zip(versions, [(0, cut), (cut, end)], strict=True):
        model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPT + answer.ids])).logits[0].log_softmax(-1)
        rows = range(len(PROMPT) - 1 + first, len(PROMPT) - 1 + last)
        assert answer.ids[first:last] == logits[rows].argmax(-1).tolist()
        assert answer.logprobs[first:last] == pytest.approx(logits[rows].amax(-1).tolist(), abs=1e-4)


def test_weights_are_refused_whole(engine, model_a, tmp_path):
    before = engine.generate(PROMPT, max_tokens=10)
    good = load_file(model_a[0] / "model.safetensors")
    norm = "model.norm.weight"
    cases = [
        ({k: v for k, v in good.items() if k != norm}, "finish_weight_update", f"first {norm!r}"),
        ({**good, "model.extra": torch.zeros(1)}, "update_weights", "'model.extra' is not in the model"),
        ({**good, norm: torch.zeros(3)}, "update_weights", f"{norm!r} has shape (3,), the model has (64,)"),
        ({**good, norm: good[norm] * math.nan}, "update_weights", f"{norm!r} (torch.float32) has values that are not"),
        ({**good, "lm_head.weight": good["model.embed_tokens.weight"] + 1}, "finish_weight_update", "ties"),
    ]
    for tensors, failing, message in cases:
        save_file(tensors, tmp_path / "w.safetensors")
        assert engine.call("/start_weight_update")[0] == 200
        steps = [
            ("update_weights", {"update_info": {"path": str(tmp_path / "w.safetensors")}}),
            ("finish_weight_update", {"weight_version": "bad"}),
        ]
        for route, body in steps:
            status, answer = engine.call(f"/{route}", body)
            if route == failing:
                assert (status, message in answer["error"]["message"]) == (400, True), answer
                break
            assert status == 200
    (tmp_path / "cut.safetensors").write_bytes((model_a[0] / "model.safetensors").read_bytes()[:-100])
    for path, message in (
        (tmp_path / "cut.safetensors", "not a complete safetensors file"),
        (tmp_path / "absent", "No such file"),
    ):
        engine.call("/start_weight_update")
        status, answer = engine.call("/update_weights", {"update_info": {"path": str(path)}})
        assert (status, message in answer["error"]["message"]) == (400, True), answer
    assert (
        "start_weight_update must be called"
        in engine.call("/update_weights", {"update_info": {"path": "x"}})[1]["error"]["message"]
    )
    assert engine.call("/update_weight_version", {"new_version": 8})[0] == 400
    after = engine.generate(PROMPT, max_tokens=10)
    assert (after.ids, after.spans) == (before.ids, before.spans)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-4)  # the prefix cache may have served one of them
    save_file({**good, "lm_head.weight": good["model.embed_tokens.weight"].clone()}, tmp_path / "w.safetensors")
    engine.load_weights(tmp_path / "w.safetensors", "7")


def test_the_request_log_equals_what_clients_got(engine):
    seen = len(engine.request_log.read_text().splitlines()) if engine.request_log.exists() else 0
    jobs = [(f"log-{i}", [3 + i, 40, 50]) for i in range(8)]

    def one(job):
        return job, engine.generate(
            job[1], max_tokens=5 + len(job[0]), temperature=1.0, stream=True, request={"request_id": job[0]}
        )

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, jobs))
    lines = {
        entry["request_id"]: entry for entry in map(json.loads, engine.request_log.read_text().splitlines()[seen:])
    }
    for (request_id, prompt), answer in answers:
        assert lines["generate-tokens-" + request_id] == {
            "request_id": "generate-tokens-" + request_id,
            "prompt_ids": prompt,
            "sampled_ids": answer.ids,
            "logprobs": answer.logprobs,
            "finish_reason": answer.reason,
            "versions": [{"version": v, "start": a, "end": b} for v, a, b in answer.spans],
        }


def test_an_error_in_the_model_thread_reaches_the_client(slow_engine, tmp_path):
    """Weights whose logits overflow: the request ends with an error, the engine goes on."""
    folder = json.loads(slow_engine.get("/v1/models"))["data"][0]["id"]
    good = load_file(f"{folder}/model.safetensors")
    save_file(
        {**good, "model.norm.weight": torch.full_like(good["model.norm.weight"], 3e38)}, tmp_path / "w.safetensors"
    )
    slow_engine.load_weights(tmp_path / "w.safetensors", "inf")
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}}
    status, answer = slow_engine.call("/inference/v1/generate", body)
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (500, "InternalServerError", 500)
    with slow_engine.post("/inference/v1/generate", {**body, "stream": True}) as response:
        lines = [line for line in response.read().decode().split("\n") if line]
    assert json.loads(lines[0][6:]) == answer
    assert lines[1:] == ["data: [DONE]"]
    assert json.loads(slow_engine.request_log.read_text().splitlines()[-1])["finish_reason"] == "error"
    slow_engine.load_weights(f"{folder}/model.safetensors", "1")
    assert slow_engine.generate(PROMPT, max_tokens=3).spans == [("1", 0, 3)]


def test_sigterm_ends_streams_with_their_tokens(model_a, tmp_path):
    with running_engine(model_a[0], tmp_path / "log") as engine:
        assert engine.call("/pause?mode=keep")[0] == 200
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(engine.generate, PROMPT, stream=True, **LONG)
            eventually(lambda: running(engine)[1] == 1)
            engine.process.send_signal(signal.SIGTERM)
            assert answer.result(20).reason == "abort"
        assert engine.process.wait(15) == 0


def test_a_folder_that_is_no_model_is_one_line(tmp_path, capfd):
    from gyre_sdk.trainer.engines.embedded import main

    assert main(["--model", str(tmp_path), "--port", "0"]) == 2
    assert "has no config.json" in capfd.readouterr().err
