"""`gyre run`: an agent program that knows nothing of gyre, once or several times, on a task."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_sdk.errors import SettingsError
from gyre_sdk.records import RunStatus
from gyre_sdk.settings import SERVICE_KEY
from gyre_sdk.view.escape import counted

DEFAULT_STORE = Path("gyre-runs")


def run(
    task: Annotated[Path, typer.Argument(help="Task folder (task.toml, instruction.md, ...).", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="After --: the program and its arguments, {instruction} filled in; or further arguments of --agent's.",
            metavar="[-- CMD...]",
            show_default=False,
        ),
    ] = None,
    runs: Annotated[int, typer.Option("--runs", "-n", min=1, help="Runs, as one group.")] = 1,
    concurrency: Annotated[int, typer.Option("--concurrency", "-j", min=1, help="Runs at a time.")] = 4,
    agent: Annotated[
        str | None,
        typer.Option(help="claude-code, codex, mini-swe-agent or generic; else by the name of the program."),
    ] = None,
    inside: Annotated[
        bool, typer.Option("--inside/--host", help="Run the program in the workspace, or on this machine.")
    ] = True,
    workspace: Annotated[str, typer.Option(help="docker, local or auto; local ones are for --host.")] = "docker",
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="Start a service for it, as `gyre serve --model`; repeatable."),
    ] = None,
    service: Annotated[str | None, typer.Option(metavar="URL", help="Use a `gyre serve` that runs.")] = None,
    service_key_file: Annotated[
        Path | None, typer.Option(help=f"Key of --service; else {SERVICE_KEY}.", show_default=False)
    ] = None,
    store: Annotated[Path, typer.Option(help="Where the service that is started records.")] = DEFAULT_STORE,
    serve_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Further option of the service, e.g. tokenizer=./qwen3; repeatable."),
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="Model that the program asks for; any is the policy.")] = None,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Variable of the program; repeatable.")
    ] = None,
    turns: Annotated[int | None, typer.Option(help="Calls that a run may make.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Prompt plus sampled tokens of a run.")] = None,
    cost: Annotated[float | None, typer.Option(help="US dollars of a run, at the service's prices.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Wall time of a run, seconds; else the task's.")] = None,
    working_time: Annotated[float | None, typer.Option(help="Wall time without model calls, seconds.")] = None,
    group: Annotated[str | None, typer.Option(help="Id of the group; else a new one.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Leave out the runs of --group that are done.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object per run on standard output; the program's goes to standard error."
        ),
    ] = False,
) -> None:
    """Run an unmodified agent program on a task, and score what it left.

    Exit status: 0 when every run completed, 1 when one did not, 2 for an error of gyre's, 130 or 143 for a signal.
    """
    launch: Any = importlib.import_module("gyre_sdk.harness.launch")
    tasks: Any = importlib.import_module("gyre_sdk.harness.task")
    limits: Any = importlib.import_module("gyre_sdk.harness.limits")
    if resume and group is None:
        raise SettingsError("--resume needs --group: the group whose runs are to be completed")
    if workspace not in ("docker", "local", "auto"):
        raise SettingsError(f"--workspace {workspace!r} is not known; give docker, local or auto")
    given = tuple(command or ())
    preset = launch.preset_of(agent, given)
    plan = launch.Plan(
        task=tasks.Task.load(task),
        preset=preset,
        command=given,
        where=launch.Where.INSIDE if inside else launch.Where.HOST,
        model=model_name or _hosted_name(model or []) or "policy",
        variables=dict(_pair(text, "--env") for text in env or []),
        limits=limits.Limits(turns=turns, tokens=tokens, cost_usd=cost, wall_s=timeout, working_s=working_time),
        workspace=workspace,
        group=group or (f"g-{secrets.token_hex(6)}" if runs > 1 else None),
    )
    launch.check_plan(plan)
    with _service(launch, service, service_key_file, model or [], store, serve_option or []) as client:
        members = list(range(runs))
        if resume:
            members = _left(launch, client, group or "", runs)
        shown = _Shown(as_json)
        outlet = launch.Outlet(shown.output, labelled=runs > 1)
        batch = launch.Batch(plan, client, members, concurrency=concurrency, outlet=outlet, say=_say, done=shown.done)
        try:
            if members:
                batch.run()
        except launch.Stopped as stopped:
            raise typer.Exit(stopped.exit_status) from None
        finally:
            shown.summary(plan.group, runs)
    raise typer.Exit(0 if shown.all_completed else 1)


class _Shown:
    """What the user sees of the runs, and what the exit status is made of."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._rewards: list[float] = []
        self.all_completed = True

    def output(self, data: bytes) -> None:
        """Show output of a program."""
        place = sys.stderr if self._as_json else sys.stdout
        place.buffer.write(data)
        place.buffer.flush()

    def done(self, made: Any) -> None:
        """Tell of a run that ended."""
        end, result = made.end, made.result
        status = end.status if end is not None else None
        self.all_completed = self.all_completed and status is RunStatus.COMPLETED
        placed = result is None or result.placeholder
        reward = end.reward if end is not None and not placed else None
        if reward is not None:
            self._rewards.append(reward)
        line: dict[str, Any] = {
            "run": made.run,
            "member": made.member,
            "status": status.value if status is not None else "not started",
            "reward": reward,
            "exit_code": made.exit_code,
            "calls": result.calls if result is not None else 0,
            "sampled_tokens": result.sampled_tokens if result is not None else 0,
            "seconds": round(end.seconds, 3) if end is not None else 0.0,
            "error": made.error or (end.error if end is not None else None),
        }
        if self._as_json:
            typer.echo(json.dumps(line))
            return
        said = "unscored" if reward is None else f"reward {reward:g}"
        code = "no exit code" if made.exit_code is None else f"exit code {made.exit_code}"
        typer.echo(
            f"run {line['run'] or '-'} {line['status']}, {said}, {code}, {counted(line['calls'], 'call')}, {line['seconds']:.1f} s"
            + (f": {line['error']}" if line["error"] else "")
        )

    def summary(self, group: str | None, runs: int) -> None:
        """Tell of the group."""
        if group is None or self._as_json or runs == 1:
            return
        mean = f"mean reward {sum(self._rewards) / len(self._rewards):.3g}" if self._rewards else "no reward"
        typer.echo(f"group {group}: {len(self._rewards)} of {runs} scored now, {mean}")


