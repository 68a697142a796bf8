"""Workspaces to test, of every kind that has to behave the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, Isolation, LocalWorkspace

LIMITS = {"memory_mb": 256, "pids": 128, "disk_mb": 64}


@pytest.fixture(scope="module")
def docker_workspace(docker_client, base_image) -> Iterator[DockerWorkspace]:
    with DockerWorkspace(Task(instruction="x", **LIMITS), docker_client) as workspace:
        yield workspace


@pytest.fixture(scope="module", params=["docker", "bubblewrap", "namespaces", "none"])
def workspace(request):
    """One workspace of each kind, shared by a module: its tests must leave it usable."""
    if request.param == "docker":
        yield request.getfixturevalue("docker_workspace")
        return
    with LocalWorkspace(Task(instruction="x"), isolation=Isolation(request.param)) as local:
        yield local


@pytest.fixture(scope="module")
def bash_workspace() -> Iterator[LocalWorkspace]:
    """A workspace with bash, which the base image lacks."""
    with LocalWorkspace(Task(instruction="x")) as local:
        assert local.exec("echo ${BASH_VERSION:+bash}").stdout == "bash\n", "install bash"
        yield local
