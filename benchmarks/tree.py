"""What a run's tree costs: gyre's, TRL's `TreeRow`, the graph of `verifiers`, a row per call, and what numpy has to do at least.

    python benchmarks/tree.py [--peers] [--quick] [--rounds N] [--only growth,beside]

Two parts. `growth`: 300 calls that grow to 1M tokens, built and selected from, and the memory that the tree holds. `beside`: all
systems on one run of about 47M raw tokens. Every system is a process of its own and is measured in every round; figures are
medians over rounds, ratios are against systems of the same rounds, CPU time tells how busy the machine was. Each is checked:
one that finds another number of different tokens is not measured. `--peers` installs `verifiers`, pinned, into an environment
of its own under `~/.cache/gyre/bench`; `TreeRow` comes with the training extra. Prints one JSON object, and tables on standard
error.

Raw tokens are prompt + sampled ids summed over calls. In `chain` every call extends the one before; in `branches` every second
call is a sub-agent's with an end of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import report
from proxy.children import Child, ChildError
from proxy.systems import install
from trees.histories import SHAPES, History, history

HERE = Path(__file__).resolve().parent
OURS, LIMIT, ROWS, TRL, VERIFIERS = "gyre", "numpy", "rows", "TreeRow", "verifiers"
SCRIPTS = {
    OURS: "trees/ours.py",
    LIMIT: "trees/numpy_limit.py",
    ROWS: "trees/call_rows.py",
    TRL: "peers/trl_tree_row.py",
    VERIFIERS: "peers/verifiers_graph.py",
}
_PARTS = ("growth", "beside")
_SECONDS = 0.6
"""A run of 300 calls and 1M tokens is built and selected from within this."""
_UNIQUE_BYTES = _SAMPLED_BYTES = 8


def main() -> None:
    """Measure and print."""
    options = _options()
    names = [OURS, LIMIT, ROWS, TRL, *([VERIFIERS] if options.peers else [])]
    result: dict[str, Any] = {"quick": options.quick, "cores": os.cpu_count(), "rounds": options.rounds, "problems": {}}
    quick = (20_000, 30, 50)
    parts = {"growth": ([OURS, LIMIT], (1_000_000, 300, 500)), "beside": (names, (307_000, 300, 500))}
    for part in options.only:
        systems, sizes = parts[part]
        sizes = quick if options.quick else sizes
        result[part] = {shape: _measured(shape, sizes, systems, options.rounds, result) for shape in options.shapes}
    result["aims"] = list(_aims(result.get("growth", {})))
    _tables(result, names)
    print(json.dumps(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also install and measure packages that gyre does not use")
    parser.add_argument("--quick", action="store_true", help="small runs: whether it works, not how fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--only", type=report.chosen(_PARTS), default=list(_PARTS), help="sections, separated by commas"
    )
    parser.add_argument("--shapes", type=report.chosen(SHAPES), default=list(SHAPES), help="kinds of runs, likewise")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


def _measured(
    shape: str, sizes: tuple[int, int, int], names: list[str], rounds: int, result: dict[str, Any]
) -> dict[str, Any]:
    """Measure systems on a run, in turn within every round."""
    run = history(shape, *sizes)
    report.say(f"{shape}: {len(run.calls)} calls, {run.raw_tokens} raw tokens, {run.unique_tokens} different")
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    found: dict[str, Any] = {"calls": len(run.calls), "raw_tokens": run.raw_tokens, "unique_tokens": run.unique_tokens}
    found["sampled_tokens"] = run.sampled_tokens
    with _running(names, shape, sizes, result["problems"]) as children:

        def ask(name: str, word: str) -> Any:
            """Return a system's answer; one that fails is stopped being asked."""
            try:
                answer = children[name].ask(word)
            except ChildError as error:
                result["problems"][name] = f"{word} of {shape}: {error}"
                del children[name]
                return None
            return answer

        for _ in range(rounds):
            for name in list(children):
                answer = ask(name, "round")
                if answer is not None and _right(name, answer["unique"], run):
                    told[name].append(answer)
                elif answer is not None:
                    result["problems"][name] = f"found {answer['unique']} different tokens in {shape}"
                    del children[name]
        if OURS in children:
            found["memory"] = ask(OURS, "memory")
        if TRL in children:
            found["pack_seconds"] = ask(TRL, "pack")
    found["systems"] = {
        name: {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
        for name, answers in told.items()
        if answers
    }
    return found


def _right(name: str, unique: int, run: History) -> bool:
    """Tell whether a system found what is there. TreeRow parts one token early at every fork; rows share nothing."""
    if name == ROWS:
        return unique == run.raw_tokens
    return run.unique_tokens <= unique <= run.unique_tokens + (len(run.calls) if name == TRL else 0)


@contextmanager
def _running(
    names: list[str], shape: str, sizes: tuple[int, int, int], problems: dict[str, str]
) -> Iterator[dict[str, Child]]:
    """Start systems over a run; stop them at the end. One that does not start is named in `problems`."""
    children: dict[str, Child] = {}
    with ExitStack() as stack:
        for name in names:
            if name == TRL and importlib.util.find_spec("trl") is None:
                problems[name] = "trl is not installed; pip install 'gyre-sdk[train]'"
                continue
            try:
                python = install("verifiers") if name == VERIFIERS else Path(sys.executable)
                command = [str(python), str(HERE / SCRIPTS[name]), shape, *map(str, sizes)]
                child = Child(command, HERE, {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"})
            except (ChildError, OSError, subprocess.CalledProcessError) as error:
                problems[name] = str(error)
                continue
            stack.callback(child.kill)
            children[name] = child
        yield children


def _aims(growth: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every aim: its name, the value, the limit, and whether it holds."""
    for shape, found in growth.items():
        if OURS not in found["systems"]:
            continue
        seconds = round(found["systems"][OURS]["seconds"], 3)
        yield _aim(f"{shape}: seconds to build and select", seconds, _SECONDS)
        bound = _UNIQUE_BYTES * found["unique_tokens"] + _SAMPLED_BYTES * found["sampled_tokens"]
        share = round(found["memory"]["peak"] / bound, 3)
        yield _aim(f"{shape}: share of 8 bytes per unique token + 8 per sampled", share, 1.0)


def _aim(name: str, value: float, limit: float) -> dict[str, Any]:
    return {"aim": name, "value": value, "limit": limit, "met": value <= limit}


def _tables(result: dict[str, Any], names: list[str]) -> None:
    for part in (part for part in _PARTS if part in result):
        columns: dict[str, dict[str, Any]] = {}
        for shape, found in result[part].items():
            seconds = {name: told["seconds"] for name, told in found["systems"].items()}
            ours = seconds.get(OURS, 0.0)
            columns[f"{shape} ms"] = {name: f"{1e3 * value:.1f}" for name, value in seconds.items()}
            columns[f"{shape} CPU ms"] = {name: f"{1e3 * told['cpu']:.1f}" for name, told in found["systems"].items()}
            columns[f"{shape} x gyre"] = {name: f"{value / ours:.2f}" for name, value in seconds.items() if ours}
            rate = {name: found["raw_tokens"] / value / 1e6 for name, value in seconds.items()}
            columns[f"{shape} Mtok/s"] = {name: f"{value:.1f}" for name, value in rate.items()}
        report.say(f"\n{part}")
        report.table(columns, names, 17)
    report.verdicts(result)


if __name__ == "__main__":
    main()
