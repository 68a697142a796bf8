"""What is sampled: the same tokens and log-probs as the plain forward pass, alone or in company."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine_process import CONTEXT, EOS, VOCAB

TOLERANCE = 1e-4


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


def reference_logits(model, prompt, sampled):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + sampled])).logits[0].float()
    return logits[len(prompt) - 1 : len(prompt) - 1 + len(sampled)]


def picked(logits, ids):
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


def test_greedy_tokens_and_logprobs_equal_transformers(engine, model_a):
    for prompt in prompts(6):
        answer = engine.generate(prompt, max_tokens=24)
        with torch.no_grad():
            expected = model_a[1].generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert answer.ids == expected[0, len(prompt) :].tolist()
        assert answer.logprobs == pytest.approx(
            picked(reference_logits(model_a[1], prompt, answer.ids), answer.ids), abs=TOLERANCE
        )
        assert answer.spans == [("7", 0, len(answer.ids))]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "logit_bias": {"17": 4.0, "18": -50.0}},
        {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    ],
)
def test_logprobs_are_those_of_the_sampling_distribution(engine, model_a, params):
    prompt = prompts(1, seed=3)[0]
    answer = engine.generate(prompt, max_tokens=16, ignore_eos=True, logprobs=3, **params)
    logits = reference_logits(model_a[1], prompt, answer.ids)
    for i, (row, token) in enumerate(zip(logits, answer.ids, strict=True)):
        for biased, bias in params.get("logit_bias", {}).items():
            row[int(biased)] += bias
        seen = sorted({*prompt, *answer.ids[:i]})
        penalty = params.get("repetition_penalty", 1.0)
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        counts = torch.bincount(torch.tensor(answer.ids[:i], dtype=torch.long), minlength=VOCAB)
        row -= params.get("frequency_penalty", 0) * counts + params.get("presence_penalty", 0) * (counts > 0)
        row /= params["temperature"]
        probs, order = row.softmax(-1).sort(descending=True)
        keep = probs >= params.get("min_p", 0) * probs[0]
        keep &= torch.arange(VOCAB) < params.get("top_k", VOCAB)
        if "top_p" in params:  # the smallest set whose mass reaches top_p, of what top-k left
            probs = torch.where(keep, probs, 0) / probs[keep].sum()
            keep &= probs.cumsum(0) - probs < params["top_p"]
        kept = order[keep]
        assert token in kept.tolist(), "a token outside of the sampling distribution was drawn"
        expected = row[kept].log_softmax(-1)[kept.tolist().index(token)].item()
        assert answer.logprobs[i] == pytest.approx(expected, abs=TOLERANCE)
        best = answer.chunks[0]["choices"][0]["logprobs"]["content"][i]
        assert best["top_logprobs"][0] == {k: best[k] for k in ("token_id", "logprob", "rank")}
        assert len(best["top_logprobs"]) == 3
        assert best["rank"] == kept.tolist().index(token) + 1


def test_sampling_follows_the_distribution(engine, model_a):
    prompt = prompts(1, seed=5)[0]
    with torch.no_grad():
        probs = (model_a[1](input_ids=torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
    with ThreadPoolExecutor(16) as pool:
        draws = list(pool.map(lambda _: engine.generate(prompt, temperature=0.5, max_tokens=1).ids[0], range(400)))
    top = int(probs.argmax())
    share, expected = draws.count(top) / len(draws), probs[top].item()
    assert abs(share - expected) < 5 * (expected * (1 - expected) / len(draws)) ** 0.5
    assert len(set(draws)) > 1


def test_company_does_not_change_a_row(engine):
    """32 at once (joining and leaving at different steps) give what each gives alone."""
    jobs = [(prompt, 4 + 3 * i % 29) for i, prompt in enumerate(prompts(32, seed=1))]
    alone = [engine.generate(prompt, max_tokens=count, ignore_eos=True) for prompt, count in jobs]
    with ThreadPoolExecutor(32) as pool:
        together = list(
            pool.map(lambda job: engine.generate(job[0], max_tokens=job[1], ignore_eos=True, stream=True), jobs)
        )
    for one, other in zip(alone, together, strict=True):
        assert other.ids == one.ids
        assert other.logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)


def test_prefix_cache_changes_nothing(engine, start):
    plain = start("--no-prefix-cache", "--step-tokens", "16")  # also cuts prompts into stretches
    rng = random.Random(2)
    for _ in range(3):
        history = [rng.randrange(2, VOCAB) for _ in range(40)]
        for _ in range(4):
            cached = engine.generate(history, max_tokens=8)
            computed = plain.generate(history, max_tokens=8)
            assert cached.ids == computed.ids
            assert cached.logprobs == pytest.approx(computed.logprobs, abs=TOLERANCE)
            history = history + cached.ids + [rng.randrange(2, VOCAB) for _ in range(12)]
    assert metric(engine, "vllm:prompt_tokens_cached_total") > 0
    assert metric(plain, "vllm:prompt_tokens_cached_total") == 0


def test_cache_salts_do_not_share(engine):
    prompt = prompts(1, seed=9)[0] + list(range(2, 60))
    before = metric(engine, "vllm:prompt_tokens_cached_total")
    for salt in ("one", "two"):
        engine.generate(prompt, max_tokens=2, request={"cache_salt": salt})
    assert metric(engine, "vllm:prompt_tokens_cached_total") == before
    engine.generate(prompt, max_tokens=2, request={"cache_salt": "two"})
    assert metric(engine, "vllm:prompt_tokens_cached_total") == before + len(prompt) - 1
    asked = {"cache_salt": "one", "stream_options": {"include_usage": True}}
    for cached, request in ((len(prompt) - 1, asked), (0, {**asked, "cache_salt": "three"})):
        for stream in (True, False):
            counts = engine.generate(prompt, max_tokens=2, stream=stream, request=request).chunks[-1]["usage"]
            assert counts["prompt_tokens_details"] == {"cached_tokens": cached if stream else len(prompt) - 1}


def test_streamed_and_whole_answers_agree(engine):
    prompt = prompts(1, seed=4)[0]
    whole = engine.generate(prompt, max_tokens=10, ignore_eos=True, request={"return_token_ids": True})
    parts = engine.generate(
        prompt,
        max_tokens=10,
        ignore_eos=True,
        stream=True,
        request={"return_token_ids": True, "stream_options": {"include_usage": True}},
    )
    assert (parts.ids, parts.reason, parts.spans) == (whole.ids, "length", whole.spans)
    assert parts.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)
    assert len(parts.chunks) > 2
    assert parts.chunks[0]["prompt_token_ids"] == whole.chunks[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in parts.chunks[1:])
    told, counts = parts.chunks[-1]["usage"], whole.chunks[0]["usage"]
    assert told == {name: counts[name] for name in told} | {"prompt_tokens_details": told["prompt_tokens_details"]}


def test_chunk_has_vllms_keys_in_vllms_order(engine):
    """Pinned to bytes captured from vLLM 0.32."""
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_tokens": 1, "logprobs": 0},
        "request_id": "a1",
        "stream": True,
    }
    with engine.post("/inference/v1/generate", body) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        first = response.readline().decode()
    chunk = json.loads(first[6:])
    token, logprob, rank = (chunk["choices"][0]["logprobs"]["content"][0][k] for k in ("token_id", "logprob", "rank"))
    entry = f'"token_id":{token},"logprob":{logprob!r},"rank":{rank}'
    assert first == (
        'data: {"request_id":"generate-tokens-a1","usage":null,"output_mode":"tokens","choices":[{"index":0,'
        f'"finish_reason":"length","stop_reason":null,"token_ids":[{token}],"routed_experts":null,"sampling_mask":null,'
        '"weight_versions":[{"version":"7","start":0,"end":1}],"logprobs":{"content":[{'
        + entry
        + ',"top_logprobs":[{'
        + entry
        + "}]}]}}]}\n"
    )


def test_stops(engine):
    prompt = prompts(1, seed=6)[0]
    free = engine.generate(prompt, max_tokens=30, ignore_eos=True)
    by_id = engine.generate(prompt, max_tokens=30, ignore_eos=True, stop_token_ids=[free.ids[5]])
    assert (by_id.ids, by_id.reason, by_id.stop_reason) == (
        free.ids[: free.ids.index(free.ids[5]) + 1],
        "stop",
        free.ids[5],
    )
    to_eos = engine.generate(prompt, max_tokens=30, logit_bias={str(EOS): 100.0})
    assert (to_eos.ids, to_eos.reason, to_eos.stop_reason, len(to_eos.logprobs)) == ([EOS], "stop", None, 1)
    held = engine.generate(prompt, max_tokens=30, min_tokens=4, logit_bias={str(EOS): 100.0})
    assert held.ids.index(EOS) == 4 == len(held.ids) - 1
    full = engine.generate([5] * (CONTEXT - 3), ignore_eos=True)
    assert (len(full.ids), full.reason) == (3, "length")


def test_stop_strings(engine, model_a):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_a[0] / "tokenizer.json"))
    for prompt in prompts(20, seed=7):
        free = engine.generate(prompt, max_tokens=30, ignore_eos=True)
        text = tokenizer.decode(free.ids[:12])
        if "�" not in text and len(text) > 6:
            break
    stop = text[3:6]  # spans tokens
    cut = engine.generate(prompt, max_tokens=30, ignore_eos=True, stop=[stop])
    assert (cut.reason, cut.stop_reason) == ("stop", stop)
    assert cut.ids == free.ids[: len(cut.ids)]
    assert stop in tokenizer.decode(cut.ids)
    assert stop not in tokenizer.decode(cut.ids[:-1])


def test_seeded_sampling_repeats(engine):
    prompt = prompts(1, seed=8)[0]

    def sample(seed):
        return engine.generate(prompt, max_tokens=12, temperature=1.0, ignore_eos=True, seed=seed).ids

    first = sample(11)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: sample(11), range(4))) == [first] * 4
    assert sample(12) != first


def metric(engine, name: str) -> float:
    return next(float(line.split()[-1]) for line in engine.get("/metrics").splitlines() if line.startswith(name + "{"))


def test_facts(engine):
    assert engine.get("/health") == ""
    assert json.loads(engine.get("/v1/models"))["data"][0]["max_model_len"] == CONTEXT
    engine.generate([3, 4], max_tokens=2, ignore_eos=True)
    text = engine.get("/metrics")
    for name in ("num_requests_running", "num_requests_waiting", "prompt_tokens_total", "generation_tokens_total"):
        assert metric(engine, f"vllm:{name}") >= 0
    assert 'vllm:request_success_total{engine="0",finished_reason="length"' in text


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"token_ids": [], "sampling_params": {}}, 400, "at least 1 item"),
        ({"sampling_params": {}}, 400, "missing required field `token_ids`"),
        ({"token_ids": ["x"], "sampling_params": {}}, 400, "body.token_ids[0]"),
        ({"token_ids": [-1], "sampling_params": {}}, 400, "negative values, got -1"),
        ({"token_ids": [VOCAB], "sampling_params": {}}, 400, f"Token id {VOCAB} is out of vocabulary"),
        ({"token_ids": [5] * CONTEXT, "sampling_params": {}}, 400, f"maximum model length of {CONTEXT}"),
        ({"token_ids": [5] * (CONTEXT + 9), "sampling_params": {}}, 400, f"(length {CONTEXT + 9}) is longer"),
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, 400, "temperature must be in [0, 2], got -1.0"),
        ({"token_ids": [5], "sampling_params": {"top_p": 0}}, 400, "top_p must be in (0, 1], got 0.0"),
        ({"token_ids": [5], "sampling_params": {"max_tokens": 0}}, 400, "max_tokens must be at least 1, got 0"),
        ({"token_ids": [5], "sampling_params": {"logprobs": 21}}, 400, "logprobs must be in [0, 20]"),
        ({"token_ids": [5], "sampling_params": {"n": 2}}, 400, "n must be 1"),
        ({"token_ids": [5], "sampling_params": {"stop_token_ids": [VOCAB]}}, 400, "stop_token_ids"),
        ({"token_ids": [5], "sampling_params": {"structured_outputs": {"json": {}}}}, 400, "structured_outputs"),
        ({"token_ids": [5], "sampling_params": {"bad_words": ["x"]}}, 400, "bad_words"),
        ({"token_ids": [5], "sampling_params": {}, "output_mode": "text"}, 400, "output_mode"),
        ({"token_ids": [5], "sampling_params": {}, "cache_salt": ""}, 400, "cache_salt"),
        ({"token_ids": [5], "sampling_params": {}, "model": "other"}, 404, "`other` does not exist"),
        (b'{"token_ids": [', 400, "JSON decode error"),
    ],
)
def test_bad_requests_name_the_value(engine, body, status, message):
    got, answer = engine.call("/inference/v1/generate", body)
    assert (got, answer["error"]["code"]) == (status, status)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]


def test_unknown_keys_are_ignored_as_in_vllm(engine):
    assert len(engine.generate([5], max_tokens=1, detokenize=False, foo=1, request={"bar": 2}).ids) == 1
