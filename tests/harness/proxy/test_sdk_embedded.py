"""The SDKs through the proxy to the embedded engine, a real model with random weights: ids as its ledger has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_process import Engine, make_model, running_engine
from proxy_kit import Proxy, running
from sdk_kit import CHAT_TOOLS, GO, MESSAGE_TOOLS
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights over the vocabulary of the `model` fixture."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    stop = tokenizer.token_to_id("<|im_end|>")
    make_model(folder, 3, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096, eos_token_id=stop)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def engine(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(policy, tmp_path_factory.mktemp("log") / "requests.jsonl") as engine:
        yield engine


@pytest.fixture
def proxy(policy: Path, engine: Engine, tmp_path: Path) -> Iterator[Proxy]:
    with running(policy, tmp_path / "s.db", engine.url) as proxy:
        yield proxy


def as_logged(proxy: Proxy, engine: Engine, count: int) -> None:
    """Hold the calls against the engine's ledger."""
    lines = [json.loads(line) for line in engine.request_log.read_text().splitlines()]
    calls = proxy.calls()
    assert len(calls) == count
    for call in calls:
        (line,) = [item for item in lines if call.call in item["request_id"]]
        assert (call.prompt_ids, call.sampled_ids) == (line["prompt_ids"], line["sampled_ids"])
        assert call.logprobs == pytest.approx(line["logprobs"], abs=1e-6)


def read_in(usage: Any) -> int:
    """Return the tokens of a prompt as Anthropic tells them: cached ones are counted apart."""
    return int(usage.input_tokens) + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


@pytest.mark.parametrize("stream", [False, True])
def test_every_protocol(proxy: Proxy, engine: Engine, stream: bool) -> None:
    """What it says is noise, and it comes back from the agent: the second turn continues the first."""
    access = proxy.run()
    client = openai.OpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)
    body: dict[str, Any] = {"model": "policy", "max_tokens": 12, "tools": CHAT_TOOLS}
    messages = list(GO)
    for _ in range(2):
        if stream:
            chunks = client.chat.completions.create(messages=messages, stream=True, **body)
            said = {"role": "assistant", "content": "".join(chunk.choices[0].delta.content or "" for chunk in chunks)}
        else:
            whole = client.chat.completions.create(messages=messages, **body)
            said = whole.choices[0].message.model_dump(exclude_none=True)
        messages += [said, {"role": "user", "content": "go on"}]
    other = proxy.lane(access["run"], role="subagent", parent=access["lane"])
    with anthropic.Anthropic(base_url=proxy.url, api_key=other["api_key"], max_retries=0) as second:
        more: dict[str, Any] = {"model": "policy", "max_tokens": 12, "messages": GO, "tools": MESSAGE_TOOLS}
        counted = second.messages.count_tokens(**{key: more[key] for key in ("model", "messages", "tools")})
        if stream:
            with second.messages.stream(**more) as parts:
                usage = parts.get_final_message().usage
        else:
            usage = second.messages.create(**more).usage
    assert read_in(usage) == counted.input_tokens
    first = client.responses.create(model="policy", input="You run ls", max_output_tokens=12)
    client.responses.create(model="policy", input="go", max_output_tokens=12, previous_response_id=first.id)
    client.completions.create(model="policy", prompt="The answer is", max_tokens=4, stream=False)
    as_logged(proxy, engine, 6)
    calls = proxy.calls()
    for above, below in ((0, 1), (3, 4)):
        assert (calls[below].parent, calls[below].fork_reason) == (calls[above].call, None)


