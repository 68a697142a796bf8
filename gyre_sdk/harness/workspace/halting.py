"""Halting a container's processes while its files are copied.

A process that waits for a disk cannot be frozen before the disk answers, and the runtime gives up after some tenths of a second
(runc's issue 4388: it is for the caller to try again). An engine that gave up has let every process go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import docker
from docker.errors import APIError

from gyre_sdk.errors import WorkspaceError

PATIENCE = 30.0
"""Seconds to go on trying. A disk that is busy answers in a few."""

_FIRST, _LONGEST = 0.05, 1.0
"""Seconds between two tries; doubled each time."""


def halt(client: docker.DockerClient, container: str, patience: float = PATIENCE) -> None:
    """Keep every process of a container from running, until `go_on`.

    Raises:
        docker.errors.APIError: the container does not run.
        WorkspaceError: it could not be halted for `patience` seconds.
    """
    until, delay = time.monotonic() + patience, _FIRST
    while True:
        try:
            client.api.pause(container)
            return
        except APIError as error:
            if not error.is_server_error():
                raise
            if time.monotonic() + delay > until:
                raise WorkspaceError(
                    f"the processes of workspace {container[:12]} could not be halted for {patience:g} s: one of them may"
                    f" wait for a disk; try again when the disk is less busy ({error.explanation})"
                ) from error
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST)


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
