"""Commands about this machine: the proxy service, workspace images, what was left behind, what is installed."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from gyre_sdk.errors import GyreError, WorkspaceError
from gyre_sdk.view.escape import counted

_GIB = 1 << 30
_LITTLE_DISK = 2 * _GIB


def serve(context: typer.Context) -> None:
    """Serve recorded model access to agents: --store PATH --model FOLDER --replica URL ... (--help lists all)."""
    server: Any = importlib.import_module("gyre_sdk.harness.proxy.server.main")
    raise typer.Exit(server.main(context.args))


def sandbox_list() -> None:
    """List the workspace images that can be built here, and what the engine has of them."""
    images = _module("sandboxes")
    try:
        client = _engine()
    except GyreError as error:
        for name in images.names():
            typer.echo(f"{name:<10} ?")
        typer.echo(f"gyre: what is built is unknown: {' '.join(str(error).split())}", err=True)
        return
    for one in images.sandboxes(client):
        state = "not built" if not one.built else "built" if one.current else "out of date"
        typer.echo(f"{one.name:<10} {state:<12} {f'{one.bytes / 1e6:.0f} MB' if one.built else ''}".rstrip())


def sandbox_build(
    name: Annotated[str, typer.Argument(help="A sandbox that `gyre sandbox list` shows.", show_default=False)],
    again: Annotated[
        bool, typer.Option("--again", help="Even if it is up to date: with the packages of today.")
    ] = False,
) -> None:
    """Build the image of a sandbox on the Docker engine, and those that it starts from."""
    _check_sandbox(name)
    image = _module("sandboxes").build_sandbox(_engine(), name, again=again)
    typer.echo(f"built {image.name}")


def sandbox_test(
    name: Annotated[str, typer.Argument(help="A sandbox that is built.", show_default=False)],
) -> None:
    """Run the smoke test of a sandbox in a workspace."""
    _check_sandbox(name)
    ran = _module("sandboxes").smoke_test(_engine(), name)
    typer.echo((ran.stdout + ran.stderr).rstrip())
    raise typer.Exit(0 if ran.exit_code == 0 else 1)


def _check_sandbox(name: str) -> None:
    """Say so when there is no such sandbox, before an engine is looked for."""
    known = _module("sandboxes").names()
    if name not in known:
        raise WorkspaceError(f"there is no sandbox {name!r}; sandboxes here: {', '.join(known) or 'none'}")


def gc(
    images: Annotated[bool, typer.Option("--images", help="Also images built for tasks that nothing uses.")] = False,
    snapshots: Annotated[bool, typer.Option("--snapshots", help="Also the kept snapshots, all of them.")] = False,
) -> None:
    """Remove what dead processes left: containers, networks, snapshots. What has no label of gyre's is never touched."""
    client = _engine()
    sweeping = _module("sweeping")
    swept = sweeping.sweep(client, room=0) if snapshots else sweeping.sweep(client)
    typer.echo(
        f"removed {counted(len(swept.containers), 'container')}, {counted(len(swept.networks), 'network')},"
        f" {counted(len(swept.snapshots), 'snapshot')} ({swept.bytes / 1e6:.0f} MB)"
    )
    if images:
        gone = sweeping.sweep_images(client)
        typer.echo(f"removed {counted(len(gone), 'image')} of tasks")
    left = _module("disk").usage(client)
    kept = sum(one.bytes for one in left.snapshots)
    typer.echo(
        f"left: {left.containers / 1e6:.0f} MB in containers, {kept / 1e6:.0f} MB in {counted(len(left.snapshots), 'snapshot')},"
        f" {sum(left.images.values()) / 1e6:.0f} MB in {counted(len(left.images), 'image')} of tasks"
    )


def doctor(
    store: Annotated[Path, typer.Option("--store", help="Where the store is to be.")] = Path(),
) -> None:
    """Say what this machine has, what is missing, and what to install."""
    lines = [
        ("gyre", True, metadata.version("gyre-sdk")),
        ("python", True, platform.python_version()),
        *_docker(),
        *((one.name, one.fine, one.said) for one in _module("checkup").check_machine()),
        _binary("bwrap", "bubblewrap, for local workspaces", "apt-get install bubblewrap"),
        _package("torch", "training", "pip install 'gyre-sdk[train]'"),
        _package("trl", "training", "pip install 'gyre-sdk[train]'"),
        _package("vllm", "serving", "pip install 'gyre-sdk[serve]', best into an environment of its own"),
        _package("ray", "many machines", "pip install 'gyre-sdk[ray]'"),
        _disk(store),
    ]
    for name, fine, said in lines:
        typer.echo(f"{'ok' if fine else '--':<3} {name:<8} {said}")


def _module(name: str) -> Any:
    """Load a module of the workspaces when a command needs it."""
    return importlib.import_module(f"gyre_sdk.harness.workspace.{name}")


def _engine() -> Any:
    return _module("engine").connect()


def _docker() -> list[tuple[str, bool, str]]:
    try:
        client = _engine()
    except GyreError as error:
        return [("docker", False, " ".join(str(error).split()))]
    found = [("docker", True, f"an engine answers at {_module('engine').engine_url()}")]
    return found + [(one.name, one.fine, one.said) for one in _module("checkup").check_engine(client)]


def _binary(name: str, purpose: str, remedy: str) -> tuple[str, bool, str]:
    found = shutil.which(name)
    return name, found is not None, found or f"not found ({purpose}); {remedy}"


def _package(name: str, purpose: str, remedy: str) -> tuple[str, bool, str]:
    """Look for a package without importing it."""
    if importlib.util.find_spec(name) is None:
        return name, False, f"not installed ({purpose}); {remedy}"
    try:
        return name, True, metadata.version(name)
    except metadata.PackageNotFoundError:
        return name, True, "present"


def _disk(store: Path) -> tuple[str, bool, str]:
    place = store.resolve()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    return "disk", free > _LITTLE_DISK, f"{free / _GIB:.1f} GiB free for the store at {place}"