async def test_async_clients_and_every_stream(proxy: Proxy, engine: Engine) -> None:
    """A lane for each kind of client: what it sees in whole and streamed is what its lane's calls have on record."""
    access = proxy.run()
    lanes = {
        name: proxy.lane(access["run"], name=name, parent=access["lane"]) for name in ("chat", "messages", "responses")
    }
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in lanes}
    body: dict[str, Any] = {"model": "policy", "max_tokens": 12}
    key = {"api_key": lanes["chat"]["api_key"], "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=access["base_url"], **key) as chat:
        usage = (await chat.chat.completions.create(messages=GO, tools=CHAT_TOOLS, **body)).usage
        assert usage is not None
        seen["chat"].append((usage.prompt_tokens, usage.completion_tokens))
        options: Any = {"stream_options": {"include_usage": True}}
        for stream in (
            await chat.chat.completions.create(messages=GO, stream=True, **options, **body),
            await chat.completions.create(prompt="The answer is", stream=True, **options, **body),
        ):
            last = [chunk async for chunk in stream][-1]
            seen["chat"].append((last.usage.prompt_tokens, last.usage.completion_tokens))
    key = {"api_key": lanes["responses"]["api_key"], "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=access["base_url"], **key) as other:
        first = await other.responses.create(model="policy", input="Run ls", max_output_tokens=12)
        more = {"input": "go", "previous_response_id": first.id}
        async with other.responses.stream(model="policy", max_output_tokens=12, **more) as events:
            async for _ in events:
                pass
        (last_call,) = [call for call in proxy.calls() if call.parent == f"c-{first.id.removeprefix('resp_')}"]
        second = await other.responses.retrieve(f"resp_{last_call.call.removeprefix('c-')}")
        seen["responses"] += [(item.usage.input_tokens, item.usage.output_tokens) for item in (first, second)]
    key = {"api_key": lanes["messages"]["api_key"], "max_retries": 0}
    async with anthropic.AsyncAnthropic(base_url=access["anthropic_base_url"], **key) as third:
        whole = await third.messages.create(messages=GO, tools=MESSAGE_TOOLS, **body)
        async with third.messages.stream(messages=GO, **body) as parts:
            async for _ in parts:
                pass
            streamed = await parts.get_final_message()
        seen["messages"] += [(read_in(item.usage), item.usage.output_tokens) for item in (whole, streamed)]
    as_logged(proxy, engine, 7)
    for name, lane in lanes.items():
        calls = [call for call in proxy.calls() if call.lane == lane["lane"]]
        assert [(len(call.prompt_ids), len(call.sampled_ids)) for call in calls] == seen[name]


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(proxy: Proxy, engine: Engine, provider: str) -> None:
    """Whole, then streamed with the first answer in the history: one path."""
    litellm = pytest.importorskip("litellm")
    access = proxy.run()
    base = access["base_url"] if provider == "openai" else access["anthropic_base_url"]
    common: dict[str, Any] = {"model": f"{provider}/policy", "api_base": base, "api_key": access["api_key"]}
    common |= {"max_tokens": 12, "tools": CHAT_TOOLS, "num_retries": 0}
    answer = litellm.completion(messages=GO, **common)
    said = answer.choices[0].message.model_dump(exclude_none=True)
    messages = [*GO, said, {"role": "user", "content": "go on"}]
    chunks = list(litellm.completion(messages=messages, stream=True, **common))
    text = litellm.stream_chunk_builder(chunks).choices[0].message.content or ""
    as_logged(proxy, engine, 2)
    first, second = proxy.calls()
    assert answer.usage.completion_tokens == len(first.sampled_ids)
    assert (second.parent, second.fork_reason) == (first.call, None)
    assert {call.lane for call in (first, second)} == {access["lane"]}
    with proxy.journal() as journal:
        recorded = journal.exchange(second.call)
    assert recorded is not None and recorded.answer is not None and text == recorded.answer.get("content", "")


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens(proxy: Proxy, engine: Engine, stream: bool) -> None:
    """As many as asked for, the likeliest first, the sampled one with its recorded log-prob; sampling is the same."""
    access = proxy.run()
    client = openai.OpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)
    body: dict[str, Any] = {"model": "policy", "messages": GO, "max_tokens": 6, "seed": 3}
    client.chat.completions.create(**body)
    entries: list[Any] = []
    if stream:
        for chunk in client.chat.completions.create(**body, logprobs=True, top_logprobs=4, stream=True):
            for choice in chunk.choices:
                entries += (choice.logprobs.content or []) if choice.logprobs else []
    else:
        logprobs = client.chat.completions.create(**body, logprobs=True, top_logprobs=4).choices[0].logprobs
        assert logprobs is not None
        entries = list(logprobs.content or ())
    as_logged(proxy, engine, 2)
    plain, call = proxy.calls()
    assert (call.sampled_ids, call.logprobs) == (plain.sampled_ids, pytest.approx(plain.logprobs, abs=1e-6))
    assert len(entries) == len(call.sampled_ids)
    for entry, logprob in zip(entries, call.logprobs, strict=True):
        top = [other.logprob for other in entry.top_logprobs]
        assert len(top) == 4 and top == sorted(top, reverse=True)
        assert entry.logprob == pytest.approx(logprob, abs=1e-5)
        if entry.logprob > top[-1]:
            assert entry.token in [other.token for other in entry.top_logprobs]


def test_grammars_are_refused_by_name(proxy: Proxy, engine: Engine) -> None:
    access = proxy.run()
    client = openai.OpenAI(base_url=access["base_url"], api_key=access["api_key"], max_retries=0)
    with pytest.raises(openai.BadRequestError, match="vLLM") as refused:
        client.chat.completions.create(model="policy", messages=GO, tools=CHAT_TOOLS, tool_choice="required")
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="vLLM") as refused:
        client.chat.completions.create(model="policy", messages=GO, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with anthropic.Anthropic(base_url=proxy.url, api_key=access["api_key"], max_retries=0) as other:
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            other.messages.create(
                model="policy", max_tokens=8, messages=GO, tools=MESSAGE_TOOLS, tool_choice={"type": "any"}
            )
