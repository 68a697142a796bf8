"""Tree speed by itself: a run of 300 calls that grows to 1M tokens, against a per-token dict trie and list compares.

Run: `.venv/bin/python benchmarks/tree.py`. Prints one JSON object. Raw tokens are prompt + sampled ids summed over calls.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

import numpy as np

from gyre_sdk.records import CallId, VersionSpan
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall

TOKENS, CALLS, ANSWER = 1_000_000, 300, 500


def chain(lanes: int = 1) -> list[SampledCall]:
    """Make the calls; with several lanes, lanes take turns and share a system prompt of 2,000 tokens."""
    generator = np.random.default_rng(0)
    made: dict[int, list[SampledCall]] = {}
    for lane in range(lanes):
        size = TOKENS // lanes
        history = generator.integers(0, 150_000, size, dtype=np.int32)
        history[:2_000] = np.arange(2_000)
        history[2_000] = lane
        made[lane] = [
            SampledCall(
                CallId(f"l{lane}c{number:04}"),
                history[: end - ANSWER].copy(),
                history[end - ANSWER : end].copy(),
                [-0.5] * ANSWER,
                [VersionSpan(0, 0, ANSWER)],
            )
            for number, end in enumerate(np.linspace(20_000 // lanes + 3_000, size, CALLS // lanes).astype(int))
        ]
    return [call for turn in zip(*made.values(), strict=True) for call in turn]


def best(work: Callable[[], object], times: int = 5) -> float:
    """Return the shortest of several runs, in seconds."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def list_compare(calls: list[list[int]]) -> int:
    """Verify each call against the one before, as Python lists."""
    known = 0
    for before, after in itertools.pairwise(calls):
        known += after[: len(before)] == before
    return known


def dict_trie(sequence: list[int]) -> dict:
    """Insert one sequence token by token."""
    root: dict = {}
    node = root
    for token in sequence:
        node = node.setdefault(token, {})
    return root


def main() -> None:
    """Measure and print."""
    calls = chain()
    raw = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in calls)
    build = best(lambda: RunTree.from_calls(calls))
    tree = RunTree.from_calls(calls)
    lanes = chain(4)
    raw_lanes = sum(len(call.prompt_ids) + len(call.sampled_ids) for call in lanes)
    build_lanes = best(lambda: RunTree.from_calls(lanes))
    lists = [call.prompt_ids.tolist() + call.sampled_ids.tolist() for call in calls[-40:]]
    raw_lists = sum(map(len, lists[:-1]))
    compared = best(lambda: list_compare(lists), 2)
    trie = best(lambda: dict_trie(lists[-1]), 1)
    print(
        json.dumps(
            {
                "calls": len(calls),
                "raw_tokens": raw,
                "unique_tokens": tree.unique_tokens,
                "build_ms": round(build * 1e3, 1),
                "verified_tokens_per_s": round(raw / build),
                "four_lanes_tokens_per_s": round(raw_lanes / build_lanes),
                "list_compare_tokens_per_s": round(raw_lists / compared),
                "dict_trie_tokens_per_s": round(len(lists[-1]) / trie),
                "select_and_paths_ms": round(best(lambda: select(tree)) * 1e3, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
