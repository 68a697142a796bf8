"""Peak memory of one training step, in a process of its own. Prints one JSON object.

    python -m training.memory SYSTEM SHAPE HIDDEN [--quick]
    python -m training.memory dfs path:131072 0.5B

Growth is what the process takes beyond what it had with the model loaded and a few tokens trained: activations, K/V, gradients of
them, temporary buffers. It leaves out weights and their gradients, which are the same for every system.
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import torch

from training.inputs import half_billion, model, path, shapes
from training.systems import System, objective, system


def main() -> None:
    """Run one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument(
        "shape", help="a name of training.inputs.shapes, `longest:NAME` for its longest row, or `path:TOKENS`"
    )
    parser.add_argument("model", help="hidden size, or 0.5B")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kind, _, name = options.shape.rpartition(":")
    if kind == "path":
        rows = path(int(name))
    else:
        rows = shapes(options.quick)[name]
        if kind == "longest":
            rows = [max(rows, key=lambda row: len(row.ids))]
    policy = half_billion(2) if options.model == "0.5B" else model(int(options.model))
    runner: System = system(options.system, policy)
    small = path(32)
    runner.prepare(small)
    runner.step(small, objective)
    runner.prepare(rows)
    before = _peak()
    started = time.perf_counter()
    runner.step(rows, objective)
    seconds = time.perf_counter() - started
    peak = _peak()
    print(json.dumps({"growth_mib": round(peak - before, 1), "peak_mib": round(peak, 1), "seconds": round(seconds, 1)}))


def _peak() -> float:
    """Return the most memory that was resident so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
