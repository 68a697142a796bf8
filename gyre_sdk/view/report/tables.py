"""Tables of a report: numbers to the right, hostile text escaped, long ones cut with a line that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from math import isfinite
from typing import NamedTuple

from gyre_sdk.view.escape import duration, visible
from gyre_sdk.view.report.plot import figure

_TEXT = 160
"""Characters of a cell."""


class Column(NamedTuple):
    """A column."""

    name: str
    number: bool = False
    """Right-aligned."""
    code: bool = False
    short: bool = False
    """On one line, whatever the width."""
    limit: int = _TEXT
    """Characters of a cell at most."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, most: int, what: str = "rows") -> str:
    """Return a table.

    Args:
        columns: from the left.
        rows: cells as plain text.
        most: rows that are shown.
        what: rows are called.
    """
    head = "".join(f"<th{' class=n' if column.number else ''}>{text(column.name)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, columns, row))}</tr>" for row in rows[:most])
    left = len(rows) - most
    more = (
        f'<p class="dim">{left:,} of {len(rows):,} {what} are not shown; <code>--json</code> has all.</p>'
        if left > 0
        else ""
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _cell(column: Column, value: str) -> str:
    said = text(value, column.limit)
    kind = "n" if column.number else "s" if column.short else "t"
    return f"<td class={kind}>{f'<code>{said}</code>' if column.code else said}</td>"


def text(value: str, limit: int = _TEXT) -> str:
    """Return text of anybody as HTML on one line."""
    return escape(visible(value, limit))


def facts(pairs: Iterable[tuple[str, str, str]]) -> str:
    """Return (name, value, remark) as a row of large values; plain text."""
    return (
        "<dl>"
        + "".join(
            f"<div><dt>{text(name)}</dt><dd>{text(value)}{f' <small>{text(remark, 400)}</small>' if remark else ''}</dd></div>"
            for name, value, remark in pairs
        )
        + "</dl>"
    )


def moment(at: float | None) -> str:
    """Return a time in UTC; a dash where there is none."""
    if at is None:
        return "–"
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at:g}"


def seconds(value: float) -> str:
    """Return a duration: 0.000 s below a millisecond, 0.250 s, 12.3 s, 4:05, 1:02:03."""
    if 0 < value < 1e-3:
        return "0.000 s"
    return f"{number(value)} s" if not value >= 120 else duration(value)


def share(part: int, whole: int) -> str:
    """Return a part of a whole in percent; a dash of nothing."""
    return f"{part / whole:.0%}" if whole else "–"


def number(value: float | None) -> str:
    """Return a number with three digits, so that columns of them read well: 0.500, 12.0, 1,234; a dash where there is none."""
    if value is None or not isfinite(value):
        return "–"
    return f"{value:#.3g}" if 1e-3 <= abs(value) < 100 else "0" if not value else figure(value)


def reward(value: float | None) -> str:
    """Return a reward; a dash where there is none."""
    return f"{value:.3f}" if value is not None and 0 <= abs(value) < 1000 else number(value)
