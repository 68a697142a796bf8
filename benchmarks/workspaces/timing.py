"""The clock of every system that is compared: a child process that opens workspaces, runs commands in them and says how long.

Runs with the python of a peer's environment: standard library only. Commands on standard input, JSON values on standard output:
`run NAME TIMES` milliseconds of each command; `cycle TIMES` of opening, one command and closing; `many COUNT` of opening that
many workspaces at once, each with its first command; `quit`.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

MEGABYTE = 1_000_000
COMMANDS = {
    "true": ("true", ""),
    "echo": ("echo hi", "hi\n"),
    "megabyte": (f"head -c {MEGABYTE} /dev/zero | tr '\\0' x", "x" * MEGABYTE),
}


class System(Protocol):
    """A way to run commands in containers."""

    def open(self) -> Any:
        """Start a workspace."""

    def run(self, workspace: Any, command: str) -> str:
        """Run a command; return its output."""

    def close(self, workspace: Any) -> None:
        """Remove the workspace."""


def serve(system: System) -> None:
    """Answer until `quit`. Every answer is checked: a system that is fast and wrong is not measured."""
    held = system.open()
    _timed(system, held, "true")
    print(json.dumps("ready"), flush=True)
    try:
        for line in sys.stdin:
            verb, *rest = line.split()
            if verb == "quit":
                break
            print(json.dumps(_answer(system, held, verb, rest)), flush=True)
    finally:
        system.close(held)


def _answer(system: System, held: Any, verb: str, rest: list[str]) -> Any:
    if verb == "run":
        return [_timed(system, held, rest[0]) for _ in range(int(rest[1]))]
    if verb == "cycle":
        return [_cycle(system) for _ in range(int(rest[0]))]
    return _many(system, int(rest[0]))


def _timed(system: System, workspace: Any, name: str) -> float:
    command, expected = COMMANDS[name]
    began = time.perf_counter()
    output = system.run(workspace, command)
    took = 1e3 * (time.perf_counter() - began)
    assert output.replace("\r\n", "\n").rstrip("\n") == expected.rstrip("\n"), f"{command} gave {output[:200]!r}"
    return took


def _cycle(system: System) -> float:
    began = time.perf_counter()
    workspace = system.open()
    try:
        _timed(system, workspace, "true")
    finally:
        system.close(workspace)
    return 1e3 * (time.perf_counter() - began)


def _many(system: System, count: int) -> float:
    def first(_: int) -> Any:
        workspace = system.open()
        _timed(system, workspace, "true")
        return workspace

    with ThreadPoolExecutor(count) as threads:
        began = time.perf_counter()
        opened = list(threads.map(first, range(count)))
        took = 1e3 * (time.perf_counter() - began)
        list(threads.map(system.close, opened))
    return took
