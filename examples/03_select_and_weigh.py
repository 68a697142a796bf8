"""One step of the flow: bounded selection, ownership and the two-level mean, for every run of a store.

python examples/03_select_and_weigh.py STORE [J_MAX]
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import gyre_sdk as gyre
from gyre_sdk.credit import group_credit, trajectories


def main() -> None:
    """Print each group's advantages and each run's selected trajectories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="with groups: `gyre run -n 8` makes one, the demo many")
    parser.add_argument("j_max", nargs="?", type=int, default=5, help="trajectories of a run at most; 0 for all")
    given = parser.parse_args()

    with gyre.Journal(given.store, "r") as journal:
        groups = defaultdict(list)
        for run in journal.runs():
            if run.group is not None:
                groups[run.group].append(run)
        if not groups:
            parser.error(f"{given.store} has no groups: runs whose rewards are compared")
        for group, runs in groups.items():
            credit = group_credit(runs)
            print(f"group {group}: {credit.scored} of {credit.started} runs scored, mean reward {credit.mean}")
            for run in runs:
                advantage = credit.advantages.get(run.run)
                print(f"  run {run.run}: reward {run.reward}, advantage {advantage}")
                for row in trajectories(run.run, journal.calls(run.run), j_max=given.j_max, advantage=advantage):
                    print(
                        f"    {row.role:18} trains {len(row.targets):4} of {len(row.ids):4} tokens, weight {row.weights.sum():.3f}"
                    )


if __name__ == "__main__":
    main()
