"""One step of the flow: a program that knows nothing of gyre works with one key, and its conversations become lanes.

python examples/05_black_box_agent.py --model DIR --replica http://127.0.0.1:8000 --store runs.db -- claude -p "Look around"

Any program does that reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or Anthropic's variables of that kind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

import gyre_sdk as gyre


def main() -> None:
    """Run a program in a session, and print which lanes its calls were sorted into."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder: the proxy needs its tokenizer")
    parser.add_argument("--replica", required=True, help="gyre-engine, or vLLM started with --enable-scale-out")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--classifier", default="auto", help="auto, claude-code, codex, ..., or module:attribute")
    parser.add_argument("program", nargs="+", help="the program and its arguments, after --")
    arguments = parser.parse_args()

    task = gyre.Task(instruction="Look around.", name="black-box", scorer=lambda workspace: 1.0)
    proxy = gyre.ProxySettings(
        store=arguments.store, model=arguments.model, replicas=(gyre.ReplicaSpec(arguments.replica, 0),)
    )
    with (
        gyre.session(task, proxy=proxy, workspace="local", classifier=arguments.classifier) as agent,
        tempfile.TemporaryDirectory() as folder,
    ):
        subprocess.run(arguments.program, cwd=folder, env={**os.environ, **agent.environment}, check=True)
    print("the run ended:", agent.result.status)

    with gyre.Journal(arguments.store, "r") as journal:
        calls = list(journal.calls(agent.run))
        for lane in journal.lanes(agent.run):
            count = sum(call.lane == lane.lane for call in calls)
            print(f"  {lane.role:12} {lane.name:20} calls: {count}, started by {lane.parent_call or 'the key'}")


if __name__ == "__main__":
    main()
