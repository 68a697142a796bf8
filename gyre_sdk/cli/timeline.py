"""`gyre timeline`: what every cell of a training did, when, and what it cost."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_sdk.cli.store import AsJson, Store, add_row, json_line, new_table, open_store, print_table
from gyre_sdk.errors import JournalError, SettingsError
from gyre_sdk.view import cells, lanes, trace
from gyre_sdk.view.escape import count, counted, duration
from gyre_sdk.view.timeline import Cell, Role, Timeline
from gyre_sdk.view.timeline import timeline as fold

_PICTURE = "--picture"


def timeline(
    store: Store,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write a trace for Perfetto or chrome://tracing.", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(_PICTURE, help="Draw it: OUT.html or OUT.png.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what every cell did: time by state, idle time, switches and their costs, units."""
    drawing: Any = None
    if picture is not None:
        drawing = importlib.import_module("gyre_sdk.trainer.simulate.timeline")
        drawing.check(picture, _PICTURE)
    found = read(store)
    if out is not None:
        try:
            out.write_bytes(trace.trace(found))
        except OSError as error:
            raise SettingsError(f"--out {out} cannot be written: {error}; name another file") from error
    if picture is not None:
        drawing.write(picture, str(store), [lanes.lanes(found, store.name)], _PICTURE, _summary(found))
    if as_json:
        json_line(as_object(found))
    else:
        _show(found)


def read(store: Path) -> Timeline:
    """Return the timeline of a store.

    Raises:
        JournalError: it is no store, or holds nothing of cells.
    """
    with open_store(store) as journal:
        said = cells.read(entry.body for entry in journal.entries(cells.STREAM))
        found = fold(said.events, unknown=said.unknown)
        if not said.events:
            unread = (
                f"; {counted(said.unknown, 'entry', 'entries')} of a newer gyre, read it with that one"
                if said.unknown
                else ""
            )
            raise JournalError(
                f"store {journal.path} holds nothing of cells{unread}: a training records them when its settings have a"
                " section [cells]"
            )
        return found


def as_object(found: Timeline) -> dict[str, Any]:
    """Return a timeline's figures for JSON; seconds."""
    units = sum(cell.units for cell in found.cells.values())
    tokens = sum(cell.tokens for cell in found.cells.values())
    return {
        "start": found.start,
        "end": found.end,
        "trainings": len(found.trainings),
        "cells": [
            {
                "cell": cell.name,
                "state": cell.state,
                "standalone": cell.standalone,
                "span_s": cell.span_s,
                "states": cell.states,
                "roles": {str(role): seconds for role, seconds in cell.roles.items()},
                "idle": {str(role): seconds for role, seconds in cell.idle.items()},
                "computing_s": cell.computing_s,
                "switches": cell.switches,
                "units": cell.units,
                "unit_share": cell.units / units if units else 0.0,
                "tokens": cell.tokens,
                "token_share": cell.tokens / tokens if tokens else 0.0,
            }
            for cell in found.cells.values()
        ],
        "switches": found.costs,
        "failed_switches": [
            {"cell": one.cell, "to": one.to, "phase": one.phase, "phases": one.phases} for one in found.failures
        ],
        "steps": len(found.steps),
        "versions": [version.version for version in found.versions],
        "missed": found.missed,
        "unknown": found.unknown,
    }


def _show(found: Timeline) -> None:
    states = list(dict.fromkeys(state for cell in found.cells.values() for state in cell.states))
    names = ["cell", "now", "time", *states, "idle serving", "idle training", "switches", "units", "tokens"]
    table = new_table(*names, right=tuple(range(2, len(names))))
    tokens = sum(cell.tokens for cell in found.cells.values())
    for cell in found.cells.values():
        add_row(table, *_row(cell, states, tokens))
    print_table(table, f"seconds; {_summary(found)}")
    if not found.costs:
        return
    costs = new_table("to", "switches", "mean s", "requests ended", "moved", "phases (mean s)", right=(1, 2, 3, 4))
    for to, cost in found.costs.items():
        phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in cost.phases.items())
        figures = [str(cost.count), f"{cost.mean_s:.2f}", str(cost.finished), str(cost.moved)]
        add_row(costs, to, *figures, phases, limit=400)
    print_table(costs, counted(len(found.switches), "switch", "switches"))


def _row(cell: Cell, states: list[str], tokens: int) -> list[str]:
    share = f" ({cell.tokens / tokens:.0%})" if tokens else ""
    spent = cell.states
    idle = [f"{cell.idle[role]:.1f}" for role in (Role.SERVING, Role.TRAINING)]
    times = [f"{spent[state]:.1f}" if state in spent else "" for state in states]
    work = [str(cell.switches), str(cell.units), f"{count(cell.tokens)}{share}"]
    return [cell.name, cell.state, f"{cell.span_s:.1f}", *times, *idle, *work]


def _summary(found: Timeline) -> str:
    standalone = sum(cell.standalone for cell in found.cells.values())
    words = counted(len(found.cells) - standalone, "cell")
    if standalone:
        words += f" and {counted(standalone, 'standalone replica')}"
    words += f" over {duration(found.span_s)}, {counted(len(found.steps), 'step')},"
    words += f" {counted(len(found.versions), 'version')}"
    if len(found.trainings) > 1:
        words += f", {len(found.trainings)} trainings, one after the other"
    if found.failures:
        words += f"; {counted(len(found.failures), 'switch', 'switches')} failed"
    if found.missed:
        words += f"; not recorded: {counted(found.missed, 'event')}"
    if found.unknown:
        words += f"; left out: {counted(found.unknown, 'entry', 'entries')} of a newer gyre"
    return words
