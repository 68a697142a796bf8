"""Commands that read a store: what ran, what was called."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gyre_sdk.cli import one_call
from gyre_sdk.credit import tally
from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal, store_file
from gyre_sdk.records import VersionSpan
from gyre_sdk.view.escape import count, counted, duration, reward, visible

Store = Annotated[Path, typer.Argument(help="The store: a file, or a directory with gyre.db.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
OneRun = Annotated[str | None, typer.Option("--run", help="Only this run.", show_default=False)]

_CALL_KEYS = ("run", "lane", "role", "call", "status", "prompt_ids", "sampled_ids", "logprobs", "versions")


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
    table = new_table(
        "run", "task", "group", "state", "reward", "calls", "sampled", "time", "error", right=(4, 5, 6, 7)
    )
    for run in found:
        seconds = duration(run.ended_at - run.created_at) if run.ended_at is not None else ""
        add_row(
            table,
            run.run,
            run.task,
            run.group or "",
            str(run.status),
            reward(run.reward, placeholder=run.placeholder) if run.ended_at is not None else "",
            str(calls[run.run]),
            count(sampled[run.run]),
            seconds,
            run.error or "",
        )
    print_table(table, str(tally(found)) if found else "no runs yet")


def calls(
    store: Store,
    call: Annotated[str | None, typer.Argument(help="Show only this call, whole.", show_default=False)] = None,
    as_json: AsJson = False,
    run: OneRun = None,
) -> None:
    """List the recorded calls of a store, with exact token ids; or show one of them."""
    with open_store(store) as journal:
        if call is not None and as_json:
            json_line(ordered(one_call.as_object(journal, call), _CALL_KEYS))
            return
        if call is not None:
            one_call.show(journal, call)
            return
        check_run(journal, run)
        if as_json:
            for record in journal.calls(run):
                json_line(ordered(msgspec.to_builtins(record), _CALL_KEYS))
            return
        names = {lane.lane: lane.name for lane in journal.lanes(run)}
        table = new_table(
            "run", "lane", "role", "call", "state", "prompt", "sampled", "version", "parent", "fork", right=(5, 6, 7)
        )
        number = 0
        for record in journal.calls(run):
            number += 1
            add_row(
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
    print_table(table, counted(number, "call") if number else "no calls yet")


def check_run(journal: Journal, run: str | None) -> None:
    """Say so when a run that was asked for is not in the store."""
    if run is not None and journal.run(run) is None:
        raise JournalError(f"run {run!r} is not in {journal.path}; `gyre runs {journal.path}` lists what is")


def _version_range(spans: list[VersionSpan]) -> str:
    versions = sorted({span.version for span in spans})
    return "" if not versions else str(versions[0]) if len(versions) == 1 else f"{versions[0]}-{versions[-1]}"


# -- output ----------------------------------------------------------------------------------------------------------


def ordered(record: dict[str, Any], first: Iterable[str]) -> dict[str, Any]:
    """Return a record with some keys first; readers may rely on their order."""
    return {**{key: record[key] for key in first}, **record}


def json_line(record: dict[str, Any]) -> None:
    """Print a record as one line."""
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")


def new_table(*names: str, right: tuple[int, ...] = ()) -> Table:
    """Return a table with these columns; those in `right` hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: str, limit: int = 80) -> None:
    """Add a row; what would steer a terminal is shown escaped, what is longer than `limit` characters is cut."""
    table.add_row(*(Text(visible(cell, limit)) for cell in cells))


def print_table(table: Table, summary: str) -> None:
    """Print a table and a line below it; of a table without rows the line alone."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    if table.row_count:
        console.print(table)
    if summary:
        console.print(Text(summary, style="dim"))
