"""A row per call, as exporters without a tree write them: ids, mask, log-probs. Made and let go, not kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trees.histories import History
from trees.rounds import Work, serve


def prepare(run: History) -> Work:
    """Return what makes the rows."""
    calls = [(run.prompt(call), run.messages[call.answer]) for call in run.calls]

    def work() -> Mapping[str, Any]:
        size = made = 0
        for prompt, answer in calls:
            ids = np.concatenate([prompt, answer])
            mask = np.zeros(len(ids), np.bool_)
            mask[len(prompt) :] = True
            logprobs = np.zeros(len(ids), np.float32)
            logprobs[len(prompt) :] = -0.5
            made += len(ids)
            size += ids.nbytes + mask.nbytes + logprobs.nbytes
        return {"unique": made, "bytes": size}

    return work


if __name__ == "__main__":
    serve(prepare)
