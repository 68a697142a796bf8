"""One step of the flow: the recorded calls of a run become its tree, and the tree's leaves its candidate trajectories.

python examples/02_tree_of_a_run.py STORE [RUN]
"""

from __future__ import annotations

import sys

import gyre_sdk as gyre
from gyre_sdk.tree import RunTree, SampledCall


def main(store: str, run: str | None = None) -> None:
    """Print the tree's size and its leaves; without a run, of the run with the most calls."""
    with gyre.Journal(store, "r") as journal:
        run = run or max(journal.runs(), key=lambda record: len(list(journal.calls(record.run)))).run
        calls = [SampledCall.from_record(call) for call in journal.calls(run)]
    tree = RunTree.from_calls(calls)
    print(
        f"run {run}: {len(calls)} calls, {tree.raw_tokens} tokens sent and sampled, {tree.unique_tokens} different ones"
    )
    for path in tree.paths():
        sampled = sum(path.owner(position) is not None for position in range(len(path.ids)))
        print(f"  {path.role:18} {len(path.ids):5} tokens, {sampled:4} of them sampled, ends with call {path.leaf}")


if __name__ == "__main__":
    main(*sys.argv[1:])