def _service(
    launch: Any, url: str | None, key_file: Path | None, models: list[str], store: Path, options: list[str]
) -> Any:
    """Return a context manager that gives the client of a service."""
    if (url is None) == (not models):
        raise SettingsError(
            "give either --service URL, of a `gyre serve` that runs, or --model SPEC, to start one"
            " (local:PATH, http://HOST:PORT, litellm:PROVIDER/MODEL)"
        )
    if url is None:
        arguments = [part for model in models for part in ("--model", model)]
        for name, value in (_pair(text, "--serve-option") for text in options):
            arguments += [f"--{name.removeprefix('--')}", value]
        return launch.served([*arguments, "--store", str(store)], lambda line: typer.echo(line, err=True))
    service: Any = importlib.import_module("gyre_sdk.harness.service")
    if key_file is not None:
        try:
            key = key_file.read_text().strip()
        except OSError as error:
            raise SettingsError(f"--service-key-file {key_file} cannot be read: {error}") from error
    else:
        key = os.environ.get(SERVICE_KEY, "")
    if not key:
        raise SettingsError(f"the service's key is not known; set {SERVICE_KEY}, or give --service-key-file")
    client = service.ServiceClient(url, key)
    client.status()  # what is wrong with the address or the key is said before anything is made
    return client


def _left(launch: Any, client: Any, group: str, runs: int) -> list[int]:
    """Return the members of a group that are still to be made; end those whose process is gone."""
    resume: Any = importlib.import_module("gyre_sdk.harness.launch.resume")
    journal: Any = importlib.import_module("gyre_sdk.journal")
    store = Path(client.status()["store"])
    if not store.exists():
        raise SettingsError(f"--resume reads the service's store, and {store} is not on this machine; run it there")
    with journal.Journal(store, "r") as opened:
        found = [run for run in opened.runs() if run.group == group]
    for run in resume.orphans(found, resume.owner_alive):
        error = "its process ended without it"
        client.end_run(run.run, RunStatus.CANCELLED, reward=None, parts={}, error=error, placeholder=False)
        found.remove(run)
    members: list[int] = resume.members_left(found, runs)
    _say(f"group {group}: {runs - len(members)} of {counted(runs, 'run')} done, {len(members)} left")
    return members


def _hosted_name(models: list[str]) -> str | None:
    """Return the name of the only model, where that is a hosted one."""
    kind, _, name = models[0].partition(":") if len(models) == 1 else ("", "", "")
    return name if kind == "litellm" else None


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise SettingsError(f"{option} {text!r} must be NAME=VALUE")
    return name, value


def _say(message: str) -> None:
    typer.echo(f"gyre run: {message}", err=True)
