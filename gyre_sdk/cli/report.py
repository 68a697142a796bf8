"""`gyre report`: what a store holds, as one HTML page."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gyre_sdk.cli import timeline
from gyre_sdk.cli.store import Store, json_line, open_store
from gyre_sdk.credit import scored
from gyre_sdk.errors import SettingsError
from gyre_sdk.journal import Journal
from gyre_sdk.records import RunRecord, RunStatus
from gyre_sdk.view import cells
from gyre_sdk.view.escape import counted
from gyre_sdk.view.report import CallFact, Facts, Figures, Spent, StepFact, document, figures
from gyre_sdk.view.timeline import timeline as fold

_OUT = Path("report.html")


def report(
    store: Store,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The page; report.html unless --json is given.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Write one page about a store: rewards, lengths, what failed, and the curves of a training."""
    with open_store(store) as journal:
        facts = read(journal, time.time())
    found = figures(facts)
    if out is None and not as_json:
        out = _OUT
    if out is not None:
        page = document(found, facts.cells)
        try:
            out.write_text(page, encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"--out {out} cannot be written: {error}; name another file") from error
    if as_json:
        json_line(as_object(found, facts))
    elif out is not None:
        steps = f", {counted(len(facts.steps), 'step')}" if facts.steps else ""
        runs = f"{counted(len(facts.runs), 'run')}, {counted(len(facts.calls), 'call')}{steps}"
        typer.echo(f"{out}: {runs}")


def as_object(found: Figures, facts: Facts) -> dict[str, Any]:
    """Return figures for JSON, all rows of all tables; seconds, tokens, US dollars."""
    made: dict[str, Any] = msgspec.to_builtins(found)
    for spread in made["lengths"]:
        del spread["values"]
    del made["rewards"]
    made["cells"] = None if facts.cells is None else timeline.as_object(facts.cells)
    return made


def read(journal: Journal, now: float) -> Facts:
    """Return what a store holds now, seconds since the epoch. It may be written to meanwhile.

    Raises:
        JournalError: the store cannot be read.
        TrainerError: its record of a training contradicts itself.
    """
    # What tells of others is read before them, so that nothing is told of a run that is not there yet.
    ledger: Any = importlib.import_module("gyre_sdk.trainer.ledger")
    entries = journal.entries(ledger.STREAM)
    items = ledger.read(entries)
    summaries = journal.call_summaries()
    runs = journal.runs()
    known = {run.run for run in runs}
    calls = [
        CallFact(call.run, call.status, call.sampled_tokens, call.version, call.ended_at, call.fork_reason, call.error)
        for call in summaries
        if call.run in known
    ]
    state = ledger.fold(items)
    times = {id(item): entry.at for item, entry in zip(items, entries, strict=True)}
    said = cells.read(entry.body for entry in journal.entries(cells.STREAM))
    training = bool(items)
    return Facts(
        name=str(journal.path.resolve()),
        runs=runs,
        calls=calls,
        groups=_groups(runs, state),
        spent=[one for one in _spent(journal) if one.run in known],
        steps=list(_steps(ledger, items, state, times, {str(run.run): run for run in runs})),
        versions={version: step for version, (_, step) in state.versions.items()} if training else {},
        resumed=sum(isinstance(item, ledger.Resumed) for item in items),
        tampered=_tampered(journal),
        cells=fold(said.events, unknown=said.unknown) if said.events else None,
        read_at=now,
    )


def _groups(runs: list[RunRecord], state: Any) -> dict[str, list[str]]:
    """Return the runs of each group that are compared: those that a training closed it with, else all that ended and stand."""
    policy: Any = importlib.import_module("gyre_sdk.harness.scoring.policy")
    going = Counter(run.group for run in runs if run.status is RunStatus.RUNNING)
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.group is None:
            continue
        planned = state.groups.get(run.group)
        if planned is not None and planned.closed is not None:
            found[run.group] = planned.closed.runs
        elif planned is None and not going[run.group] and policy.stands(run.status):
            found.setdefault(run.group, []).append(run.run)
    return found


def _spent(journal: Journal) -> Iterator[Spent]:
    for run, answer in journal.answers_without_tokens():
        whole = (answer.get("extra") or {}).get("provider")
        if not isinstance(whole, dict):
            continue
        usage, cost = whole.get("usage"), whole.get("cost")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        yield Spent(
            run, tokens if isinstance(tokens, int) else 0, float(cost) if isinstance(cost, (int, float)) else None
        )


def _steps(
    ledger: Any, items: list[Any], state: Any, times: dict[int, float], runs: dict[str, RunRecord]
) -> Iterator[StepFact]:
    """Yield the steps of the surviving lineage that were committed."""
    committed: dict[int, float] = {}
    allocated: dict[int, tuple[int, float]] = {}
    published: dict[int, float] = {}
    for item in items:
        at = times[id(item)]
        if isinstance(item, ledger.StepCommitted):
            committed[item.step] = at
        elif isinstance(item, ledger.VersionAllocated):
            allocated[item.version] = item.step, at
        elif isinstance(item, ledger.VersionPublished) and item.version in allocated:
            step, since = allocated[item.version]
            published[step] = max(0.0, at - since)
    for number in sorted(state.steps):
        step = state.steps[number]
        if step.state is ledger.State.STARTED:
            continue
        closed = [state.groups[group].closed for group in step.groups]
        members = [runs[run] for one in closed if one is not None for run in one.runs if run in runs]
        yield StepFact(
            number=number,
            at=committed[number],
            groups=step.groups,
            rewards=[run.reward for run in members if scored(run) and run.reward is not None],
            units=len(step.units),
            tokens=sum(state.sealed[unit].tokens for unit in step.units),
            metrics=step.metrics,
            publish_s=published.get(number),
        )


def _tampered(journal: Journal) -> dict[str, tuple[str, ...]]:
    record: Any = importlib.import_module("gyre_sdk.harness.scoring.record")
    return {one.run: one.score.tampered for one in record.evaluations(journal) if one.score.tampered}
