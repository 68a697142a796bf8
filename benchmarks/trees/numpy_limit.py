"""What any tree has to do at least: compare every prompt with the path that it continues, and keep what is new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trees.histories import History
from trees.rounds import Work, serve

_STRIDE = 1 << 16


def prepare(run: History) -> Work:
    """Return what verifies every call against the trunk, knowing beforehand where it leaves it."""
    calls = [(run.prompt(call), run.messages[call.answer], call.side) for call in run.calls]
    longest = max(len(prompt) + len(answer) for prompt, answer, _ in calls)

    def work() -> Mapping[str, Any]:
        trunk, size, unique = np.empty(longest, np.int32), 0, 0
        kept = []
        for prompt, answer, side in calls:
            for start in range(0, size, _STRIDE):
                stop = min(size, start + _STRIDE)
                assert not (prompt[start:stop] != trunk[start:stop]).any()
            new = len(prompt) - size + len(answer)
            unique += new
            if side:
                kept.append((prompt[size:].copy(), answer.copy()))
            else:
                trunk[size : len(prompt)] = prompt[size:]
                trunk[len(prompt) : size + new] = answer
                size += new
        return {"unique": unique}

    return work


if __name__ == "__main__":
    serve(prepare)
