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

from gyre_sdk.errors import GyreError

_GIB = 1 << 30
_LITTLE_DISK = 2 * _GIB


def serve(context: typer.Context) -> None:
    """Serve recorded model access to agents: --store PATH --model FOLDER --replica URL ... (--help lists all)."""
    server: Any = importlib.import_module("gyre_sdk.harness.proxy.server.main")
    raise typer.Exit(server.main(context.args))


def sandbox_list() -> None:
    """List the workspace images that can be built here."""
    images: Any = importlib.import_module("gyre_sdk.harness.workspace.sandboxes")
    names = sorted(path.parent.name for path in Path(images.SANDBOXES).glob("*/Dockerfile"))
    for name in names:
        typer.echo(name)
    if not names:
        typer.echo(f"no sandbox in {images.SANDBOXES}: they come with a checkout of gyre", err=True)


def sandbox_build(
    name: Annotated[str, typer.Argument(help="A sandbox that `gyre sandbox list` shows.", show_default=False)],
) -> None:
    """Build the image of a sandbox on the Docker engine."""
    images: Any = importlib.import_module("gyre_sdk.harness.workspace.sandboxes")
    image = images.build_sandbox(_engine(), name)
    typer.echo(f"built {image.name}")


def gc() -> None:
    """Remove workspaces whose owner is dead; those of living processes are never touched."""
    reaper: Any = importlib.import_module("gyre_sdk.harness.workspace.reaper")
    removed = reaper.sweep(_engine())
    typer.echo(f"removed {len(removed)} containers")


def doctor(
    store: Annotated[Path, typer.Option("--store", help="Where the store is to be.")] = Path(),
) -> None:
    """Say what this machine has, what is missing, and what to install."""
    lines = [
        ("gyre", True, metadata.version("gyre-sdk")),
        ("python", True, platform.python_version()),
        _docker(),
        _binary("bwrap", "bubblewrap, for local workspaces", "apt-get install bubblewrap"),
        _package("torch", "training", "pip install 'gyre-sdk[train]'"),
        _package("trl", "training", "pip install 'gyre-sdk[train]'"),
        _package("vllm", "serving; its own environment will do", "make vllm"),
        _package("ray", "many machines", "pip install 'gyre-sdk[ray]'"),
        _disk(store),
    ]
    for name, fine, said in lines:
        typer.echo(f"{'ok' if fine else '--':<3} {name:<8} {said}")


def _engine() -> Any:
    engine: Any = importlib.import_module("gyre_sdk.harness.workspace.engine")
    return engine.connect()


def _docker() -> tuple[str, bool, str]:
    try:
        version = _engine().version()
    except GyreError as error:
        return "docker", False, " ".join(str(error).split())
    return "docker", True, f"engine {version.get('Version', '?')} answers"


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
