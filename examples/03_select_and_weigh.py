"""One step of the flow: bounded selection, ownership and the two-level mean, for every run of a store.

python examples/03_select_and_weigh.py STORE [J_MAX]
"""

from __future__ import annotations

import sys
from collections import defaultdict

import gyre_sdk as gyre
from gyre_sdk.credit import group_credit, trajectories


def main(store: str, j_max: str = "5") -> None:
    """Print each group's advantages and each run's selected trajectories."""
    with gyre.Journal(store, "r") as journal:
        groups = defaultdict(list)
        for run in journal.runs():
            if run.group is not None:
                groups[run.group].append(run)
        for group, runs in groups.items():
            credit = group_credit(runs)
            print(f"group {group}: {credit.scored} of {credit.started} runs scored, mean reward {credit.mean}")
            for run in runs:
                advantage = credit.advantages.get(run.run)
                print(f"  run {run.run}: reward {run.reward}, advantage {advantage}")
                for row in trajectories(run.run, journal.calls(run.run), j_max=int(j_max), advantage=advantage):
                    print(
                        f"    {row.role:18} trains {len(row.targets):4} of {len(row.ids):4} tokens, weight {row.weights.sum():.3f}"
                    )


if __name__ == "__main__":
    main(*sys.argv[1:])
