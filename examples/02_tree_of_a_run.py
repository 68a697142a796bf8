"""One step of the flow: the recorded calls of a run become its tree, and the tree's leaves its candidate trajectories.

python examples/02_tree_of_a_run.py STORE [RUN]
"""

from __future__ import annotations

import argparse
from collections import Counter

import gyre_sdk as gyre
from gyre_sdk.tree import RunTree, SampledCall


def main() -> None:
    """Print the tree's size and its leaves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="as examples/01_record_a_call.py, `gyre serve` or the demo made it")
    parser.add_argument("run", nargs="?", help="else the one with the most calls")
    given = parser.parse_args()

    with gyre.Journal(given.store, "r") as journal:
        counts = Counter(call.run for call in journal.calls())
        if given.run not in counts and (given.run or not counts):
            parser.error(f"{given.store} has no calls{f' of run {given.run}' if given.run else ''}")
        run = given.run or counts.most_common(1)[0][0]
        calls = [SampledCall.from_record(call) for call in journal.calls(run)]
    tree = RunTree.from_calls(calls)
    print(
        f"run {run}, calls: {len(calls)}, tokens sent and sampled: {tree.raw_tokens}, different ones: {tree.unique_tokens}"
    )
    for path in tree.paths():
        sampled = sum(path.owner(position) is not None for position in range(len(path.ids)))
        print(f"  {path.role:18} {len(path.ids):5} tokens, {sampled:4} of them sampled, ends with call {path.leaf}")


if __name__ == "__main__":
    main()
