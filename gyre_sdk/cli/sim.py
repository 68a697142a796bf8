"""`gyre sim`: what elastic cells would gain on a cluster, before renting it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre_sdk.cli.store import AsJson, add_row, json_line, new_table, open_store, print_table
from gyre_sdk.view.drawing import unit

if TYPE_CHECKING:
    from gyre_sdk.trainer.simulate.compare import Comparison, Figure
    from gyre_sdk.trainer.simulate.scenario import Scenario
    from gyre_sdk.trainer.simulate.workload import Recorded

_HOUR = 3600.0
_EQUAL = 0.005
"""Share of elastic's time below which two policies count as equally fast: what two digits show."""


def sim(
    scenario: Annotated[
        str, typer.Argument(help="A scenario's TOML file, or the name of one of gyre's.", show_default=False)
    ] = "",
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Take runs from this store, not from a distribution.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Draws to compare on.")] = 8,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", help="Draw the first seed: OUT.html or OUT.png.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a training under every way to share its GPUs; without a scenario, list gyre's."""
    scenarios: Any = importlib.import_module("gyre_sdk.trainer.simulate.scenario")
    if not scenario:
        _list(scenarios)
        return
    compare: Any = importlib.import_module("gyre_sdk.trainer.simulate.compare")
    asked: Scenario = scenarios.read(scenario)
    recorded: Recorded | None = None
    if store is not None:
        workload: Any = importlib.import_module("gyre_sdk.trainer.simulate.workload")
        with open_store(store) as journal:
            recorded = workload.recorded(journal)
    if timeline is not None:
        compare.timeline.check(timeline)
    found: Comparison = compare.compare(asked, seeds=seeds, store=recorded)
    if timeline is not None:
        compare.draw_timeline(asked, timeline, recorded, f"Drawn is the first seed. {verdict(found)}.")
    if as_json:
        json_line(compare.as_object(found))
    else:
        show(found)


def show(found: Comparison) -> None:
    """Print a comparison for people, the least makespan first."""
    name, of = unit(_HOUR * min(one.makespan_h.mean for one in found.policies.values()))
    table = new_table(
        *("policy", f"time ({name})", "elastic's times", f"GPU-{name} serving", "training", "moving", "idle"),
        *("staleness", "switches", "how"),
        right=(1, 2, 3, 4, 5, 6, 7, 8),
    )
    each = _HOUR / of
    for policy, one in sorted(found.policies.items(), key=lambda item: item[1].makespan_h.mean):
        spent = [one.serving_gpu_h, one.training_gpu_h, one.moving_gpu_h, one.idle_gpu_h]
        took = _with_spread(one.makespan_h, each)
        ratio = _with_spread(found.ratios[policy]) if policy in found.ratios else ""
        stale = f"{one.staleness_mean.mean:.2f}, at most {one.staleness_max.mean:.0f}"
        numbers = [_number(figure.mean * each) for figure in spent]
        add_row(table, policy, took, ratio, *numbers, stale, f"{one.switches.mean:.0f}", one.knobs)
    print_table(table, verdict(found))


def verdict(found: Comparison) -> str:
    """Return in words what elastic gains over the best baseline, or where it loses."""
    ratio = found.ratios[found.best_baseline]
    fastest = found.policies["elastic"].makespan_h.mean
    words = f"{found.scenario}, {found.seeds} seed{'s' * (found.seeds > 1)}: "
    if abs(ratio.mean - 1) < _EQUAL:
        words += f"elastic takes as long as the best baseline, {found.best_baseline}"
    elif ratio.mean < 1:
        words += f"elastic loses to {found.best_baseline}, which takes {ratio.mean:.2f} of its time"
    else:
        words += f"elastic is {ratio.mean:.2f}x faster than the best baseline, {found.best_baseline}"
    slower = [name for name, other in found.ratios.items() if other.mean <= 1 - _EQUAL]
    losers = [name for name in slower if name != found.best_baseline]
    if losers:
        words += f"; it loses to {', '.join(losers)} as well"
    return words + f"; no policy can be more than {fastest / found.bound_h:.2f}x faster than elastic"


def _with_spread(figure: Figure, each: float = 1.0) -> str:
    return f"{figure.mean * each:.2f} ±{figure.spread * each:.2f}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value < _EQUAL else f"{value:.3g}"


def _list(scenarios: Any) -> None:
    table = new_table("scenario", "about")
    known = scenarios.shipped()
    for name in known:
        add_row(table, name, scenarios.read(name).about, limit=200)
    print_table(table, f"{len(known)} scenarios; gyre sim NAME, or a TOML file of your own")
