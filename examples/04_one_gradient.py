"""One step of the flow: a closed group becomes a unit, the unit a loss and a gradient of the policy.

python examples/04_one_gradient.py STORE MODEL [GROUP]      (needs gyre-sdk[train])
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

import gyre_sdk as gyre
from gyre_sdk.trainer.units import Sealer


def main() -> None:
    """Print the loss of a group's units and the norm of their gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="with groups: `gyre run -n 8` makes one, the demo many")
    parser.add_argument("model", help="folder of the policy that sampled")
    parser.add_argument("group", nargs="?", help="else the first whose rewards differ")
    given = parser.parse_args()

    policy = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    with gyre.Journal(given.store, "r") as journal:
        names = [given.group] if given.group else list(dict.fromkeys(run.group for run in journal.runs() if run.group))
        for name in names:
            sealed = Sealer(j_max=5, seed=0).seal(journal, name, [run.run for run in journal.runs(group=name)])
            print(f"group {name}: units: {len(sealed.units)}; not trained: {dict(sealed.dropped)}")
            if sealed.units:
                break
        else:
            parser.error(f"{given.store} has no group to train on: its runs need scores that differ")
    loss = torch.zeros(())
    for row in (row for unit in sealed.units for row in unit.rows):
        ids_1T = torch.tensor(row.ids, dtype=torch.long)[None]
        logp_T = policy(input_ids=ids_1T).logits[0, :-1].log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]
        logp_K = logp_T[torch.tensor(row.targets, dtype=torch.long) - 1]
        ratio_K = (logp_K - torch.tensor(row.logprobs)).exp()  # 1 for a policy that has not moved since it sampled
        loss = loss - (torch.tensor(row.weights) * ratio_K * row.advantage).sum()
    runs = sum(unit.runs for unit in sealed.units)
    (loss / runs).backward()
    norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
    print(f"runs: {runs}, loss {loss.item() / runs:.4f}, gradient norm {norm.item():.4f}")


if __name__ == "__main__":
    main()
