"""Gyre's tree: built from ready-made arrays, then selected from."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from typing import Any

from gyre_sdk.records import CallId, VersionSpan
from gyre_sdk.select import select
from gyre_sdk.tree import RunTree, SampledCall
from trees.histories import History
from trees.rounds import serve


def calls_of(run: History) -> list[SampledCall]:
    """Return the calls of a run."""
    made = []
    for number, call in enumerate(run.calls):
        answer = run.messages[call.answer]
        made.append(
            SampledCall(
                CallId(f"c{number:05}"),
                run.prompt(call),
                answer,
                [-0.5] * len(answer),
                [VersionSpan(0, 0, len(answer))],
                role="subagent" if call.side else "main",
            )
        )
    return made


class Building:
    """Builds the tree of a run and selects from it."""

    def __init__(self, run: History) -> None:
        self._calls = calls_of(run)

    def __call__(self) -> Mapping[str, Any]:
        """Build and select."""
        started = time.perf_counter()
        tree = RunTree.from_calls(self._calls)
        built = time.perf_counter()
        rows = [(row.ids, row.positions, row.logprobs, row.versions) for row in select(tree)]
        selected = time.perf_counter()
        return {
            "unique": tree.unique_tokens,
            "rows": len(rows),
            "built": built - started,
            "selected": selected - built,
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes that a tree holds, and the most that were held while it was built, calls not counted."""
        tracemalloc.start()
        tree = RunTree.from_calls(self._calls)
        held, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"held": held, "peak": peak, "unique": tree.unique_tokens}


if __name__ == "__main__":
    serve(Building, {"memory": Building.memory})
