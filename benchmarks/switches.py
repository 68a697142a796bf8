"""What agents see of role switches: nothing, and how long their calls then take.

    python benchmarks/switches.py [--runs 20] [--calls 30] [--tokens 16] [--cells 3] [--every 1.0] [--drain 0.1]

Real agents over a real `gyre serve` and embedded engines with a small random policy, once quiet and once while cells go
over from serving to training and back about every second. It ends with an error where an agent had one, where an
answer differs from the quiet one's by a byte, where a token is missing, double or without its version, or where
`gyre fsck` finds something. Results as JSON on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), *(str(ROOT / "tests" / name) for name in ("trainer", "trainer/cells"))]

from cells_kit import Fleet, Forced, Hand, check_calls, converse_all, fleet  # noqa: E402
from report import say, table  # noqa: E402
from training_kit import make_model  # noqa: E402

from gyre_sdk.events import SwitchMeasured  # noqa: E402
from gyre_sdk.journal import Journal  # noqa: E402


def main() -> None:
    """Run both ways and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=20, help="agents at a time")
    parser.add_argument("--calls", type=int, default=30, help="of each agent")
    parser.add_argument("--tokens", type=int, default=16, help="sampled by each call")
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between switches")
    parser.add_argument("--drain", type=float, default=0.1, help="seconds that calls may take to end where they are")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", initializer_range=0.2)
        with fleet(folder, folder / "model", options.cells) as served:
            result = measure(served, options)
    result["options"] = vars(options)
    print(json.dumps(result, indent=1))
    figures = ("calls", "seconds", "call_p50_ms", "call_p95_ms", "call_max_ms", "moved_calls", "switches")
    table(
        {name: {way: result[way][name] for way in ("quiet", "switching")} for name in figures},
        ("quiet", "switching"),
        14,
    )
    say(f"phases of a switch, median ms: {result['phases_ms']}")


def measure(served: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Run the agents quiet, then switching; compare and check."""
    runs, calls, tokens = options.runs, options.calls, options.tokens
    converse_all(served.service, 2, 2, tokens)  # everything is loaded once
    began = time.monotonic()
    quiet = converse_all(served.service, runs, calls, tokens)
    seconds = time.monotonic() - began
    result: dict[str, Any] = {"quiet": figures(served, quiet, calls, tokens, seconds) | {"switches": 0}}

    ended = threading.Event()
    rounds = [options.cells - 1, *([-1, 1] * (options.cells - 2)), 1 - options.cells]
    forced = Forced([cells for cells in rounds if cells], live=lambda: not ended.is_set())
    hand = Hand(*(f"cell-{number}" for number in range(1, options.cells)))
    before = served.switches()
    with served.manager(served.cells(), hand, decide=forced, drain_s=options.drain, period_s=options.every):
        began = time.monotonic()
        found = converse_all(served.service, runs, calls, tokens)
        seconds = time.monotonic() - began
        ended.set()
        switches = served.switches() - before
    if [said for _, said in found] != [said for _, said in quiet]:
        sys.exit("answers differ from those without switches")
    result["switching"] = figures(served, found, calls, tokens, seconds) | {"switches": switches}
    phases: dict[str, list[float]] = {}
    for event in served.events:
        if isinstance(event, SwitchMeasured):
            for name, value in event.phases.items():
                phases.setdefault(f"{event.to}: {name}", []).append(1000 * value)
    result["phases_ms"] = {name: round(statistics.median(values), 1) for name, values in phases.items()}
    return result


def figures(
    served: Fleet, found: list[tuple[str, list[str]]], calls: int, tokens: int, seconds: float
) -> dict[str, float]:
    """Check what is on record of these runs, and return how long their calls took."""
    moved = check_calls(served.store, [run for run, _ in found], calls, tokens, {0})
    with Journal(served.store, "r") as journal:
        took = sorted(
            1000 * (call.ended_at - call.received_at)
            for run, _ in found
            for call in journal.calls(run)
            if call.ended_at is not None
        )
    return {
        "calls": len(took),
        "seconds": round(seconds, 1),
        "call_p50_ms": round(statistics.median(took), 1),
        "call_p95_ms": round(took[int(0.95 * len(took))], 1),
        "call_max_ms": round(took[-1], 1),
        "moved_calls": moved,
    }


if __name__ == "__main__":
    main()
