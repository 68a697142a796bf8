"""The parts without torch: spans, stop strings, and the slot table against a model of what each slot holds."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre_sdk.trainer.engines.sequence import append_version, find_stop
from gyre_sdk.trainer.engines.slots import SlotTable


@given(st.lists(st.sampled_from("abc")))
def test_spans_say_the_version_of_every_token(versions):
    spans = []
    for version in versions:
        append_version(spans, version)
    assert [span.version for span in spans for _ in range(span.start, span.end)] == versions
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])][: len(spans)]
    assert all(a.version != b.version for a, b in itertools.pairwise(spans))


@given(
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_string_is_found_in_the_piece_that_completes_it(pieces, stops):
    text = ""
    for piece in pieces:
        text += piece
        found = find_stop(text, len(piece), stops)
        assert (found is not None) == any(stop in text for stop in stops)
        if found is not None:
            assert text.find(found) == min(text.find(stop) for stop in stops if stop in text)
            return


class Slots(RuleBasedStateMachine):
    """Every slot's keys are tagged with the ids they were computed from; the table must never claim more."""

    @initialize(reuse=st.booleans())
    def start(self, reuse):
        self.table = SlotTable(6, 64, reuse=reuse)
        self.reuse = reuse
        self.held = [[] for _ in range(6)]  # what the cache tensors hold: (salt, id) per position
        self.owners: dict[int, tuple[str | None, list[int]]] = {}

    def apply(self, move):
        source, target = self.held[move.source], self.held[move.target]
        if move.swap:
            head = source[: move.length], target[: move.length]
            self.held[move.source] = head[1] + source[len(head[1]) :]
            self.held[move.target] = head[0] + target[len(head[0]) :]
        else:
            self.held[move.target] = source[: move.length] + target[move.length :]

    @rule(
        first=st.integers(0, 2), length=st.integers(1, 40), change=st.integers(0, 40), salt=st.sampled_from([None, "s"])
    )
    def join(self, first, length, change, salt):
        if len(self.owners) == 6:
            return
        ids = [first * 100 + i + (50 if i >= change else 0) for i in range(length)]
        slot, moves = self.table.place(np.array(ids, np.int32), salt)
        for move in moves:
            self.apply(move)
        assert slot not in self.owners
        assert self.table.cached_S[slot] < length
        assert self.reuse or self.table.cached_S[slot] == 0
        self.owners[slot] = salt, ids
        assert slot < self.table._reach(len(self.owners))

    @rule()
    def compute(self):
        """A step: every running row gets all its missing keys."""
        for slot, (salt, ids) in self.owners.items():
            cached = int(self.table.cached_S[slot])
            self.held[slot] = self.held[slot][:cached] + [(salt, token) for token in ids[cached:]]
            self.table.cached_S[slot] = len(ids)

    @rule(data=st.data())
    def leave(self, data):
        if self.owners:
            slot = data.draw(st.sampled_from(sorted(self.owners)))
            self.table.release(slot)
            del self.owners[slot]

    @rule()
    def compact(self):
        for move, old, new in self.table.compact():
            self.apply(move)
            assert new < old
            self.owners[new] = self.owners.pop(old)

    @rule()
    def forget(self):
        self.table.forget()
        self.held = [[] for _ in self.held]

    @invariant()
    def claims_are_true(self):
        for slot, held in enumerate(self.held):
            cached = int(self.table.cached_S[slot])
            tokens = self.table.tokens_SC[slot, :cached].tolist()
            assert [token for _, token in held[:cached]] == tokens
            assert {salt for salt, _ in held[:cached]} <= {self.table._salt_S[slot]}
            assert bool(self.table.owned_S[slot]) == (slot in self.owners)
        for slot, (salt, ids) in self.owners.items():
            assert self.table.tokens_SC[slot, : len(ids)].tolist() == ids
            assert self.table._salt_S[slot] == salt


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_wire_loads_no_torch():
    code = (
        "import sys, gyre_sdk.trainer.engines.wire, gyre_sdk.trainer.engines.sequence, "
        "gyre_sdk.trainer.engines.embedded; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
