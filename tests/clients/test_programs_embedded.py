"""The real programs against the real engine: a random model says nothing of use, and each program still ends cleanly.

Both sides' logs agree on every id. Prompts of programs are long, so the model is as small as models come.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine_process import Engine, running_engine

from clients import programs, walks
from clients.programs import Program
from clients.record import Start
from clients.touring import Sent, assert_agrees, assert_lanes_extend, tour
from gyre_sdk.tree import RunTree

ABORT_PREFIX = "generate-tokens-"


@dataclass(frozen=True)
class Loop:
    """A program, its start, and what its loop does when the model never calls a tool."""

    program: Callable[[], Program]
    start: Start
    calls: int = 1
    forks: Sequence[tuple[str, str]] = ()
    """Lane and reason."""


LOOPS = {
    "claude_code": Loop(programs.claude_code, Start(walks.TASK)),
    "codex": Loop(programs.codex, Start(walks.TASK)),
    # It leaves out an answer that calls no tool, and says what is wrong with it.
    "mini_swe_agent": Loop(
        programs.mini_swe_agent,
        Start(walks.TASK, ("-c", "mini.yaml", "-c", "agent.step_limit=3")),
        3,
        [("main", "client_edit")] * 2,
    ),
    "openai_agents, responses": Loop(programs.openai_agents, Start(walks.TASK, ("responses",))),
    "openai_agents, chat": Loop(programs.openai_agents, Start(walks.TASK, ("chat",))),
}


@pytest.fixture(scope="module")
def engine(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all programs."""
    log = tmp_path_factory.mktemp("log") / "requests.jsonl"
    with running_engine(weights, log, "--seed", "0", "--max-model-len", "65536") as started:
        yield started


@pytest.mark.parametrize("name", LOOPS)
async def test_a_program_ends_cleanly_whatever_the_model_says(
    name: str, weights: Path, engine: Engine, tmp_path: Path
) -> None:
    loop, before = LOOPS[name], _logged(engine)
    toured = await tour(loop.program(), [loop.start], tmp_path, weights, engine.url)
    assert [end.code for end in toured.ended] == [0], toured.ended
    assert toured.refusals == []
    assert_agrees(toured, {name: sent for name, sent in _logged(engine).items() if name not in before})
    assert [(lane.role, lane.name) for lane in toured.lanes] == [("main", "main")]
    assert len(toured.calls) == loop.calls
    assert_lanes_extend(toured, loop.forks)
    assert len(RunTree.from_calls(toured.calls).leaves()) == 1 + len(loop.forks)


def _logged(engine: Engine) -> dict[str, Sent]:
    """Return what the engine has written down, by the proxy's ids of attempts."""
    lines = map(json.loads, engine.request_log.read_text().splitlines()) if engine.request_log.exists() else ()
    return {
        line["request_id"].removeprefix(ABORT_PREFIX): Sent(line["prompt_ids"], line["sampled_ids"]) for line in lines
    }
