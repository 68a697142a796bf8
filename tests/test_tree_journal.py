"""A tree that grew while its calls were written equals the one that is built again from the store."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tree_inputs import recorded_runs

from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import CallId, CallStatus, ForkReason, LaneId, LaneRecord, RunId, RunRecord, Sampling
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall

RUN = RunId("r")


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def open_store(path: Path) -> Journal:
    journal = Journal(path)
    lane = LaneRecord(LaneId("l"), RUN, "main", "main", None, 0.0)
    journal.open_run(RunRecord(RUN, "task", 0.0), lane, "key").result()
    return journal


def write(journal: Journal, made: SampledCall, known: dict[str, SampledCall]) -> None:
    """Record a call as the proxy does; its parent is what was recorded before and shares most with it."""
    prompt = made.prompt_ids.tolist()
    parent, shared = None, 0
    for other in known.values():
        whole = [*other.prompt_ids.tolist(), *other.sampled_ids.tolist()]
        common = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), None)
        common = min(len(prompt), len(whole)) if common is None else common
        if common > shared:
            parent, shared = other, common
    reason = None
    if parent is not None and shared < len(parent.prompt_ids) + len(parent.sampled_ids):
        reason = ForkReason.CLIENT_EDIT
    journal.call_received(
        CallIntent(
            made.call, RUN, LaneId(made.lane), made.role, parent.call if parent else None, reason, shared, prompt,
            Sampling(), {}, [], 1.0,
        )
    )  # fmt: skip
    chunk = TokenChunk(0, made.sampled_ids.tolist(), list(made.logprobs), list(made.versions))
    ended = made.status if made.status in (CallStatus.FAILED, CallStatus.ABORTED) else CallStatus.COMPLETE
    journal.call_ended(made.call, ended, at=2.0, sampled=chunk).result()
    known[made.call] = made


def everything(tree: RunTree, seed: int) -> list[object]:
    """Return all that a tree tells of its calls, and what is selected from it."""
    told = [
        (
            name, tree.ids(name).tolist(), tree.spans(name), tree.parent(name), tree.untrained(name), tree.fork(name),
            tree.versions(name).tolist(), repr(tree.logprobs(name).tolist()), tree.role(name),
        )
        for name in tree.calls()
    ]  # fmt: skip
    chosen = [(row.leaf, row.owned_spans) for row in select(tree, j_max=3, seed=seed)]
    return [told, chosen, tree.candidates(), tree.leaves(), tree.unique_tokens, tree.raw_tokens]


@settings(max_examples=12, deadline=None)
@given(calls=recorded_runs(max_calls=6), seed=st.integers(0, 2**31))
def test_rebuilt_from_the_store_equals_grown_call_by_call(folder, calls, seed):
    shuffler = random.Random(seed)
    path = folder / f"{shuffler.getrandbits(64):x}.db"
    grown, known = RunTree(), {}
    with open_store(path) as journal:
        for made in calls:
            write(journal, made, known)
            record = journal.call(made.call)
            assert record is not None
            grown.insert(record)
            grown.candidates()
            if made.status is CallStatus.DELIVERED:
                journal.call_delivered(made.call).result()
                grown.settle(made.call, CallStatus.DELIVERED)
        seen_live = everything(RunTree.from_calls(journal.calls(RUN)), seed)
    with Journal(path, "r") as journal:
        records = list(journal.calls(RUN))
    path.unlink()
    again = everything(RunTree.from_calls(records), seed)
    assert everything(grown, seed) == again == seen_live
    shuffler.shuffle(records)
    assert everything(RunTree.from_calls(records), seed) == again


def test_an_open_call_is_in_the_tree_with_what_is_durable_of_it_and_no_target(tmp_path):
    with open_store(tmp_path / "store.db") as journal:
        call = CallId("c")
        journal.call_received(
            CallIntent(call, RUN, LaneId("l"), "main", None, None, 0, [1, 2], Sampling(), {}, [], 1.0)
        )
        journal.tokens_sampled(call, TokenChunk(0, [3, 4], [-0.5, -0.25], [])).result()
        tree = RunTree.from_calls(journal.calls(RUN))
    assert tree.ids(call).tolist() == [1, 2, 3, 4] and tree.untrained(call) is not None
    assert tree.candidates() == []
