"""A proxy over an engine that says given texts in the vocabulary of the `model` fixture, for tests with real SDKs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
from proxy_engine import Finish, ScriptedEngine, Step, Tokens
from proxy_kit import Proxy, running
from tokenizers import Tokenizer

from gyre_sdk.records import CallRecord

THINK = "<think>\nThe agent ran ls.\n</think>\n\n"
BASH_CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'
TWO_CALLS = BASH_CALL + '\n<tool_call>\n{"name": "read", "arguments": {"path": "naïve 北京"}}\n</tool_call>'
SCHEMAS: dict[str, dict[str, Any]] = {
    "bash": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    "read": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
RESPONSE_TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": f"{name}.", "parameters": schema, "strict": False}
    for name, schema in SCHEMAS.items()
]
MESSAGE_TOOLS: list[Any] = [
    {"name": name, "description": f"{name}.", "input_schema": schema} for name, schema in SCHEMAS.items()
]
GO: list[Any] = [{"role": "user", "content": "Run ls"}]
Said = str | list[Step]


class Talk:
    """A proxy, the engine behind it, and clients of the real SDKs."""

    def __init__(self, proxy: Proxy, engine: ScriptedEngine, tokenizer: Tokenizer) -> None:
        self.proxy, self.engine, self.tokenizer = proxy, engine, tokenizer
        self.access = proxy.run()
        self.key = {"api_key": self.access["api_key"], "max_retries": 0}

    def openai(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.access["base_url"], **self.key, **more})

    def async_openai(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.access["base_url"], **{**self.key, **more})

    def anthropic(self, **more: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.access["anthropic_base_url"], **{**self.key, **more})

    def async_anthropic(self, **more: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.proxy.url, **{**self.key, **more})

    def calls(self) -> list[CallRecord]:
        """Return the calls of the run, held against what the engine was sent and what it sampled."""
        calls = self.proxy.calls(self.access["run"])
        logged = {item.request["request_id"].rsplit("-", 2)[0]: item for item in self.engine.log}
        assert logged.keys() == {call.call for call in calls}
        whole = {call.call: call.prompt_ids + call.sampled_ids for call in calls}
        for call in calls:
            generation = logged[call.call]
            assert (call.prompt_ids, call.sampled_ids) == (generation.prompt, generation.sampled)
            assert len(call.logprobs) == len(call.sampled_ids)
            assert call.lane == self.access["lane"]
            if call.parent is not None:
                assert call.prompt_ids[: call.shared] == whole[call.parent][: call.shared]
                assert (call.fork_reason is None) == (call.shared == len(whole[call.parent]))
        return calls

    def chain(self, count: int) -> list[CallRecord]:
        """Return the calls, each of which must continue the one before to its last token."""
        calls = self.calls()
        assert len(calls) == count
        assert [call.fork_reason for call in calls] == [None] * count
        assert [call.parent for call in calls] == [None, *(call.call for call in calls[:-1])]
        for above, below in pairwise(calls):
            whole = above.prompt_ids + above.sampled_ids
            assert below.prompt_ids[: len(whole)] == whole
        return calls

    def texts(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


@contextmanager
def talking(model: Path, tmp_path: Path, *said: Said, size: int = 3, **more: Any) -> Iterator[Talk]:
    """Run a proxy over an engine that says these in turn, the last one for ever, in chunks of `size` tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def steps(text: Said) -> list[Step]:
        if not isinstance(text, str):
            return text
        ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids
        return [*(Tokens(ids[at : at + size]) for at in range(0, len(ids), size)), Finish()]

    with ScriptedEngine(lambda request, number: steps(said[min(number, len(said)) - 1])) as engine:
        with running(model, tmp_path / "store.db", engine.url, **more) as proxy:
            yield Talk(proxy, engine, tokenizer)


def ids_of(model: Path, text: str) -> list[int]:
    """Return the ids of a text in the vocabulary of a model folder."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
