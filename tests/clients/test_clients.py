"""The real programs run to their end against a scripted provider, and still ask what the recordings hold."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lanes_kit import MemoryRun, parsed, structure

from clients import record
from clients.programs import claude_code
from clients.scripted_provider import Reply, scripted_provider
from gyre_sdk.harness.proxy.lanes.loading import load_classifier


def lanes(lines: list[dict[str, Any]]) -> list[list[tuple[str, str, str | None]]]:
    """Return role, name and parent of the lanes of each run, in any order."""
    found = parsed(lines)
    runs = []
    for number in sorted({line.run for line in found}):
        run = MemoryRun(load_classifier("auto"))
        for line in found:
            if line.run == number:
                run.exchange(line)
        runs.append(sorted((role, name, parent) for role, name, parent, _ in structure(run, run.lanes)))
    return runs


@pytest.mark.parametrize("name", record.RECORDINGS)
async def test_a_program_asks_what_was_recorded(name: str) -> None:
    """Run once more, it sends as many requests to the same paths, and they make the same lanes.

    How sub-agents that run at once mix differs from time to time. Where this fails for a new version of a program:
    record it again, and see what its preset must learn.
    """
    recorded = [json.loads(line) for line in (record.GOLDEN / f"{name}.jsonl").read_text().splitlines()]
    again = await record.record(name)
    paths, known = (Counter((line["method"], line["path"]) for line in lines) for lines in (again, recorded))
    assert paths == known
    assert lanes(again) == lanes(recorded)


async def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """Its time is up while it waits for a tool."""
    workspace = tmp_path / "work"
    workspace.mkdir()
    slow = (("Bash", {"command": "sleep 600", "description": "wait"}),)
    async with scripted_provider(lambda heard: Reply("", slow)) as provider:
        ended = await claude_code().run(provider.base_url, "key", workspace, "wait", seconds=5)
    assert ended.code is None
    assert "did not end within 5 s" in ended.output


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_where_npm_is_missing_tests_skip_and_ci_fails(
    ci: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("GYRE_CLIENTS", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="npm is not installed"):
        claude_code.__wrapped__()


def test_recordings_hold_no_keys_and_no_long_texts_of_the_programs() -> None:
    for path in record.GOLDEN.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            assert "authorization" not in line.lower()
            assert "x-api-key" not in line.lower()
            assert all(len(text) < 4 * record.LONG for text in strings(json.loads(line)["body"]) if text[:1] != "{")


def strings(value: Any) -> list[str]:
    """Return all texts in a value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in inner for text in strings(item)]
