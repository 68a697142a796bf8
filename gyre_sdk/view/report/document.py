"""The report as one HTML page that needs nothing else: no script, no font, no network. Everything in it is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from gyre_sdk.view import page
from gyre_sdk.view.escape import counted
from gyre_sdk.view.lanes import lanes, legend
from gyre_sdk.view.report import learning
from gyre_sdk.view.report.figures import Figures, GroupRow, Head, Spread, TaskRow
from gyre_sdk.view.report.plot import histogram
from gyre_sdk.view.report.problems import ErrorRow, Problems
from gyre_sdk.view.report.style import STYLE
from gyre_sdk.view.report.tables import Column, facts, moment, reward, seconds, share, table, text
from gyre_sdk.view.report.training import FULL
from gyre_sdk.view.state import TRAIN
from gyre_sdk.view.timeline import Timeline

_TASKS, _HELD_OUT, _GROUPS, _ERRORS, _TAMPERED, _SPLITS = 40, 10, 20, 20, 20, 20
"""Rows of tables at most."""
_STRETCHES = 6000
"""Stretches of cells that are drawn at most: a page is for reading."""
_REASONS: Mapping[str, str] = {
    "group_flat": "groups: all rewards are equal",
    "group_too_small": "groups: fewer than two rewards to compare",
    "run_unscored": "runs of groups: no reward",
    "run_without_targets": "runs: no token that could be trained",
    "call_unselected": "calls: on no trajectory that was chosen",
    "call_sampling": "calls: the trainer cannot compute the distribution that they were sampled from",
    "call_role": "calls: their role has no weight",
    "call_truncated": "calls: cut off by their length limit",
    "call_stale": "calls: older than allowed",
    "call_no_credit": "calls: no advantage of their own",
    "call_failed": "calls: failed",
    "call_aborted": "calls: aborted",
    "call_orphan": "calls: their end never reached the agent",
    "call_rejected": "calls: attempts at a compaction that were not taken up",
    "call_no_logprobs": "calls: a log-prob is missing",
    "call_no_version": "calls: nobody knows which weights sampled them",
    "call_hosted": "calls: a hosted model answered",
}
_FORKS: Mapping[str, str] = {
    "compaction": "the agent summarised its history",
    "client_edit": "the agent changed or left out earlier messages",
    "template": "the chat template renders the history otherwise than it was sampled",
    "tools_changed": "other tools than before",
    "system_changed": "another system prompt than before",
    "retry": "the same request again",
    "routes": "the same tokens, computed by other experts",
    "unknown": "no known reason",
}


def document(found: Figures, cells: Timeline | None = None) -> str:
    """Return the page of a store's figures, and of what its cells did."""
    drawn = cells is not None and cells.start < inf
    sections = {
        "training": ("Training", found.training is not None),
        "tasks": ("Tasks", bool(found.tasks)),
        "lengths": ("Lengths", bool(found.lengths)),
        "groups": ("Groups", found.groups > 0 or bool(found.untrained)),
        "cells": ("Cells", drawn),
        "problems": ("Problems", bool(found.tasks)),
    }
    links = "".join(f'<a href="#{key}">{name}</a>' for key, (name, there) in sections.items() if there)
    body = [
        f"<h1>{text(found.name, 300)}</h1>",
        _head(found.head),
        f"<nav>{links}</nav>",
        learning.section(found.training) if found.training is not None else "",
        _tasks(found) if found.tasks else "",
        _lengths(found) if found.lengths else "",
        _groups(found) if sections["groups"][1] else "",
        _cells(cells) if cells is not None and drawn else "",
        _problems(found.problems, found.head) if found.tasks else "",
        "" if found.read_at is None else f'<p class="dim">gyre report, read {moment(found.read_at)}.</p>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(found.name)} – gyre report</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _head(head: Head) -> str:
    if head.began is None:
        return "<p>This store holds no runs yet.</p>"
    runs = sum(head.statuses.values())
    going = head.statuses.get("running", 0)
    states = ", ".join(f"{count:,} {state}" for state, count in head.statuses.items())
    last = f"last end {moment(head.ended)}" if head.ended is not None else "nothing has ended yet"
    took = f", {seconds(head.ended - head.began)}" if head.ended is not None and head.ended >= head.began else ""
    pairs = [
        ("runs", f"{runs:,}", states),
        ("mean reward", reward(head.mean), head.rewards),
        ("calls", f"{head.calls:,}", ""),
        ("sampled tokens", f"{head.sampled:,}", ""),
    ]
    if head.versions is not None:
        low, high = head.versions
        pairs.append(("policy versions that sampled", f"{low} to {high}" if low < high else str(low), ""))
    if head.hosted:
        priced = head.hosted - head.unpriced
        remark = f"{counted(head.hosted, 'call')} of hosted models"
        remark += f"; of {head.unpriced:,} nobody knows the cost" if head.unpriced else ""
        pairs.append(("cost", _dollars(head.dollars) if priced else "unknown", remark))
    still = f' <b class="warn">{counted(going, "run")} still going.</b>' if going else ""
    return f'<p class="dim">First run {moment(head.began)}, {last}{took}.{still}</p>{facts(pairs)}'


def _dollars(amount: float) -> str:
    return f"${amount:,.{2 if amount >= 1 or not amount else 3 if amount >= 0.01 else 6}f}"


def _tasks(found: Figures) -> str:
    splits: dict[str, list[TaskRow]] = {}
    for row in found.tasks:
        splits.setdefault(row.split, []).append(row)
    said = (
        "Lowest mean reward first. Solved: runs with reward 1 or more. Without a reward: placeholder (the run never started"
        " and counts as 0), infrastructure (workspace, scorer or model side failed), other."
    )
    parts = [f'<h2 id="tasks">Rewards by task</h2><p class="dim">{said}</p>']
    if found.rewards:
        chart = histogram("Rewards", found.rewards, centred=True)
        parts.append(f'<div class="charts three">{chart}</div>')
    parts += [_split(split, rows, named=splits.keys() != {TRAIN}) for split, rows in list(splits.items())[:_SPLITS]]
    left = len(splits) - _SPLITS
    return "".join(parts) + (f'<p class="dim">{counted(left, "further split")} not shown.</p>' if left > 0 else "")


def _split(split: str, rows: Sequence[TaskRow], *, named: bool) -> str:
    going = any(row.going for row in rows)
    names = [
        "runs",
        *(["going"] if going else []),
        "mean",
        "std",
        "best",
        "solved",
        "placeholder",
        "infrastructure",
        "other",
    ]
    columns = [Column("task"), *(Column(name, number=True) for name in names)]
    never = sum(not row.solved and row.scored > 0 for row in rows)
    always = sum(row.solved == row.scored > 0 for row in rows)
    said = f"{counted(len(rows), 'task')}: {always:,} always solved, {never:,} never"
    head = f'<h3>{text(split)} <span class="dim">{said}</span></h3>' if named else f"<p>{said}.</p>"
    return head + table(
        columns, [_task(row, going) for row in rows], most=_TASKS if split == TRAIN else _HELD_OUT, what="tasks"
    )


def _task(row: TaskRow, going: bool) -> list[str]:
    return [
        row.task,
        f"{row.runs:,}",
        *([_some(row.going)] if going else []),
        *map(reward, (row.mean, row.std, row.best)),
        share(row.solved, row.scored),
        *map(_some, (row.placeholders, row.infrastructure, row.unscored)),
    ]


def _some(count: int) -> str:
    return f"{count:,}" if count else ""


def _lengths(found: Figures) -> str:
    columns = [Column("per ended run"), *(Column(name, number=True) for name in ("p50", "p90", "max"))]
    rows = [
        [spread.name, *(_length(spread, value) for value in (spread.p50, spread.p90, spread.most))]
        for spread in found.lengths
    ]
    slow = [
        Column("run", code=True, short=True),
        Column("task"),
        Column("state", short=True),
        *(Column(name, number=True) for name in ("reward", "time", "calls", "sampled")),
    ]
    slowest = [
        [
            row.run,
            row.task,
            row.status,
            "placeholder" if row.placeholder else "unscored" if row.reward is None else reward(row.reward),
            seconds(row.seconds),
            f"{row.calls:,}",
            f"{row.sampled:,}",
        ]
        for row in found.slowest
    ]
    charts = "".join(histogram(spread.name.capitalize(), spread.values) for spread in found.lengths)
    return (
        f'<h2 id="lengths">How long runs are</h2>{table(columns, rows, most=10)}<div class="charts three">{charts}</div>'
        f"<h3>The slowest</h3>{table(slow, slowest, most=len(slowest), what='runs')}"
    )


def _length(spread: Spread, value: float) -> str:
    return seconds(value) if spread.name == "seconds" else f"{value:,.0f}"


def _groups(found: Figures) -> str:
    flat = found.without_contrast
    parts = [f'<h2 id="groups">Groups, and what was not trained</h2><p>{_contrast(found.groups, flat)}</p>']
    if flat:
        columns = [
            Column("group", code=True, short=True),
            Column("task"),
            *(Column(name, number=True) for name in ("runs", "scored", "reward")),
            Column("why"),
        ]
        rows = [
            [
                row.group,
                row.task,
                f"{row.runs:,}",
                f"{row.scored:,}",
                reward(row.reward),
                "all rewards are equal" if row.reason == "flat" else "fewer than two rewards",
            ]
            for row in flat
        ]
        parts.append(table(columns, rows, most=_GROUPS, what="groups"))
    if found.untrained:
        when = "as the training's steps counted it" if found.training is not None else "of groups"
        columns = [Column("reason", code=True, short=True), Column("number", number=True), Column("what it counts")]
        rows = [[name, f"{count:,}", _REASONS.get(name, "")] for name, count in found.untrained.items()]
        parts.append(f'<h3>Not trained <span class="dim">{when}; <code>gyre samples</code> tells more</span></h3>')
        parts.append(table(columns, rows, most=_ERRORS, what="reasons"))
    return "".join(parts)


def _contrast(groups: int, flat: Sequence[GroupRow]) -> str:
    if not groups:
        return "No group has ended."
    if not flat:
        return f"All of {counted(groups, 'group')} have contrast." if groups > 1 else "The one group has contrast."
    full = sum(row.reason == "flat" and row.reward is not None and row.reward >= FULL for row in flat)
    none = sum(row.reason == "flat" and row.reward == 0 for row in flat)
    return (
        f"{len(flat):,} of {counted(groups, 'group')} without contrast, whose rewards say nothing about their runs:"
        f" {full:,} solved by all runs, {none:,} with reward 0 for all, {len(flat) - full - none:,} other."
    )


def _cells(found: Timeline) -> str:
    drawn = lanes(found, "cells")
    kept = len(drawn.cells)
    while kept and sum(map(len, drawn.cells[:kept])) > _STRETCHES:
        kept -= 1
    shown = drawn._replace(names=drawn.names[:kept], cells=drawn.cells[:kept], points=drawn.points)
    colours = "".join(
        f'<span><i style="background:{colour}"></i>{text(name)}</span>' for name, colour in legend([shown]).items()
    )
    left = len(drawn.cells) - kept
    more = (
        f'<p class="dim">{counted(left, "cell")} not drawn; see <code>gyre timeline --picture</code>.</p>'
        if left
        else ""
    )
    missed = f'<p class="warn">{counted(found.missed, "event")} of cells not recorded.</p>' if found.missed else ""
    return f'<h2 id="cells">{text(drawn.title.capitalize())}</h2><div class="lanes"><p>{colours}</p><div class="wide">{page.svg(shown)}</div></div>{more}{missed}'


def _problems(found: Problems, head: Head) -> str:
    parts = [
        _errors("Runs that did not complete", "runs", found.runs),
        _errors("Calls without an answer", "calls", found.calls),
        _forks(found),
    ]
    if found.tampered:
        rows = [[run, "; ".join(what)] for run, what in found.tampered]
        columns = [Column("run", code=True, short=True), Column("found and kept from the evaluation", limit=300)]
        parts.append(
            f"<h3>Evaluations that somebody tried to steer</h3>{table(columns, rows, most=_TAMPERED, what='runs')}"
        )
    runs = "no run has ended" if head.ended is None else "all runs that ended completed"
    said = "".join(parts) or f"<p>None: {runs}, all calls that ended were answered, no history branched.</p>"
    return f'<h2 id="problems">Problems</h2>{said}'


def _errors(title: str, what: str, rows: tuple[ErrorRow, ...]) -> str:
    if not rows:
        return ""
    columns = [
        Column(what, number=True),
        Column("state", short=True),
        Column("first line of the error", limit=300),
        Column("tasks", number=True),
        Column("for example", code=True, short=True),
    ]
    lines = [[f"{row.count:,}", row.state, row.error or "(none)", f"{row.tasks:,}", row.runs[0]] for row in rows]
    return f"<h3>{title}</h3>{table(columns, lines, most=_ERRORS, what='kinds')}"


def _forks(found: Problems) -> str:
    if not found.forks:
        return ""
    columns = [
        Column("reason", code=True, short=True),
        *(Column(name, number=True) for name in ("calls", "of all")),
        Column("what happened"),
    ]
    rows = [
        [name, f"{count:,}", share(count, found.calls_in_all), _FORKS.get(name, "")]
        for name, count in found.forks.items()
    ]
    return f"<h3>What made histories branch</h3>{table(columns, rows, most=_ERRORS, what='reasons')}"
