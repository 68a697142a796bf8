"""The real programs work through the real proxy: every id on record, every conversation a lane, every turn a path.

An engine plays the model (`plays.py`), so each program does what its recording shows: tools that it really runs,
sub-agents, a hand-off, a compaction while it works, a second start that goes on with the first one's session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from proxy_engine import ScriptedEngine
from tokenizers import Tokenizer

from clients import plays, programs, walks
from clients.programs import Program
from clients.record import Start
from clients.touring import Sent, Toured, assert_agrees, assert_lanes_extend, tour
from gyre_sdk.tree import RunTree

MAIN = ("main", "main", None, "")
WC = "1 1 6 a.txt"
"""What `wc a.txt` prints."""


@dataclass(frozen=True)
class Expected:
    """A program, how it is started, and what must be on record then."""

    program: Callable[[], Program]
    walk: plays.Walk
    starts: Sequence[Start]
    lanes: Sequence[tuple[str, str, str | None, str]]
    """Role, name, parent's name, and what the call that started the lane says."""
    turns: dict[str, int]
    """Calls by lane name."""
    leaves: dict[str, int]
    """Paths of the tree by lane name."""
    shown: str
    """A tool's output that the last call of the main conversation, or of who took it over, was shown."""
    answers: Sequence[str]
    """What each start prints."""
    forks: Sequence[tuple[str, str]] = field(default_factory=tuple)


_SIDE_CALLS = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""}
_SMALL_WINDOW = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "50000", **_SIDE_CALLS}
_HAND_OFF = (
    MAIN,
    ("subagent", "review", "main", "I look."),
    ("subagent", "writer", "main", "I hand over."),
)
_AGENTS_TURNS, _AGENTS_LEAVES = {"main": 2, "review": 2, "writer": 2}, {"main": 1, "review": 1, "writer": 1}
EXPECTED = {
    "claude_code": Expected(
        programs.claude_code,
        plays.claude_code,
        [Start(walks.TASK, environment=_SMALL_WINDOW), Start(walks.FOLLOW_UP, ("--continue",), _SIDE_CALLS)],
        [
            MAIN,
            ("side", "title", "main", ""),
            ("subagent", "subtask one", "main", "I delegate."),
            ("subagent", "subtask two", "main", "I delegate."),
            ("main-summary", "main-summary", "main", "I look again."),
        ],
        {"main": 7, "title": 1, "subtask one": 2, "subtask two": 2, "main-summary": 1},
        {"main": 2, "title": 1, "subtask one": 1, "subtask two": 1, "main-summary": 1},
        WC,
        [plays.REPORT, "Goodbye."],
        [("main", "compaction")],
    ),
    "codex": Expected(
        programs.codex,
        plays.codex,
        [
            Start(walks.TASK, ("-c", "model_auto_compact_token_limit=20000")),
            Start(walks.FOLLOW_UP, ("resume", "--last")),
        ],
        [
            MAIN,
            ("subagent", "subagent", "main", "I delegate."),
            ("subagent", "subagent", "main", "I delegate."),
            ("main-summary", "main-summary", "main", "I read."),
        ],
        {"main": 9, "subagent": 4, "main-summary": 1},
        {"main": 2, "subagent": 2, "main-summary": 1},
        WC,
        [plays.REPORT, "Goodbye."],
        [("main", "compaction")],
    ),
    "mini_swe_agent": Expected(
        programs.mini_swe_agent,
        plays.mini_swe_agent,
        [Start(walks.TASK)],
        [MAIN],
        {"main": 3},
        {"main": 1},
        WC,
        ["I hand in."],
    ),
    "openai_agents, responses": Expected(
        programs.openai_agents,
        plays.openai_agents,
        [Start(walks.TASK, ("responses",))],
        _HAND_OFF,
        _AGENTS_TURNS,
        _AGENTS_LEAVES,
        "a.txt",
        [plays.REPORT],
    ),
    "openai_agents, chat": Expected(
        programs.openai_agents,
        plays.openai_agents,
        [Start(walks.TASK, ("chat",))],
        _HAND_OFF,
        _AGENTS_TURNS,
        _AGENTS_LEAVES,
        "a.txt",
        [plays.REPORT],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_program_works_and_all_of_it_is_on_record(name: str, model: Path, tmp_path: Path) -> None:
    expected, program = EXPECTED[name], EXPECTED[name].program()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with ScriptedEngine(plays.play(expected.walk, model)) as engine:
        toured = await tour(program, expected.starts, tmp_path, model, engine.url)
    assert [end.code for end in toured.ended] == [0] * len(expected.starts), toured.ended
    assert all(text in end.output for text, end in zip(expected.answers, toured.ended, strict=True)), toured.ended
    assert toured.refusals == []
    log = {item.request["request_id"]: Sent(item.prompt, item.sampled) for item in engine.log}
    assert len(log) == len(engine.log)
    assert_agrees(toured, log)
    assert _lanes(toured, tokenizer) == sorted(expected.lanes, key=str)
    assert_lanes_extend(toured, expected.forks)
    names = {lane.lane: lane.name for lane in toured.lanes}
    assert Counter(names[call.lane] for call in toured.calls) == expected.turns
    lane_of = {call.call: names[call.lane] for call in toured.calls}
    assert Counter(lane_of[leaf] for leaf in RunTree.from_calls(toured.calls).leaves()) == expected.leaves
    assert expected.shown in _tools_said(toured, tokenizer)


def _lanes(toured: Toured, tokenizer: Tokenizer) -> list[tuple[str, str, str | None, str]]:
    """Return role, name, parent's name and the starting call's words of each lane, sorted."""
    names = {lane.lane: lane.name for lane in toured.lanes}
    said = {call.call: _words(tokenizer, call.sampled_ids) for call in toured.calls}
    found = [
        (
            lane.role,
            lane.name,
            names[lane.parent] if lane.parent else None,
            said[lane.parent_call] if lane.parent_call else "",
        )
        for lane in toured.lanes
    ]
    return sorted(found, key=str)


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return plays.words(tokenizer.decode(ids, skip_special_tokens=False).removesuffix(plays.END))


def _tools_said(toured: Toured, tokenizer: Tokenizer) -> str:
    """Return what tools said, as the last prompt of the run shows it."""
    text = tokenizer.decode(toured.calls[-1].prompt_ids, skip_special_tokens=False)
    return "\n".join(said for said in plays.Prompt.of(text).users if "<tool_response>" in said)
