"""`gyre task`: look at tasks before agents do."""

from __future__ import annotations

import dataclasses
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gyre_sdk.errors import GyreError, TaskError
from gyre_sdk.view.escape import counted, visible

if TYPE_CHECKING:
    from gyre_sdk.harness.task import Task

_LINE = 2000
"""Characters of a line at most."""

Sources = Annotated[
    list[str],
    typer.Argument(help="Task folders, folders of them, .jsonl files or module:attribute.", show_default=False),
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--set", help="NAME=VALUE for ${NAME} in task folders; the host's environment is never read."),
]


def check(
    sources: Sources,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run the solution and a no-op in workspaces.")] = True,
    variables: Variables = None,
    network: Annotated[str | None, typer.Option(help="Network of the agent, in place of the task's.")] = None,
    verifier_network: Annotated[str | None, typer.Option(help="Network of the evaluation, in place of it.")] = None,
    profile: Annotated[str | None, typer.Option(help="Profile (default, root), in place of the task's.")] = None,
) -> None:
    """Validate tasks, see their solution reach reward 1 and a no-op stay below; exit status 1 when one does not."""
    changes = {"network": network, "verifier_network": verifier_network, "profile": profile}
    given = {name: value for name, value in changes.items() if value is not None}
    good = True
    for name, folder, found in _each(sources, _named(variables)):
        good &= _checked(name, folder, found, given, run=run)
    raise typer.Exit(0 if good else 1)


def show(
    sources: Sources,
    names: Annotated[list[str] | None, typer.Option("--name", help="Glob of names.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="A tag that the task has.")] = None,
    difficulty: Annotated[list[str] | None, typer.Option("--difficulty", help="Its difficulty.")] = None,
    matching: Annotated[str | None, typer.Option("--match", help="Regular expression in name or instruction.")] = None,
    variables: Variables = None,
) -> None:
    """List tasks: name, where it runs, its network, steps, tags; exit status 1 when one cannot be read."""
    sets: Any = importlib.import_module("gyre_sdk.harness.task.sets")
    good, wrong = [], 0
    for name, _, found in _each(sources, _named(variables)):
        if isinstance(found, GyreError):
            typer.echo(f"{_plain(name)}: {_plain(found)}", err=True)
            wrong += 1
        else:
            good.append(found)
    chosen = sets.TaskSet(good, source=", ".join(sources)).filter(
        names=names or (), tags=tags or (), difficulty=difficulty or (), matching=matching
    )
    for task in chosen:
        steps = counted(len(task.steps) or 1, "step")
        where = task.image or (f"{task.dockerfile}/Dockerfile" if task.dockerfile else "gyre/base")
        hard = task.metadata.get("difficulty")
        facts = [where, f"network {task.network}", steps, str(hard) if hard else "", " ".join(task.tags)]
        typer.echo("  ".join(_plain(fact) for fact in [task.name, *facts] if fact))
    typer.echo(f"{len(chosen)} of {counted(len(good), 'task')}", err=True)
    raise typer.Exit(1 if wrong else 0)


def _each(sources: list[str], variables: dict[str, str]) -> Iterator[tuple[str, Path | None, Task | GyreError]]:
    """Yield (name, its folder, task or why there is none): a wrong folder does not hide the others."""
    sets: Any = importlib.import_module("gyre_sdk.harness.task.sets")
    for source in sources:
        path = Path(source)
        places = sets.task_folders(path) or [path] if path.is_dir() else [source]
        for place in places:
            folder = place if isinstance(place, Path) else None
            try:
                found = sets.TaskSet.load(place, variables=variables)
            except GyreError as error:
                yield folder.name if folder else source, folder, error
                continue
            for task in found:
                yield folder.name if folder else task.name, folder, task


def _checked(name: str, folder: Path | None, found: Task | GyreError, changes: dict[str, str], *, run: bool) -> bool:
    if isinstance(found, GyreError):
        return _say(name, "valid", False, str(found))
    try:
        task = dataclasses.replace(found, **changes)  # type: ignore[arg-type]
    except TaskError as error:
        return _say(name, "valid", False, str(error))
    slips = _slips(folder)
    good = _say(name, "valid", True, f"keys that the format does not have: {', '.join(slips)}" if slips else "")
    if not run:
        return good
    checks: Any = importlib.import_module("gyre_sdk.harness.check")
    for finding in checks.check_task(task):
        good &= _say(name, finding.check, finding.ok, f"{finding.said} ({finding.seconds:.1f} s)")
    return good


def _slips(folder: Path | None) -> list[str]:
    """Return keys of a folder's task.toml that nobody reads."""
    if folder is None:
        return []
    known: Any = importlib.import_module("gyre_sdk.harness.task.known")
    slips: list[str] = known.unknown_keys(tomllib.loads((folder / "task.toml").read_text("utf-8")))
    return slips


def _say(name: str, check: str, ok: bool, said: str) -> bool:
    typer.echo(f"{'ok' if ok else 'FAIL':4}  {_plain(name)}  {check}" + (f"  {_plain(said)}" if said else ""))
    return ok


def _named(variables: list[str] | None) -> dict[str, str]:
    pairs = [item.partition("=") for item in variables or []]
    wrong = next((f"{name}{sign}" for name, sign, _ in pairs if not sign or not name.isidentifier()), None)
    if wrong is not None:
        raise TaskError(f"--set {wrong!r}: write NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _plain(value: object) -> str:
    """Return one line of visible text: what tests print is not to be trusted."""
    return visible(" ".join(str(value).split()), _LINE)
