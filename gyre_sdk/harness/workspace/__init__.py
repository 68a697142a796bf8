"""Workspaces: where an agent's tools run.

`open_workspace` opens one for a task; `WorkspacePool` opens many. Both give `ports.Workspace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.choice import choose
from gyre_sdk.harness.workspace.docker import DockerWorkspace
from gyre_sdk.harness.workspace.engine import shared_client
from gyre_sdk.harness.workspace.hardening import Phase
from gyre_sdk.harness.workspace.isolation import Isolation
from gyre_sdk.harness.workspace.local import LocalWorkspace, sweep_local
from gyre_sdk.harness.workspace.pool import WorkspacePool
from gyre_sdk.harness.workspace.pooled import PooledWorkspace
from gyre_sdk.harness.workspace.sweeping import Swept, sweep

AnyWorkspace = DockerWorkspace | LocalWorkspace | PooledWorkspace

__all__ = [
    "AnyWorkspace",
    "DockerWorkspace",
    "Isolation",
    "LocalWorkspace",
    "PooledWorkspace",
    "Swept",
    "WorkspacePool",
    "choose",
    "open_workspace",
    "sweep",
    "sweep_local",
]


def open_workspace(
    task: Task,
    *,
    kind: Literal["docker", "local", "auto"] | WorkspacePool = "docker",
    pool: WorkspacePool | None = None,
    run_id: str = "",
    engine: str | None = None,
    snapshot: str | None = None,
    phase: Phase = "agent",
    env: Mapping[str, str] | None = None,
) -> AnyWorkspace:
    """Open a workspace for one run of a task.

    Args:
        kind: `docker`; `local`, for machines without Docker; `auto`, docker where an engine answers, else local, which
            the workspace's `describe()` tells; or a pool to take one from.
        pool: same as giving a pool as `kind`.
        run_id: goes into the container's labels.
        engine: URL of the Docker engine; None is $DOCKER_HOST or the default socket.
        snapshot: start from what `DockerWorkspace.snapshot` gave, instead of the task's image and files.
        phase: whose workspace it is; the verifier has an image, a user and a network of its own.
        env: variables of every command besides the task's.

    Raises:
        ImageMissing: the task's image, or the snapshot, is not present.
        WorkspaceError: it cannot be opened; the message says what to do.
    """
    source = pool if pool is not None else kind
    if isinstance(source, WorkspacePool):
        if snapshot is None and phase == "agent" and not env:
            return source.take(task, run_id=run_id)
        engine, source = source.engine, source.kind
    chosen, _ = choose(source, engine)
    if chosen == "local":
        if snapshot is not None:
            raise WorkspaceError(f"snapshot {snapshot!r} needs a Docker engine; local workspaces have none")
        return LocalWorkspace(replace(task, env={**task.env, **(env or {})}), run_id=run_id)
    return DockerWorkspace(task, shared_client(engine), run_id=run_id, snapshot=snapshot, phase=phase, env=env)
