"""What a test run printed: the outcome of each test by its name. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

PASSED, FAILED = True, False
Outcomes = Mapping[str, bool]
"""Name of a test -> whether it passed."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PYTEST = re.compile(r"(PASSED|FAILED|ERROR|XFAIL|XPASS|SKIPPED)\s+(\S.*)")
_UNITTEST = re.compile(r"(?P<name>test\w* \([\w.]+\))")
_SYMPY = re.compile(r"(test_\w+)\s+(ok|E|F|f|X|s)\b")


def pytest_outcomes(text: str) -> Outcomes:
    """Read the summary that `pytest -rA` prints: `PASSED file::test`, `FAILED file::test - why`."""
    found: dict[str, bool] = {}
    for line in _lines(text):
        match = _PYTEST.match(line)
        if match is None:
            continue
        state, name = match.groups()
        if state in ("FAILED", "ERROR", "XPASS", "XFAIL"):
            name = name.split(" - ", 1)[0]
        found[name.strip()] = state in ("PASSED", "XFAIL")
    return found


def unittest_outcomes(text: str) -> Outcomes:
    """Read what `unittest` prints with verbosity 2: `test_a (module.Class) ... ok`, the name above where it has a docstring."""
    found: dict[str, bool] = {}
    name = None
    for line in _lines(text):
        match = _UNITTEST.match(line)
        if match is not None:
            name = match["name"]
        head, dots, state = line.rpartition(" ... ")
        if not dots or name is None:
            continue
        if match is None and head.startswith("test"):  # a name of another form: not this test's docstring
            continue
        found[name] = state.strip() == "ok" or state.startswith("expected failure")
        name = None
    return found


def sympy_outcomes(text: str) -> Outcomes:
    """Read what SymPy's `bin/test --verbose` prints: `test_a ok`, `test_b F`."""
    return {match[1]: match[2] == "ok" for line in _lines(text) if (match := _SYMPY.match(line)) is not None}


Reader = Callable[[str], Outcomes]
READERS: Mapping[str, Reader] = {"pytest": pytest_outcomes, "unittest": unittest_outcomes, "sympy": sympy_outcomes}


def passed(outcomes: Outcomes, wanted: Iterable[str]) -> int:
    """Return how many of the wanted tests passed: those that were not run did not.

    A wanted name without a file (`test_a`) stands for every test of that name.
    """
    by_last: dict[str, bool] = {}
    for name, state in outcomes.items():
        last = name.rpartition("::")[2].partition("[")[0].partition(" (")[0]
        by_last[last] = by_last.get(last, PASSED) and state
    return sum(outcomes.get(name, by_last.get(name, FAILED)) for name in wanted)


def _lines(text: str) -> Iterable[str]:
    return (_COLOUR.sub("", line).rstrip() for line in text.splitlines())
