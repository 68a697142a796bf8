"""Which kind of workspace a machine gets, and why: never a silent fallback."""

from __future__ import annotations

from typing import Literal

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.engine import shared_client
from gyre_sdk.harness.workspace.isolation import best_isolation

Kind = Literal["docker", "local", "auto"]


def choose(kind: Kind, engine: str | None = None) -> tuple[Literal["docker", "local"], str]:
    """Return (`docker` or `local`, the reason).

    Raises:
        WorkspaceError: `docker` was asked for and no engine answers, or the kind is unknown.
    """
    if kind not in ("docker", "local", "auto"):
        raise WorkspaceError(f"workspace kind {kind!r} is unknown; use 'docker', 'local' or 'auto'")
    if kind == "local":
        return "local", f"asked for; isolation {best_isolation().value}"
    try:
        shared_client(engine)
    except WorkspaceError as error:
        if kind == "docker":
            raise
        return "local", f"{str(error).partition(';')[0]}; isolation {best_isolation().value}"
    return "docker", "asked for" if kind == "docker" else "a Docker engine answers"
