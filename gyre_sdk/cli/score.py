"""`gyre rescore`: score runs again from what was kept of them."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from gyre_sdk.cli.store import AsJson, Store, json_line, open_store
from gyre_sdk.errors import SettingsError
from gyre_sdk.view.escape import visible

if TYPE_CHECKING:
    from gyre_sdk.harness.scoring.rescore import Again

Runs = Annotated[list[str] | None, typer.Argument(help="Runs to score again.", show_default=False)]


def rescore(
    store: Store,
    runs: Runs = None,
    every: Annotated[bool, typer.Option("--all", help="All runs with a kept snapshot.")] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="Folder, .jsonl file or module:attribute with the tasks; else each from its own folder."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="URL of the Docker engine with the snapshots.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score runs again from their kept snapshots; exit status 1 when a reward is another one, or there is none now.

    The rewards on record stay as they are.
    """
    if every == bool(runs):
        raise SettingsError("name the runs to score again, or give --all (and not both)")
    again: Any = importlib.import_module("gyre_sdk.harness.scoring.rescore")
    sets: Any = importlib.import_module("gyre_sdk.harness.task.sets")
    with open_store(store) as journal:
        entries = again.kept(journal, runs)
        path = journal.path
    found = None if tasks is None else sets.TaskSet.load(tasks)
    same = 0
    for one in again.rescore(path, entries, tasks=found, engine=engine, at=time.time()):
        same += one.same
        _tell(one, as_json)
    typer.echo(f"{same} of {len(entries)} the same", err=True)
    if same < len(entries):
        raise typer.Exit(1)


def _tell(one: Again, as_json: bool) -> None:
    if as_json:
        now = None if one.now is None else msgspec.to_builtins(one.now)
        json_line(
            {
                "run": one.run,
                "task": one.task,
                "same": one.same,
                "before": msgspec.to_builtins(one.before),
                "now": now,
                "said": one.said,
            }
        )
        return
    score = "could not be scored again" if one.now is None else f"now {_shown(one.now.reward)}"
    why = one.said or (one.now.explanation if one.now is not None else "")
    line = f"{one.run}  {one.task}  {_shown(one.before.reward)}, {score}{'' if one.same else '  DIFFERS'}"
    typer.echo(visible(line + (f": {why}" if why else ""), 400))


def _shown(value: float | None) -> str:
    return "unscored" if value is None else f"{value:g}"
