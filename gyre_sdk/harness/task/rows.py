"""Tasks from rows: a file with one JSON object per line, each a benchmark instance or the fields of a `Task`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task.model import Task
from gyre_sdk.harness.task.parts import Artifact, Healthcheck, Step
from gyre_sdk.harness.task.swebench import SwebenchOptions, is_instance, swebench_task

_FIELDS = {field.name for field in dataclasses.fields(Task)} - {"scorer"}
_PATHS = ("dockerfile", "verifier_dockerfile", "tests", "solution")


def read_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (`file:line`, row) of a file of JSON lines; blank lines are skipped.

    Raises:
        TaskError: the file cannot be read, or a line is no JSON object; names the line.
    """
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read: {error}; give a UTF-8 file with one JSON object per line") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise TaskError(f"{file}:{number} is not JSON ({error}); write one JSON object per line") from None
        if not isinstance(row, dict):
            raise TaskError(f"{file}:{number} is {line[:80]!r}; write one JSON object per line")
        yield f"{file}:{number}", row


def row_task(row: Mapping[str, Any], place: str, *, folder: Path, swebench: SwebenchOptions) -> Task:
    """Return the task of a row: a SWE-bench instance, or the fields of `Task` (paths are below `folder`).

    Raises:
        TaskError: names the place and the key.
    """
    try:
        if is_instance(row):
            return swebench_task(row, swebench)
        unknown = sorted(set(row) - _FIELDS)
        if unknown:
            known = "instance_id, base_commit, problem_statement, test_patch ... of SWE-bench, or the fields of Task"
            raise TaskError(f"key {unknown[0]!r} is unknown; a row has {known}")
        return Task(**_values(row, folder))
    except (TaskError, TypeError) as error:
        raise TaskError(f"{place}: {error}") from None


def _values(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    values = dict(row)
    for key in _PATHS:
        if isinstance(values.get(key), str):
            values[key] = folder / values[key]
    for key, value in values.items():
        if isinstance(value, list):
            values[key] = tuple(value)
    if "artifacts" in values:
        values["artifacts"] = tuple(_artifact(item) for item in values["artifacts"])
    if values.get("healthcheck"):
        values["healthcheck"] = Healthcheck(**values["healthcheck"])
    if "steps" in values:
        values["steps"] = tuple(Step(**_values(step, folder)) for step in values["steps"])
    return values


def _artifact(item: Any) -> Artifact:
    if isinstance(item, str):
        return Artifact(item)
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in item.items()}
    return Artifact(**fields)
