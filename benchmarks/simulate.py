"""What the simulator says about elastic cells, beside what was published, and over a grid.

    python benchmarks/simulate.py [--only rows,bidirl,grid,scale] [--seeds N] [--grid-seeds N] [--part I/N]

`rows`: arXiv:2609.33848's ratios under the paper's own baselines, within 12 % each, and the fair baselines beside them. `bidirl`: how
the gain shrinks with allowed staleness. `grid`: 576 points; elastic is never more than 2 % behind the best fair baseline; where
the tail is long, what was gained and what could have been: a point's ceiling is the best baseline's time over all work at full
use of all cells, or over the time that it would take if every cell could serve and train at once. `--part 2/3` does the second
third of the grid, `--merge FILE...` sums up what parts printed. `scale`: 1,000 cells and 100,000 runs. Prints one JSON object, and tables on standard error.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import report
from msgspec.structs import replace
from simulation import grid, paper

from gyre_sdk.trainer.cells.plan import Policy
from gyre_sdk.trainer.simulate import controls
from gyre_sdk.trainer.simulate.compare import Comparison, compare
from gyre_sdk.trainer.simulate.scenario import Batch, Fleet, Runs, Scenario, Training, read
from gyre_sdk.trainer.simulate.workload import drawn

_PARTS = ("rows", "bidirl", "grid", "scale")
_SCALE_S = 60.0


def main() -> None:
    """Simulate and print."""
    options = _options()
    result: dict[str, Any] = {"aims": [], "problems": {}}
    for part in options.only:
        result[part] = {"rows": _rows, "bidirl": _bidirl, "grid": _grid, "scale": _scale}[part](options, result["aims"])
    report.verdicts(result)
    print(json.dumps(result))


def _rows(options: argparse.Namespace, aims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, Comparison] = {}
    rows = []
    for row in paper.ROWS:
        if row.scenario not in found:
            found[row.scenario] = compare(read(row.scenario), seeds=options.seeds)
        one = paper.judged(row, found[row.scenario])
        rows.append(one)
        report.say(
            f"{row.scenario:>15}  {row.what:<36} paper {one['paper']!s:>13}  simulated {one['simulated']:.2f} ±{one['spread']:.2f}"
            f"  {one['off']:+.1%}"
        )
        aims.append(_aim(f"{row.scenario}: {row.what}", one["simulated"], f"{one['paper']} within 12%", one["met"]))
    for name, comparison in found.items():
        fair = {key: round(comparison.ratios[key].mean, 3) for key in paper.FAIR}
        report.say(f"{name:>15}  fair baselines, elastic's times: {fair}; elastic: {_knobs(comparison)}")
        rows.append(
            {"scenario": name, "fair": fair, "elastic_h": round(comparison.policies["elastic"].makespan_h.mean, 2)}
        )
    return rows


def _bidirl(options: argparse.Namespace, aims: list[dict[str, Any]]) -> list[dict[str, Any]]:
    scenario, rows, alone_h = read("bidirl"), [], 0.0
    for staleness, published in paper.BIDIRL.items():
        asked = replace(scenario, batch=replace(scenario.batch, phi=staleness))
        found = compare(asked, seeds=min(options.seeds, 4), policies=("async_streaming", "async_tuned_streaming"))
        ratio, hours = found.ratios["async_streaming"], found.policies["async_streaming"].makespan_h.mean
        alone_h = alone_h or hours
        row = {
            "staleness": staleness,
            "published": published,
            "simulated": round(ratio.mean, 3),
            "alone_published": paper.BIDIRL_ALONE[staleness],
            "alone_simulated": round(alone_h / hours, 3),
            "tuned_split": round(found.ratios["async_tuned_streaming"].mean, 3),
        }
        rows.append(row)
        report.say(f"         bidirl  {row}  ±{ratio.spread:.2f}")
        near = abs(ratio.mean / published - 1) <= paper.WITHIN
        aims.append(_aim(f"BiDiRL at staleness {staleness}", row["simulated"], f"{published} within 12%", near))
    falling = all(one["simulated"] >= other["simulated"] - 0.02 for one, other in pairwise(rows))
    aims.append(_aim("BiDiRL: the gain shrinks with staleness", [row["simulated"] for row in rows], "falling", falling))
    return rows


def _grid(options: argparse.Namespace, aims: list[dict[str, Any]]) -> dict[str, Any]:
    results = [one for path in options.merge for one in json.loads(path.read_text())["grid"]["results"]]
    for one in () if options.merge else grid.measured(options.grid_seeds, options.part):
        results.append(one)
        mark = "LOSES" if one["ratio"] < grid.LOSS else grid.reason(one) if one["tail"] in grid.LONG else ""
        where = " ".join(f"{axis} {one[axis]:g}" for axis in grid.AXES)
        report.say(
            f"{where}: {one['ratio']:.2f}x of {one['best']}, ceiling {one['ceiling']:.2f}, {one['knobs']} {mark}"
        )
    found = grid.summary(results)
    aims.append(_aim("grid: worst ratio to the best baseline", found["worst"], grid.LOSS, found["worst"] >= grid.LOSS))
    for tail in grid.LONG:
        part = found["tails"][f"{tail:g}"]
        reached = f"{part['reached']} of {part['points']}, mean {part['mean']}"
        aims.append(
            _aim(f"grid: points of tail {tail} at 1.15x or more", reached, "all", part["reached"] == part["points"])
        )
    for name, part in [*found["tails"].items(), ("0.9 of the first grid", found["first_grid"]["tailed"])]:
        report.say(f"tail {name}: {part}")
    report.say(f"long tails below 1.15: {found['tailed_below']}")
    report.say(f"long tails by axis: {found['tailed_by_axis']}")
    return {**found, "results": results}


def _scale(options: argparse.Namespace, aims: list[dict[str, Any]]) -> dict[str, Any]:
    scenario = Scenario(
        name="scale",
        fleet=Fleet(cells=1000, slots=16),
        batch=Batch(groups=500, runs=10, steps=20),
        runs=Runs(3600, 0.7, 0.5, 14400),
        training=Training(batch_s=300),
    )
    workload = drawn(scenario, 0)
    started = time.perf_counter()
    fleet = controls.elastic(Policy()).run(scenario, workload)
    seconds = time.perf_counter() - started
    aims.append(_aim("1,000 cells, 100,000 runs, seconds", round(seconds, 1), _SCALE_S, seconds <= _SCALE_S))
    return {"runs": workload.runs, "seconds": seconds, "switches": fleet.counts.switches}


def _knobs(found: Comparison) -> str:
    return found.policies["elastic"].knobs


def _aim(aim: str, value: Any, limit: Any, met: bool) -> dict[str, Any]:
    return {"aim": aim, "value": value, "limit": limit, "met": met}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=report.chosen(_PARTS), default=list(_PARTS), help=f"of {', '.join(_PARTS)}")
    parser.add_argument("--seeds", type=int, default=8, help="draws of the rows")
    parser.add_argument("--grid-seeds", type=int, default=2, help="draws of each point of the grid")
    parser.add_argument("--part", type=_part, default=(1, 1), help="I/N: a part of the grid", metavar="I/N")
    parser.add_argument(
        "--merge", type=Path, nargs="+", default=[], help="JSON of the grid's parts, instead of simulating"
    )
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    try:
        found = int(number), int(parts)
    except ValueError:
        found = 0, 0
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; write 2/3 for the second third")
    return found


if __name__ == "__main__":
    main()
