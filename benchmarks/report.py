"""What the benchmarks beside peers print on standard error, and how their sections are named on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def say(text: str) -> None:
    """Print a line."""
    sys.stderr.write(text + "\n")


def table(columns: Mapping[str, Mapping[str, Any]], names: Iterable[str], width: int) -> None:
    """Print a row per system that has a figure; columns without figures are left out.

    Args:
        columns: title -> system -> figure.
        names: of the systems, in order.
        width: of a column, characters.
    """
    shown = {title: cells for title, cells in columns.items() if cells}
    if not shown:
        return
    say("".join(f"{title:>{width}}" for title in ("system", *shown)))
    for name in names:
        cells = [str(cells.get(name, "-")) for cells in shown.values()]
        if any(cell != "-" for cell in cells):
            say("".join(f"{cell:>{width}}" for cell in (name, *cells)))


def verdicts(result: Mapping[str, Any]) -> None:
    """Print each aim of a result, whether it is met, and what could not be measured."""
    for item in result["aims"]:
        say(f"{'met   ' if item['met'] else 'MISSED'}  {item['aim']}: {item['value']} (limit {item['limit']})")
    for name, problem in result["problems"].items():
        say(f"not measured: {name}: {problem}")


def chosen(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return what reads a list of sections, separated by commas, for `argparse`."""
    sections = tuple(known)

    def wanted(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in sections]:
            raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; choose from {', '.join(sections)}")
        return names

    return wanted
