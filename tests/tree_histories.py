"""Recorded histories of other agents as calls: what was sent and answered, message by message, and why we think so.

A history is turned into ids in two ways: one id per different message, or by a real tokenizer in ChatML.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tree_inputs import call

from gyre_sdk.tree import SampledCall

DATA = Path(__file__).parents[2] / "shared" / "data"
Encode = Callable[[str, bool], list[int]]
"""A message, and whether the model is to write it -> its ids; those of a written one begin with what the prompt ends with."""


@dataclass(frozen=True)
class Turn:
    """A call, as messages."""

    name: str
    prompt: tuple[str, ...]
    answer: str
    role: str = "main"
    parent: str | None = None
    """The call that it continues according to its source, where the source tells."""


def data(*path: str) -> Path:
    """Return a file or folder of the data, or skip."""
    found = DATA.joinpath(*path)
    if not found.exists():
        pytest.skip(f"{found} is missing")
    return found


def by_message() -> Encode:
    """Give each different message an id of its own."""
    known: dict[str, int] = {}
    return lambda message, written: [known.setdefault(message, len(known))]


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    packed = data("tokenizers", "qwen3", "tokenizer.json.gz").read_bytes()
    return Tokenizer.from_str(gzip.decompress(packed).decode())


def by_token() -> Encode:
    """Encode messages in ChatML with the tokenizer of Qwen3."""

    def ids(text: str) -> list[int]:
        found: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids
        return found

    def encode(message: str, written: bool) -> list[int]:
        fields = json.loads(message)
        body = ids(
            f"{fields['content']}<|im_end|>"
        )  # by itself: what the model writes is never joined with what asks it
        return body if written else [*ids(f"<|im_start|>{fields['role']}\n"), *body]

    return encode


def as_calls(turns: Sequence[Turn], encode: Encode, *, opening: Sequence[int] = ()) -> list[SampledCall]:
    """Turn a history into calls; `opening` are the ids that ask the model to write."""
    made = []
    for turn in turns:
        prompt = [token for message in turn.prompt for token in encode(message, False)]
        made.append(call(turn.name, [*prompt, *opening], encode(turn.answer, True), role=turn.role))
    return made


def opening_ids() -> list[int]:
    """Return the ids that ask the model to write, in ChatML."""
    ids: list[int] = _tokenizer().encode("<|im_start|>assistant\n", add_special_tokens=False).ids
    return ids


def _message(role: str, content: Any, calls: Any = None) -> str:
    """Return a message in one form, whatever way its source writes text and tool calls."""
    if isinstance(content, list):
        content = "".join(part.get("text") or json.dumps(part, sort_keys=True) for part in content)
    for one in calls or ():
        content = f"{content or ''}\n{one['function']['name']} {one['function']['arguments']}"
    return json.dumps({"role": role, "content": content or ""})


def swe_agent(path: Path) -> list[Turn]:
    """Read a trajectory of SWE-agent whose steps hold the messages that each call sent."""
    record = json.loads(path.read_text())
    sent = [
        tuple(_message(item["role"], item["content"], item.get("tool_calls")) for item in step["messages"])
        for step in record["trajectory"]
    ]
    last = record["history"][-2]
    answers = [later[len(earlier)] for earlier, later in itertools.pairwise(sent)]
    answers.append(_message(last["role"], last["content"], last.get("tool_calls")))
    return [
        Turn(f"c{number:02}", prompt, answer) for number, (prompt, answer) in enumerate(zip(sent, answers, strict=True))
    ]


def openhands(folder: Path) -> list[Turn]:
    """Read the calls that OpenHands logged, a file each."""
    turns = []
    for number, path in enumerate(sorted(folder.glob("*.json"))):
        record = json.loads(path.read_text())
        answer = record["response"]["choices"][0]["message"]
        prompt = tuple(_message(item["role"], item["content"], item.get("tool_calls")) for item in record["messages"])
        turns.append(Turn(f"c{number:02}", prompt, _message("assistant", answer["content"], answer.get("tool_calls"))))
    return turns


def claude_code(path: Path, *, role: str = "main", prefix: str = "") -> list[Turn]:
    """Read a transcript of Claude Code: every answer is a call whose prompt is what its links lead back through.

    An answer of several blocks is written as several entries with one message id; links may lead through some of them only.
    """
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    known = {entry["uuid"]: entry for entry in entries if "uuid" in entry}

    def said(entry: dict[str, Any]) -> str | None:
        inside = entry.get("message")
        if entry.get("type") not in ("user", "assistant") or not isinstance(inside, dict):
            return None
        content = inside["content"]
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True)

    def answer_of(entry: dict[str, Any]) -> str | None:
        return entry["message"].get("id") or entry["uuid"] if entry.get("type") == "assistant" else None

    def upward(entry: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
        while entry is not None:
            yield entry
            entry = known.get(entry.get("parentUuid") or "")

    last = {owner: entry for entry in entries if (owner := answer_of(entry)) is not None}
    whole: dict[str, list[str]] = {}
    for entry in entries:
        if (owner := answer_of(entry)) is not None:
            whole.setdefault(owner, []).append(said(entry) or "")
    turns = []
    for name, entry in last.items():
        chain = [(answer_of(step), said(step)) for step in reversed(list(upward(entry)))]
        owners = [owner for owner, _ in chain if owner is not None]
        messages: list[str] = []
        for place, (owner, text) in enumerate(chain):
            if owner is not None and owner == name:
                break
            if owner is not None and owner not in [other for other, _ in chain[:place]]:
                messages.append(_message("assistant", "\n".join(whole[owner])))
            elif owner is None and text is not None:
                messages.append(_message("user", text))
        before = owners[: owners.index(name)]
        parent = f"{prefix}{before[-1]}" if before else None
        answer = _message("assistant", "\n".join(whole[name]))
        turns.append(Turn(f"{prefix}{name}", tuple(messages), answer, role, parent))
    return turns
