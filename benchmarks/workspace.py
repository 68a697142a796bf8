"""What a workspace costs: gyre's beside the engine's own ways and other projects', on one image and one engine.

    python benchmarks/workspace.py [--peers] [--quick] [--only commands,cycle,many,fork,runs]

Every system is a process of its own, with its own client; they are measured in turn within every round, and figures are medians
over all rounds. Starts are compared with docker-py's in pairs, one after the other in alternating order, more often than the
rest: the aim is about the median of their ratios. `--peers` installs the compared packages, pinned, each into an environment of its own under
`~/.cache/gyre/bench`; a peer that cannot be installed or started is named in `problems`. The image is a minimal Debian with
Python, made once with debootstrap. Prints one JSON object, and a table on standard error. Uses the engine that answers, else one
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import report
from proxy.children import Child, ChildError
from workspaces import pairing, runs, systems
from workspaces.systems import DOCKER_PY, EXECUTE, OURS, SHELL, TABLE

from gyre_sdk.harness.workspace import engine

_SECTIONS = ("commands", "cycle", "many", "fork", "runs")
_COMMANDS = {"true": 15, "echo": 10, "megabyte": 3}
"""Commands that are timed, with how many of each in a round."""
_MANY = 20
_PAIRS = 24
"""How often gyre's start, command and removal are measured beside docker-py's."""


def main() -> None:
    """Measure the sections asked for and print the result."""
    options = _options()
    result: dict[str, Any] = {
        "quick": options.quick,
        "cores": os.cpu_count(),
        "load": [round(os.getloadavg()[0], 1)],
        "problems": {},
    }
    rounds = 1 if options.quick else options.rounds
    names = [OURS, SHELL, DOCKER_PY, "docker CLI"] if not options.peers else list(TABLE)
    with _engine():
        systems.make_image()
        with systems.running(names, result["problems"]) as children:
            measure: dict[str, Callable[[], Any]] = {
                "commands": lambda: _commands(children, rounds, result["problems"]),
                "cycle": lambda: _cycles(children, rounds, 1 if options.quick else _PAIRS, result),
                "many": lambda: _many(children, 4 if options.quick else _MANY, result["problems"]),
                "fork": lambda: round(statistics.median(children[OURS].ask(f"fork {min(3, rounds)}")), 1),
                "runs": lambda: runs.measure(options.quick),
            }
            for section in options.only:
                report.say(f"measuring {section}")
                result[section] = measure[section]()
    result["load"].append(round(os.getloadavg()[0], 1))
    result["aims"] = _aims(result)
    _table(result)
    print(json.dumps(result))


@contextmanager
def _engine() -> Iterator[None]:
    if engine.answers():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        private = engine.start_private_engine(folder)
        os.environ["DOCKER_HOST"] = private.url
        try:
            yield
        finally:
            private.stop()
            _unmount(folder)


def _unmount(folder: str) -> None:
    """Let go of what a container with the host's network made the engine mount, and forget."""
    for row in Path("/proc/mounts").read_text().splitlines():
        if (place := row.split()[1]).startswith(folder):
            subprocess.run(["umount", "-l", place], check=True)


def _commands(children: dict[str, Child], rounds: int, problems: dict[str, str]) -> dict[str, dict[str, float]]:
    """Return, per command, each system's median milliseconds."""
    times: dict[str, dict[str, list[float]]] = {command: {} for command in _COMMANDS}
    for turn in range(rounds):
        for command, count in _COMMANDS.items():
            for name, child in _turned(children, turn):
                if name not in problems:
                    times[command].setdefault(name, []).extend(
                        _ask(child, name, f"run {command} {count}", problems) or []
                    )
    return {command: _medians(found) for command, found in times.items()}


def _cycles(children: dict[str, Child], rounds: int, pairs: int, result: dict[str, Any]) -> dict[str, float]:
    """Return each system's median milliseconds of start, first command and removal; `result` gets what the pairs say."""
    times: dict[str, list[float]] = {}
    problems = result["problems"]
    for turn in range(max(rounds, pairs)):
        found = {}
        for name in pairing.order([*children], (OURS, DOCKER_PY), turn, only=turn >= rounds):
            took = _ask(children[name], name, "cycle 1", problems) if name not in problems else None
            if took is not None:
                found[name] = took[0]
                times.setdefault(name, []).append(took[0])
        if turn < pairs and OURS in found and DOCKER_PY in found:
            result.setdefault("pairs", []).append((found[OURS], found[DOCKER_PY]))
    return _medians(times)


def _many(children: dict[str, Child], count: int, problems: dict[str, str]) -> dict[str, float]:
    """Return each system's seconds until `count` workspaces, started at once, have all run a command."""
    found = {}
    for name, child in children.items():
        took = _ask(child, name, f"many {count}", problems) if name not in problems else None
        if took is not None:
            found[name] = round(took / 1e3, 2)
    return found


def _turned(children: dict[str, Child], turn: int) -> list[tuple[str, Child]]:
    """Return the systems in another order each time: what one leaves behind must not always meet the same next one."""
    items = list(children.items())
    at = turn % len(items)
    return items[at:] + items[:at]


def _ask(child: Child, name: str, line: str, problems: dict[str, str]) -> Any:
    try:
        return child.ask(line)
    except (ChildError, OSError) as error:
        problems[name] = f"{line}: {error}"
        return None


def _medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(found), 2) for name, found in times.items() if found}


def _aims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every aim that this run measured: its name, the value, the limit, and whether it holds."""
    aims: list[dict[str, Any]] = []

    def aim(name: str, value: float | None, limit: float | None) -> None:
        if value is not None and limit is not None:
            aims.append({"aim": name, "value": value, "limit": limit, "met": value <= limit})

    commands, many = (result.get(section, {}) for section in ("commands", "many"))
    if commands:
        aim("warm true, ms", commands["true"].get(OURS), 5.0)
        aim("warm true, against SWE-ReX's execute, ms", commands["true"].get(OURS), commands["true"].get(EXECUTE))
        aim("1 MB of output, ms", commands["megabyte"].get(OURS), 25.0)
    if result.get("pairs"):
        aim("start, command, remove, times docker-py's", pairing.summary(result["pairs"]).ratio, 1.0)
    if many and not result["quick"]:
        aim("20 workspaces at once, s", many.get(OURS), 4.0)
    aim("fork with 100 MB changed, ms", result.get("fork"), 300.0)
    return aims


def _table(result: dict[str, Any]) -> None:
    columns = {
        **{f"{command}, ms": cells for command, cells in result.get("commands", {}).items()},
        "start to removed, ms": result.get("cycle", {}),
        "20 at once, s": result.get("many", {}),
    }
    report.table(columns, TABLE, 22)
    for name, value in result.get("runs", {}).items():
        report.say(f"{name}: {value}")
    if result.get("pairs"):
        report.say(f"start to removed, {OURS} beside {DOCKER_PY}: {pairing.summary(result['pairs'])}")
    report.verdicts(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="other projects too")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, measures nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=report.chosen(_SECTIONS), default=list(_SECTIONS), metavar="SECTION,...")
    return parser.parse_args()


if __name__ == "__main__":
    main()
