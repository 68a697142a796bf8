"""One step of the flow: an agent's call goes through the proxy and is on record with its exact token ids.

python examples/01_record_a_call.py --model DIR --replica http://127.0.0.1:8000 --store runs.db
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gyre_sdk as gyre


def main() -> None:
    """Ask once, in a session, and print what is on record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder: the proxy needs its tokenizer")
    parser.add_argument("--replica", required=True, help="gyre-engine, or vLLM started with --enable-scale-out")
    parser.add_argument("--store", type=Path, required=True)
    arguments = parser.parse_args()

    task = gyre.Task(instruction="Say hello.", name="hello", scorer=lambda workspace: 1.0)
    proxy = gyre.ProxySettings(
        store=arguments.store, model=arguments.model, replicas=(gyre.ReplicaSpec(arguments.replica, 0),)
    )
    with gyre.session(task, proxy=proxy, workspace="local") as agent:
        answer = agent.openai().chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.instruction}], max_tokens=16
        )
        print("the agent got:", repr(answer.choices[0].message.content))
    print("the run ended:", agent.result.status, "reward", agent.result.reward)

    with gyre.Journal(arguments.store, "r") as journal:
        for call in journal.calls(agent.run):
            print(
                call.role, "sent", call.prompt_ids, "sampled", call.sampled_ids, "by version", call.versions[0].version
            )


if __name__ == "__main__":
    main()
