"""The demo over several seeds, each in a fresh folder: what the README quotes.

python benchmarks/demo.py --seeds 0 1 2 [--fresh]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DEMO = Path(__file__).resolve().parent.parent / "examples" / "quickstart" / "demo.py"


def main() -> None:
    """Run the seeds one after the other and print a table and the raw lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--split", choices=["heldout", "validation"], default="heldout")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to the demo")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory(prefix="gyre-demo-") as folder:
        for seed in arguments.seeds:
            command = [sys.executable, str(DEMO), "--plain", "--seed", str(seed), "--split", arguments.split]
            command += ["--dir", f"{folder}/seed-{seed}", *(part for pair in arguments.set for part in ("--set", pair))]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            line = done.stdout.splitlines()[-1]
            print(f"seed {seed}: {line}", flush=True)
            lines.append((seed, json.loads(line)))
    print("\n| seed | success T=1 | greedy | reward T=1 | runs | calls | sampled | trained | minutes |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed, line in lines:
        moved = " | ".join(
            f"{line[f'{key}_before']} → {line[f'{key}_after']}" for key in ("success", "greedy", "reward")
        )
        counts = " | ".join(str(line[key]) for key in ("runs", "calls", "sampled_tokens", "trained_tokens", "minutes"))
        print(f"| {seed} | {moved} | {counts} |")


if __name__ == "__main__":
    main()
