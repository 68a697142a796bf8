"""The likeliest tokens on real vLLM: what agents see through the proxy is what vLLM's own API says of the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

import gyre_sdk as gyre
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

SHOWN, TOKENS = 4, 16
CLOSE = 1e-3
MARKERS = ("<think>", "<tool_call>", "<|im_end|>", "<|endoftext|>")
Place = tuple[str, float, list[tuple[str, float]]]
"""A sampled token, its log-prob, and the likeliest tokens with theirs, the likeliest first."""


class Direct:
    """vLLM's own completions, asked with ids."""

    def __init__(self, url: str, policy: Path, bias: dict[str, float]) -> None:
        self._url, self._bias = url, bias
        self._tokenizer = Tokenizer.from_file(str(policy / "tokenizer.json"))

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def check(self, call: CallRecord, shown: list[Place], first: int = 0) -> None:
        """The call sampled what vLLM samples; what was shown of it, from a place on, is what vLLM tells there."""
        answer = httpx.post(
            f"{self._url}/v1/completions",
            json={
                "model": "policy",
                "prompt": call.prompt_ids,
                "max_tokens": call.sampling.max_tokens,
                "stop_token_ids": call.sampling.stop_token_ids,
                "temperature": 0,
                "logit_bias": self._bias,
                "logprobs": 20,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert choice["token_ids"] == call.sampled_ids
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"] == pytest.approx(call.logprobs, abs=CLOSE)
        for place, (token, logprob, top) in enumerate(shown, first):
            assert token == self.text(call.sampled_ids[place])
            assert logprob == pytest.approx(call.logprobs[place], abs=CLOSE)
            known = [(int(key.partition(":")[2]), value) for key, value in logprobs["top_logprobs"][place].items()]
            known.sort(key=lambda item: -item[1])
            assert 0 < len(top) <= SHOWN + 1 and top[0][1] == pytest.approx(known[0][1], abs=CLOSE)
            if len(top) == SHOWN:  # completions name tokens by their texts, which two may share
                assert [value for _, value in top] == pytest.approx([value for _, value in known[:SHOWN]], abs=CLOSE)
            for text, value in top:  # the last ones may be as likely as others
                assert any(self.text(other) == text and abs(value - its) < CLOSE for other, its in known)


def places(tokens: Any) -> list[Place]:
    """Return tokens as chat and responses show them."""
    return [
        (item.token, item.logprob, [(other.token, other.logprob) for other in item.top_logprobs]) for item in tokens
    ]


@pytest.fixture
def bias(demo_policy: Path) -> dict[str, float]:
    """Keeps the policy to text, which all protocols show."""
    tokenizer = Tokenizer.from_file(str(demo_policy / "tokenizer.json"))
    return {str(tokenizer.token_to_id(marker)): -100.0 for marker in MARKERS}


def test_every_protocol_shows_what_vllm_says(
    service: gyre.ServiceClient, vllm: str, demo_policy: Path, tmp_path: Path, bias: dict[str, float]
) -> None:
    body: dict[str, Any] = {"model": "policy", "temperature": 0}
    talk: Any = [{"role": "user", "content": "set fox to red in oak.conf"}]
    asked: dict[str, Any] = {"messages": talk, "logprobs": True, "top_logprobs": SHOWN, "max_tokens": TOKENS}
    with gyre.session(gyre.Task(instruction="x"), service=service, workspace="local") as agent:
        client = agent.openai()
        whole = client.chat.completions.create(**body, **asked, logit_bias=bias)
        stream = client.chat.completions.create(**body, **asked, logit_bias=bias, stream=True)
        parts = [choice.logprobs for chunk in stream for choice in chunk.choices if choice.logprobs]
        plain = client.completions.create(
            **body, prompt="set fox to red in oak.conf", logprobs=SHOWN, max_tokens=TOKENS, logit_bias=bias
        )
        answer = client.responses.create(
            **body,
            input=talk,
            include=["message.output_text.logprobs"],
            top_logprobs=SHOWN,
            max_output_tokens=TOKENS,
            extra_body={"logit_bias": bias},
        )
    with Journal(tmp_path / "s.db", "r") as journal:
        calls = list(journal.calls())
    assert len(calls) == 4
    direct = Direct(vllm, demo_policy, bias)
    shown = [
        places(whole.choices[0].logprobs.content),
        places(item for part in parts for item in part.content or ()),
    ]
    told = plain.choices[0].logprobs
    tops = [sorted(place.items(), key=lambda item: -item[1]) for place in told.top_logprobs]
    shown.append(list(zip(told.tokens, told.token_logprobs, tops, strict=True)))
    assert all(len(top) == SHOWN for found in shown[:2] for _, _, top in found)
    for call, found in zip(calls, shown, strict=False):
        assert len(found) == len(call.sampled_ids) == TOKENS
        direct.check(call, found)
    (said,) = [part for item in answer.output if item.type == "message" for part in item.content]
    found = places(said.logprobs)
    assert found and all(len(top) == SHOWN for _, _, top in found)
    assert b"".join(bytes(token.bytes) for token in said.logprobs).decode(errors="replace").strip() == said.text
    sampled = list(zip(map(direct.text, calls[3].sampled_ids), calls[3].logprobs, strict=True))
    wanted = [(token, logprob) for token, logprob, _ in found]
    direct.check(calls[3], found, next(at for at in range(TOKENS) if sampled[at : at + len(found)] == wanted))
