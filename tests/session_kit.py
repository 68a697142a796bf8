"""A recording service on a scripted engine, for tests of sessions; `harness/conftest.py` has its fixtures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from proxy_engine import Finish, ScriptedEngine, Tokens

import gyre_sdk as gyre
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.journal import Journal
from gyre_sdk.records import LaneRecord, RunRecord

QUESTION = [{"role": "user", "content": "Run ls"}]
SAMPLED = 3
"""Tokens of each answer."""


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    """Says the same three tokens to everything."""
    with ScriptedEngine(lambda request, number: [Tokens([40, 41, 2]), Finish()]) as engine:
        yield engine


@pytest.fixture
def service(model: Path, tmp_path: Path, engine: ScriptedEngine) -> Iterator[gyre.ServiceClient]:
    """A service of its own for each test; its store is `s.db` in the test's folder."""
    settings = gyre.ProxySettings(store=tmp_path / "s.db", model=model, replicas=(ReplicaSpec(engine.url, 3),))
    with gyre.serve(settings) as client:
        yield client


def a_task(**changes: Any) -> gyre.Task:
    """Return a task whose reward is 1 once the file `answer` says yes."""
    values: dict[str, Any] = {
        "instruction": "Write yes into answer",
        "name": "answer",
        "scorer": lambda workspace: float(workspace.exec("cat answer 2>/dev/null").stdout.strip() == "yes"),
    }
    return gyre.Task(**(values | changes))


def stored(tmp_path: Path) -> tuple[RunRecord, list[LaneRecord], list[Any]]:
    """Return the one run of the store, its lanes and calls."""
    with Journal(tmp_path / "s.db", "r") as journal:
        (run,) = journal.runs()
        return run, journal.lanes(), list(journal.calls())


def ask(client: openai.OpenAI) -> str:
    """Make one call."""
    return client.chat.completions.create(model="policy", messages=QUESTION).choices[0].message.content or ""  # type: ignore[arg-type]
