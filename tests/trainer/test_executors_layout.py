"""The packed forest, its blocks and its pieces: every path right, every pair of query and key once, nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from executors_kit import comb, forests, row
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.attention import blocks as blocks_module
from gyre_sdk.trainer.attention.blocks import blocks
from gyre_sdk.trainer.attention.layout import Forest, groups, plant
from gyre_sdk.trainer.attention.pieces import Parts, pieces
from gyre_sdk.trainer.units import Row

FEW = 4
"""Token ids in these rows: prefixes are shared by chance too."""


def path_of(forest: Forest, token: int) -> np.ndarray:
    above = np.arange(token + 1)
    return forest.ids_U[above[forest.end_U[: token + 1] > token]]


@settings(max_examples=60, deadline=None)
@given(rows=forests(vocab=FEW))
def test_every_target_is_predicted_on_its_own_path(rows: list[Row]) -> None:
    forest = plant(rows)
    wanted = [(place, at) for place, one in enumerate(rows) for at in one.targets]
    assert forest.index_K.tolist() == list(range(len(wanted)))
    for at, label, (place, position) in zip(forest.at_K, forest.label_K, wanted, strict=True):
        ids = rows[place].ids
        assert label == ids[position] and forest.position_U[at] == position - 1
        assert path_of(forest, int(at)).tolist() == ids[:position].tolist()
    needed = [one.ids[: one.targets[-1]].tolist() for one in rows if len(one.targets)]
    assert forest.unique == len({tuple(ids[:size]) for ids in needed for size in range(1, len(ids) + 1)})
    assert forest.raw == sum(map(len, needed)) and forest.pairs == int((forest.position_U + 1).sum())
    assert forest.raw_pairs == sum(len(ids) * (len(ids) + 1) // 2 for ids in needed)


@settings(max_examples=60, deadline=None)
@given(
    rows=forests(vocab=FEW),
    before=st.sampled_from([0, 3]),
    window=st.sampled_from([None, 1, 2, 5, 100]),
    tile=st.sampled_from([2, 3, 512]),
)
def test_every_pair_is_in_one_block(rows: list[Row], before: int, window: int | None, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_module, "_TILE", tile)
        forest = plant(rows)
        forest = replace(forest, depth_S=forest.depth_S + before)
        found = blocks(forest, before, window)
    token = np.arange(forest.unique)
    times = np.zeros((forest.unique, before + forest.unique), int)
    first = np.zeros(forest.unique, int)
    for number, block in enumerate(found):
        queries, keys = np.arange(block.query_stop - block.query)[:, None], np.arange(block.key_stop - block.key)
        seen = keys <= queries if block.causal else keys >= queries + (block.band if block.band is not None else -1000)
        assert seen.any(1).all(), "a query without keys has no log-sum-exp"
        assert block.key_stop <= before or block.key >= before
        times[block.query : block.query_stop, block.key : block.key_stop] += seen
        if block.causal:
            first[block.query : block.query_stop] += 1
            assert all(other.causal for other in found[:number])
    assert (first == 1).all()
    wanted = (token[None] <= token[:, None]) & (token[:, None] < forest.end_U[None])
    wanted = np.concatenate([np.ones((forest.unique, before), bool), wanted], 1)
    if window is not None:
        position = np.concatenate([np.arange(before), forest.position_U])
        wanted &= forest.position_U[:, None] - position[None] < window
    assert (times == wanted).all()


@settings(max_examples=60, deadline=None)
@given(rows=forests(vocab=FEW), limit=st.integers(1, 40))
def test_pieces_hold_every_token_once_and_hang_from_their_path(rows: list[Row], limit: int) -> None:
    whole = plant(rows)
    found = pieces(whole, limit)
    parts = Parts(whole)
    held = np.concatenate([np.arange(*one) for piece in found for one in piece.ranges] or [np.empty(0, np.int64)])
    assert sorted(held.tolist()) == list(range(whole.unique))
    targets: list[int] = []
    paths: list[np.ndarray] = []
    for place, piece in enumerate(found):
        assert piece.size <= limit and piece.above < place
        above = np.empty(0, np.int32) if piece.above < 0 else paths[piece.above]
        assert len(above) == piece.before
        forest = parts.part(piece.ranges)
        paths.append(np.concatenate([above, forest.ids_U[: piece.kept]]))
        targets += forest.index_K.tolist()
        for at, index in zip(forest.at_K, forest.index_K, strict=True):
            wanted = path_of(whole, int(whole.at_K[index]))
            assert np.concatenate([above, path_of(forest, int(at))]).tolist() == wanted.tolist()
            assert forest.position_U[at] == len(wanted) - 1
            assert forest.label_K[forest.index_K == index] == whole.label_K[index]
    assert sorted(targets) == list(range(len(whole.at_K)))


@settings(max_examples=40, deadline=None)
@given(rows=forests(vocab=FEW), tokens=st.integers(1, 120))
def test_groups_hold_every_row_once_within_the_budget(rows: list[Row], tokens: int) -> None:
    found = groups(rows, tokens)
    assert sorted(place for part in found for place in part) == [n for n, one in enumerate(rows) if len(one.targets)]
    for part in found:
        assert len(part) == 1 or plant(rows, part).unique <= tokens


def test_all_branches_of_a_prefix_meet_it_in_one_block() -> None:
    """The heaviest path is one stretch, and all others meet the prefix together."""
    rows = comb(40, 8, 6)
    forest = plant(rows)
    assert (forest.raw, forest.unique, forest.kv_rows) == (8 * 45, 40 + 8 * 5, 40 + 8 * 45)
    found = blocks(forest)
    assert sum(block.causal for block in found) == 8
    assert [block[:4] for block in found if not block.causal] == [(45, 80, 0, 40)]


def test_rows_of_a_million_tokens_are_compared_not_walked() -> None:
    """Twelve rows along one history: as many segments as branches, whatever the lengths."""
    history = np.random.default_rng(0).integers(0, 1 << 15, 1_000_000).astype(np.int32)
    rows = []
    for place in range(12):
        ids = history[: 80_000 * (place + 1)].copy()
        ids[-50:] = place  # a side call of its own
        rows.append(row(ids, np.arange(len(ids) - 50, len(ids))))
    forest = plant(rows)
    assert len(forest.start_S) <= 2 * 12 and forest.raw > 6 * forest.unique
    assert len(pieces(forest, 4096)) < 2 * forest.unique / 4096 + 24


def test_a_first_token_that_is_a_target_is_refused() -> None:
    with pytest.raises(TrainerError, match="first token"):
        plant([row([1, 2], [0, 1])])


CASES = Path(__file__).parent / "executor_cases.json"


@pytest.mark.parametrize("case", json.loads(CASES.read_text()), ids=lambda case: case["kind"])
def test_kinds_of_trees(case: dict) -> None:
    """Rows as selection gives them: (path, trained positions) -> packed tokens and the number of loss terms."""
    forest = plant([row(ids, targets) for ids, targets in case["rows"]])
    assert forest.unique == case["packed"] and len(forest.at_K) == case["terms"]
    terms = {int(label): int((forest.label_K == label).sum()) for label in forest.label_K}
    assert terms == {int(label): count for label, count in case["terms_by_token"].items()}
