"""The shared cases of trees to their end: the rows that training gets, their masks, log-probs and weights."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from tree_inputs import call, case, from_case

from gyre_sdk.credit import Row, trajectories
from gyre_sdk.records import CallId, CallStatus, RunId
from gyre_sdk.tree import RunTree, SampledCall

R = RunId("r")


def rows_of(calls: list[SampledCall]) -> list[Row]:
    """Return all rows of a run, the same for every order of arrival, ordered by their leaf."""
    found = []
    for order in itertools.islice(itertools.permutations(calls), 0, None, 7):
        rows = sorted(trajectories(R, order, j_max=None), key=lambda row: row.leaf)
        found.append(
            [(row.leaf, row.ids.tolist(), mask(row), row.logprobs.tolist(), row.weights.tolist()) for row in rows]
        )
    # The draws decide which row owns what several share: the same seed draws the same.
    assert all(other == found[0] for other in found)
    return rows


def mask(row: Row) -> list[int]:
    """Return 1 per target of a row and 0 per token of context."""
    targets = set(row.targets.tolist())
    return [int(at in targets) for at in range(len(row.ids))]


def targets(row: Row) -> list[int]:
    """Return the token ids that a row trains."""
    found: list[int] = row.ids[row.targets].tolist()
    return found


def with_logprobs(found: dict[str, Any]) -> list[SampledCall]:
    logprobs = found["input"]["logprobs"]
    return [from_case(entry, logprobs=logprobs[entry["call"]]) for entry in found["input"]["calls"]]


def test_a_chain_becomes_one_row():
    """tree-chain-becomes-one-row: one row, one log-prob per target, none after the last token."""
    found = case("tree", "tree-chain-becomes-one-row")
    expected = found["expected"]
    (row,) = rows_of(with_logprobs(found))
    assert row.ids.tolist() == expected["input_ids"] and mask(row) == expected["mask"]
    assert row.logprobs.tolist() == pytest.approx(expected["logprobs_at_masked_positions"])
    assert len(row.logprobs) == len(row.targets) and row.targets.max() < len(row.ids)


def test_a_call_that_is_still_being_written_takes_its_place_once_it_is_there():
    """tree-chain-becomes-one-row: c3 arrives while c2 is being written, with some of its tokens on disk or none."""
    calls = with_logprobs(case("tree", "tree-chain-becomes-one-row"))
    first, second, third, fourth = calls
    for tokens in ([], [5]):
        cut = call("c2", second.prompt_ids.tolist(), tokens, status=CallStatus.STREAMING)
        early = RunTree.from_calls([first, third, cut, fourth])
        assert early.parent(CallId("c3")) == ("c2" if tokens else "c1")
        assert [mask(row)[4] for row in trajectories(R, [first, third, cut, fourth])] == [int(bool(tokens))]
    assert RunTree.from_calls([first, third, second, fourth]).parent(CallId("c3")) == "c2"


def test_a_broken_chain_has_two_rows():
    """tree-chain-becomes-one-row, broken: what was sent again after an edit is context."""
    found = case("tree", "tree-chain-becomes-one-row")
    broken, expected = found["input"]["broken_chain"], found["expected"]["broken_chain"]
    prompts = {"c3": broken["replace_c3_prompt"], "c4": broken["then_c4_prompt"]}
    entries = [{**entry, "prompt": prompts.get(entry["call"], entry["prompt"])} for entry in found["input"]["calls"]]
    rows = rows_of([from_case(entry) for entry in entries])
    assert [row.ids.tolist() for row in rows] == expected["leaves"]
    assert [mask(row) for row in rows] == expected["masks"]
    assert sum(len(row.targets) for row in rows) == expected["trainable_total"]


def test_a_compaction_trains_its_summary_once():
    """tree-compaction-replaces-history: the summary is a target before the cut and context after it."""
    found = case("tree", "tree-compaction-replaces-history")
    calls, expected = [from_case(entry) for entry in found["input"]["calls"]], found["expected"]
    rows = {row.leaf: row for row in rows_of(calls)}
    assert {leaf: row.ids.tolist() for leaf, row in rows.items()} == expected["leaves"]
    assert {f"{leaf} path": targets(row) for leaf, row in rows.items()} == expected["trainable"]
    assert sum(len(row.targets) for row in rows.values()) == expected["trainable_total"] == 10
    assert {weight for row in rows.values() for weight in row.weights.tolist()} == {1 / 10}
    summary = [at for at, token in enumerate(rows["c5"].ids.tolist()) if token in (11, 12, 13)]
    assert len(summary) == 3 and not set(summary) & set(rows["c5"].targets.tolist())
    assert RunTree.from_calls(calls).shared(CallId("c3"), CallId("c5")) == expected["shared_prefix_length"]


@pytest.mark.parametrize("key", ["calls", "variant_calls"])
def test_a_rollback_trains_every_sampling_event(key):
    """tree-rollback-longest-prefix: equal tokens at one position are as many terms as they were sampled."""
    found = case("tree", "tree-rollback-longest-prefix")
    calls = [from_case(entry) for entry in found["input"][key]]
    expected = found["expected"] if key == "calls" else found["expected"]["variant"]
    rows = rows_of(calls)
    assert sum(len(row.targets) for row in rows) == expected["trainable_total"]
    if key == "calls":
        terms = Counter(str(at) for row in rows for at in row.targets.tolist())
        assert terms == expected["loss_terms_by_position"]
    else:
        assert [row.leaf for row in rows] == expected["leaves"]
    tree = RunTree.from_calls(calls)
    parent, length = ("c3", 8) if key == "calls" else ("c2", 7)
    assert expected["c4_parent"].startswith(f"{parent} (match length {length})")
    assert tree.parent(CallId("c4")) == parent and len(tree.ids(CallId(parent))) == length


def test_interleaved_agents_have_a_row_each():
    """tree-subagent-shares-system-prompt: the sub-agent's answer is a target in its own row and context in its parent's."""
    found = case("tree", "tree-subagent-shares-system-prompt")
    calls, expected = [from_case(entry) for entry in found["input"]["calls"]], found["expected"]
    rows = {row.leaf: row for row in rows_of(calls)}
    assert len(rows) == expected["number_of_training_rows"]
    assert {leaf: row.ids.tolist() for leaf, row in rows.items()} == expected["leaves"]
    assert {f"{leaf} path": targets(row) for leaf, row in rows.items()} == expected["trainable"]
    assert targets(rows["m2"]).count(55) == expected["weight_of_55_in_m2_path"]
    assert RunTree.from_calls(calls).shared(CallId("m2"), CallId("s2")) == expected["common_prefix_m2_s2"]
