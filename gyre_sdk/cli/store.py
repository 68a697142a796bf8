"""Commands that read a store: what ran, what was called, what would be trained."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_sdk.cli import one_call
from gyre_sdk.credit import Baseline, Row, advantages, tally, trajectories
from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal, store_file
from gyre_sdk.records import VersionSpan
from gyre_sdk.select import J_MAX
from gyre_sdk.tree import RunTree
from gyre_sdk.view.escape import count, duration, reward, visible

Store = Annotated[Path, typer.Argument(help="The store: a file, or a directory with gyre.db.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
OneRun = Annotated[str | None, typer.Option("--run", help="Only this run.", show_default=False)]

_CALL_KEYS = ("run", "lane", "role", "call", "status", "prompt_ids", "sampled_ids", "logprobs", "versions")
_SAMPLE_KEYS = ("run", "path_ids", "owned", "weights", "advantage", "role")


def open_store(store: Path) -> Journal:
    """Open a store for reading; a directory means the `gyre.db` in it."""
    return Journal(store_file(store), "r")


def runs(store: Store, as_json: AsJson = False) -> None:
    """List the runs of a store."""
    with open_store(store) as journal:
        found = journal.runs()
        calls: Counter[str] = Counter()
        sampled: Counter[str] = Counter()
        for summary in journal.call_summaries():
            calls[summary.run] += 1
            sampled[summary.run] += summary.sampled_tokens
    if as_json:
        for run in found:
            json_line({**msgspec.to_builtins(run), "calls": calls[run.run], "sampled_tokens": sampled[run.run]})
        return
    table = _table("run", "task", "group", "state", "reward", "calls", "sampled", "time", "error", right=(4, 5, 6, 7))
    for run in found:
        seconds = duration(run.ended_at - run.created_at) if run.ended_at is not None else ""
        _row(
            table,
            run.run,
            run.task,
            run.group or "",
            str(run.status),
            "placeholder" if run.placeholder else reward(run.reward) if run.ended_at is not None else "",
            str(calls[run.run]),
            count(sampled[run.run]),
            seconds,
            run.error or "",
        )
    _print(table, str(tally(found)))


def calls(
    store: Store,
    call: Annotated[str | None, typer.Argument(help="Show only this call, whole.", show_default=False)] = None,
    as_json: AsJson = False,
    run: OneRun = None,
) -> None:
    """List the recorded calls of a store, with exact token ids; or show one of them."""
    with open_store(store) as journal:
        if call is not None and as_json:
            json_line(_ordered(one_call.as_object(journal, call), _CALL_KEYS))
            return
        if call is not None:
            one_call.show(journal, call)
            return
        _check_run(journal, run)
        if as_json:
            for record in journal.calls(run):
                json_line(_ordered(msgspec.to_builtins(record), _CALL_KEYS))
            return
        names = {lane.lane: lane.name for lane in journal.lanes(run)}
        table = _table(
            "run", "lane", "role", "call", "state", "prompt", "sampled", "version", "parent", "fork", right=(5, 6, 7)
        )
        number = 0
        for record in journal.calls(run):
            number += 1
            _row(
                table,
                record.run,
                names.get(record.lane, record.lane),
                record.role,
                record.call,
                str(record.status),
                str(len(record.prompt_ids)),
                str(len(record.sampled_ids)),
                _version_range(record.versions),
                record.parent or "",
                str(record.fork_reason or ""),
            )
    _print(table, f"{number} calls")


def samples(
    store: Store,
    j_max: Annotated[int, typer.Option("--j-max", min=0, help="Trajectories per run at most; 0 for all.")] = J_MAX,
    seed: Annotated[int, typer.Option("--seed", help="Decides the draws.")] = 0,
    baseline: Annotated[
        Baseline, typer.Option("--baseline", help="How a reward becomes an advantage.")
    ] = Baseline.MEAN,
    as_json: AsJson = False,
    run: OneRun = None,
) -> None:
    """List the trajectories that would be trained, with their weights and advantages."""
    untrained: Counter[str] = Counter()
    rows = 0
    table = _table("run", "role", "leaf", "tokens", "owned", "weight", "advantage", right=(3, 4, 5, 6))
    with open_store(store) as journal:
        _check_run(journal, run)
        known = journal.runs()
        credit = advantages(known, baseline=baseline)
        for member in known:
            if run is not None and member.run != run:
                continue
            recorded = list(journal.calls(member.run))
            untrained.update(str(reason) for reason in RunTree.from_calls(recorded).untrained_counts().elements())
            found = trajectories(member.run, recorded, j_max=j_max or None, seed=seed, advantage=credit.get(member.run))
            rows += len(found)
            for row in found:
                if as_json:
                    json_line(_ordered(msgspec.to_builtins(row.record()), _SAMPLE_KEYS))
                else:
                    _sample_row(table, row)
    left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(untrained.items()))
    summary = f"{rows} trajectories" + (f"; calls that are no targets: {left_out}" if left_out else "")
    if as_json:
        typer.echo(summary, err=True)
    else:
        _print(table, summary)


def _sample_row(table: Table, row: Row) -> None:
    advantage = f"{row.advantage:+.3f}" if isfinite(row.advantage) else "none"
    sizes = str(len(row.ids)), str(len(row.targets)), f"{row.weights.sum():.3f}"
    _row(table, row.run, row.role, row.leaf, *sizes, advantage)


def _check_run(journal: Journal, run: str | None) -> None:
    if run is not None and journal.run(run) is None:
        raise JournalError(f"run {run!r} is not in {journal.path}; `gyre runs {journal.path}` lists what is")


def _version_range(spans: list[VersionSpan]) -> str:
    versions = sorted({span.version for span in spans})
    return "" if not versions else str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"


# -- output ----------------------------------------------------------------------------------------------------------


def _ordered(record: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
    """Return a record with some keys first; readers may rely on their order."""
    return {**{key: record[key] for key in first}, **record}


def json_line(record: dict[str, Any]) -> None:
    """Print a record as one line."""
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")


def _table(*names: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(Text(visible(cell, 80)) for cell in cells))


def _print(table: Table, summary: str) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)
    console.print(Text(summary, style="dim"))
