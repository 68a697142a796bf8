"""TRL's `TreeRow`: one sample per call, from ready-made tensors. `add` is timed; `pack`, which lays the trie out, apart.

Arguments: see `trees/rounds.py`. The module is loaded from its file: its package would import a whole trainer first.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import torch
from trees.histories import History
from trees.rounds import serve


def _tree_row() -> Any:
    trl = importlib.util.find_spec("trl")
    assert trl is not None and trl.submodule_search_locations is not None
    path = f"{trl.submodule_search_locations[0]}/experimental/async_grpo/packing.py"
    spec = importlib.util.spec_from_file_location("packing", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.TreeRow


def samples_of(run: History) -> list[dict[str, Any]]:
    """Return the samples of a run."""
    made = []
    for call in run.calls:
        prompt, answer = run.prompt(call), run.messages[call.answer]
        ids = torch.cat([torch.from_numpy(prompt), torch.from_numpy(answer)])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[len(prompt) :] = True
        logprobs = torch.full((len(ids),), -0.5)
        sample = {"input_ids": ids, "completion_mask": mask, "old_log_probs": logprobs}
        made.append({**sample, "advantage": 1.0, "group_id": 0})
    return made


class Folding:
    """Samples of a run, folded into a trie time and again. The last trie is kept, to be laid out."""

    def __init__(self, run: History) -> None:
        torch.set_num_threads(1)
        self._tree_row, self._samples = _tree_row(), samples_of(run)
        self._row: Any = None

    def clear(self) -> None:
        """Let the last trie go."""
        self._row = None

    def __call__(self) -> Mapping[str, Any]:
        """Fold the samples."""
        row = self._row = self._tree_row()
        for sample in self._samples:
            row.add(sample)
        return {"unique": len(row.tokens)}

    def pack(self) -> float:
        """Return the seconds that laying the last trie out takes."""
        started = time.perf_counter()
        self._row.pack()
        return time.perf_counter() - started


if __name__ == "__main__":
    serve(Folding, {"pack": Folding.pack})
