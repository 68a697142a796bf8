"""Halting a container's processes while its files are copied.

A process that waits for a disk cannot be frozen before the disk answers, and the runtime gives up after some tenths of a second
(runc's issue 4388: it is for the caller to try again, which `patience` does). An engine that gave up has let every process go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import docker
from docker.errors import APIError

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.patience import passes


def halt(client: docker.DockerClient, container: str) -> None:
    """Keep every process of a container from running, until `go_on`.

    Raises:
        docker.errors.APIError: the container does not run.
        WorkspaceError: it could not be halted for long.
    """
    try:
        client.api.pause(container)
    except APIError as error:
        if not passes(error):
            raise
        raise WorkspaceError(
            f"the processes of workspace {container[:12]} could not be halted: one of them may wait for a disk; try again when"
            f" the disk is less busy ({error.explanation})"
        ) from error


def go_on(client: docker.DockerClient, container: str) -> None:
    """Let a halted container's processes run again."""
    client.api.unpause(container)


@contextmanager
def halted(client: docker.DockerClient, container: str) -> Iterator[None]:
    """Keep every process of a container from running meanwhile."""
    halt(client, container)
    try:
        yield
    finally:
        go_on(client, container)
