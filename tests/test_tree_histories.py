"""Trees of recorded histories of other agents, and of histories of the same kinds made here."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from tree_histories import (
    Turn,
    as_calls,
    by_message,
    by_token,
    claude_code,
    data,
    openhands,
    opening_ids,
    swe_agent,
)
from tree_inputs import call

from gyre_sdk.records import CallId
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall
from gyre_sdk.tree.outline import outline

MARSHMALLOW = ("histories", "swe-agent", "marshmallow-1867.function_calling_replace_from_source.traj")


def build(turns: list[Turn], how: str) -> RunTree:
    """Build the tree in an order of arrival that is not the recorded one."""
    calls = as_calls(turns, by_message()) if how == "message" else as_calls(turns, by_token(), opening=opening_ids())
    random.Random(0).shuffle(calls)
    return RunTree.from_calls(calls)


def parents(tree: RunTree) -> dict[str, str | None]:
    return {name: tree.parent(name) for name in tree.calls()}


@pytest.mark.parametrize("how", ["message", "token"])
def test_an_agent_that_elides_old_output_forks_at_the_first_elision(how):
    """SWE-agent on marshmallow: calls 0 to 4 append; from 5 on each also replaces one older observation."""
    turns = swe_agent(data(*MARSHMALLOW))
    tree = build(turns, how)
    chain = {f"c{number:02}": f"c{number - 1:02}" for number in range(1, 5)}
    assert parents(tree) == {turn.name: chain.get(turn.name) for turn in turns}, "4 of 12 transitions extend"
    assert len(turns) == 13 and sum(parent is not None for parent in parents(tree).values()) == 4
    assert tree.leaves() == [f"c{number:02}" for number in range(4, 13)]
    taken = select(tree, j_max=None)
    assert sorted(len(row.owned_spans) for row in taken) == [1] * 8 + [5]
    assert sum(row.targets for row in taken) == sum(tree.sampled_tokens(name) for name in tree.calls())
    common = [tree.shared(CallId(f"c{number:02}"), CallId(f"c{number + 1:02}")) for number in range(12)]
    if how == "message":
        assert common == [5, 7, 9, 11, 3, 5, 7, 9, 11, 13, 15, 17]
        assert (tree.raw_tokens, tree.unique_tokens) == (208 + 13, 100 + 9), "prompts, then answers"
    else:
        assert common == sorted(common[:4]) + sorted(common[4:]) and common[4] < common[0]
        assert 1.5 < tree.raw_tokens / tree.unique_tokens < 5


def test_what_the_eliding_agent_sent_is_twice_what_was_new():
    """The messages that SWE-agent sent on marshmallow, as it wrote them down, are 2.12 times the different ones."""
    steps = json.loads(data(*MARSHMALLOW).read_text())["trajectory"]
    prompts = [[json.dumps(message) for message in step["messages"]] for step in steps]
    number, sizes = by_message(), {}
    tree = RunTree()
    for place, prompt in enumerate(prompts):
        ids = [number(message, False)[0] for message in prompt]
        sizes.update(zip(ids, map(len, prompt), strict=True))
        tree.insert(call(f"c{place:02}", ids, []))
    assert (tree.raw_tokens, tree.unique_tokens) == (208, 100)
    different = sum(sizes[token] for node in outline(tree, with_ids=True).nodes for token in node.ids or ())
    assert round(sum(len(message) for prompt in prompts for message in prompt) / different, 2) == 2.12


@pytest.mark.parametrize("how", ["message", "token"])
def test_an_agent_that_only_appends_is_one_row(how):
    """OpenHands: every prompt extends the one before and its answer."""
    turns = openhands(data("histories", "openhands", "llm-logs"))
    tree = build(turns, how)
    assert len(turns) == 6 and len(tree.leaves()) == 1
    (row,) = select(tree, j_max=None)
    assert [span.call for span in row.owned_spans] == [turn.name for turn in turns]
    assert tree.unique_tokens == len(row.ids)


@pytest.mark.parametrize("how", ["message", "token"])
def test_an_agent_that_rewrites_answers_has_a_row_per_call(how):
    """OpenHands without native tools: calls are turned into text in the history, so no prompt keeps an answer as it was."""
    turns = openhands(data("histories", "openhands", "nonfncall-llm-logs"))
    tree = build(turns, how)
    assert len(turns) == 4 and tree.leaves() == tree.calls()
    for earlier, later in itertools.pairwise(turns):
        assert later.prompt[: len(earlier.prompt)] == earlier.prompt
        assert tree.shared(CallId(earlier.name), CallId(later.name)) >= tree.prompt_tokens(CallId(earlier.name))
    assert sum(row.targets for row in select(tree)) == sum(tree.sampled_tokens(name) for name in tree.calls())


@pytest.mark.parametrize("how", ["message", "token"])
@pytest.mark.parametrize(
    ("name", "leaves"),
    [("dag_simple", 1), ("dag_resume", 1), ("dag_fork", 2), ("dag_within_fork", 2), ("dag_compact_after_rewind", 3)],
)
def test_the_links_of_a_transcript_are_found_again_in_its_tokens(name, leaves, how):
    """Claude Code: forks, a rewind, a compaction. The tree sees tokens only, the transcript says who continues whom."""
    turns = claude_code(data("histories", "claude-code", f"{name}.jsonl"))
    tree = build(turns, how)
    assert parents(tree) == {turn.name: turn.parent for turn in turns}
    spent = {turn.parent for turn in turns}
    assert tree.leaves() == sorted(turn.name for turn in turns if turn.name not in spent)
    assert len(tree.leaves()) == leaves


def test_six_sub_agents_at_once_keep_their_own_chains():
    """A real session of Claude Code with six sub-agents at work at the same time, in one store in the order of nothing."""
    session = data("histories", "claude-code", "real_worktrees")
    turns = claude_code(next(session.glob("*.jsonl")), prefix="m-")
    for path in sorted(session.glob("*/subagents/*.jsonl")):
        turns += claude_code(path, role="subagent", prefix=f"{path.stem}-")
    tree = build(turns, "message")
    assert parents(tree) == {turn.name: turn.parent for turn in turns}
    roots = [turn for turn in turns if turn.parent is None]
    assert sorted(turn.role for turn in roots) == ["main"] + ["subagent"] * 6
    taken = select(tree, j_max=None)
    assert {row.role for row in taken} == {"main", "subagent"}
    assert sum(row.targets for row in taken) == len(turns)


# -- of our own ----------------------------------------------------------------------------------------------------------


def eliding(turns: int, keep: int, rng: np.random.Generator) -> list[SampledCall]:
    """Make an agent that keeps only its last `keep` observations; older ones are replaced by one id."""
    found, history, seen = [], [1, 2, 3], []
    for number in range(turns):
        prompt = list(history)
        for at in seen[:-keep]:
            prompt[at] = 7
        answer = rng.integers(10, 1000, 3).tolist()
        found.append(call(f"c{number:03}", prompt, answer))
        seen.append(len(history) + len(answer))
        history += [*answer, int(rng.integers(1000, 2000))]
    return found


@pytest.mark.parametrize("keep", [1, 3, 8])
def test_every_elision_is_a_leaf_and_what_came_before_a_chain(keep):
    calls = eliding(30, keep, np.random.default_rng(keep))
    tree = RunTree.from_calls(calls)
    for number, made in enumerate(calls):
        whole = number - 1 if number <= keep else 0  # the first answer comes before the first observation
        assert tree.parent(made.call) == (f"c{whole:03}" if number else None)
    taken = select(tree, j_max=None)
    assert len(taken) == 30 - keep
    assert sum(row.targets for row in taken) == 90
    # The chain, then every call from the first observation on that is not elided in the call before.
    chain = 3 + 4 * keep + 3
    later = [4 * number + 6 - (6 + 4 * (number - keep - 1)) for number in range(keep + 1, 30)]
    assert tree.unique_tokens == chain + sum(later)


def compacting(rounds: int, turns: int, tries: int, rng: np.random.Generator) -> list[SampledCall]:
    """Make an agent that compacts its history after so many turns; the last of its tries at a summary is taken up."""
    found, opening = [], [1, 2]
    history = [*opening, 3]
    for compaction in range(rounds):
        for turn in range(turns):
            answer = rng.integers(10, 10_000, 4).tolist()
            found.append(call(f"r{compaction}t{turn}", history, answer))
            history = [*history, *answer, int(rng.integers(10_000, 20_000))]
        summaries = [rng.integers(10, 10_000, 40).tolist() for _ in range(tries)]
        for number, summary in enumerate(summaries):
            found.append(call(f"r{compaction}s{number}", [*history, 5], summary, role="main-summary"))
        history = [*opening, 6, *summaries[-1][:-1], 8]
    return found


@pytest.mark.parametrize("tries", [1, 3])
def test_compactions_in_a_row_train_each_part_once_and_no_rejected_try(tries):
    calls = compacting(4, 5, tries, np.random.default_rng(tries))
    calls.append(call("end", [*calls[-1].prompt_ids.tolist()[:2], 6, *calls[-1].sampled_ids.tolist()[:-1], 8], [9]))
    tree = RunTree.from_calls(calls)
    assert tree.untrained_counts() == ({"rejected": 4 * (tries - 1)} if tries > 1 else {})
    taken = select(tree, j_max=None)
    assert len(taken) == 5 and sum(row.targets for row in taken) == 4 * (5 * 4 + 40) + 1
