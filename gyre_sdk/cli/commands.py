"""All commands of `gyre`.

Parts of gyre that are heavy or of other layers' making load when their command runs, so that `gyre --help` stays quick.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from gyre_sdk.cli import fsck, machine, replay, report, run, samples, score, sim, store, task, timeline, tree, watch

app = typer.Typer(
    name="gyre",
    help="Record agents, look at what they did, serve models to them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gyre {metadata.version('gyre-sdk')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options of `gyre` itself."""


app.command("run")(run.run)
app.command("runs")(store.runs)
app.command("calls")(store.calls)
app.command("tree")(tree.tree)
app.command("samples")(samples.samples)
app.command("export")(samples.export)
app.command("rescore")(score.rescore)
app.command("sim")(sim.sim)
app.command("fsck")(fsck.fsck)
app.command("replay")(replay.replay)
app.command("timeline")(timeline.timeline)
app.command("report")(report.report)
app.command("view")(watch.view)
app.command(
    "serve",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)(machine.serve)
app.command("gc")(machine.gc)
app.command("doctor")(machine.doctor)
sandbox = typer.Typer(help="Images for workspaces, built without a registry.", no_args_is_help=True)
sandbox.command("list")(machine.sandbox_list)
sandbox.command("build")(machine.sandbox_build)
sandbox.command("test")(machine.sandbox_test)
app.add_typer(sandbox, name="sandbox")
tasks = typer.Typer(help="Look at tasks before agents do.", no_args_is_help=True)
tasks.command("check")(task.check)
tasks.command("list")(task.show)
app.add_typer(tasks, name="task")
