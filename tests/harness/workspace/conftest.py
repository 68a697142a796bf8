"""Workspaces to test, of every kind that has to behave the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, Isolation, LocalWorkspace
from gyre_sdk.harness.workspace.launcher import launcher

LIMITS = {"memory_mb": 256, "pids": 128, "disk_mb": 64}


class ShellDocker(DockerWorkspace):
    """Commands launched by shell code alone, as where there is no compiler."""

    with_launcher = False


class ShellLocal(LocalWorkspace):
    with_launcher = False


@pytest.fixture(scope="module")
def docker_workspace(docker_client, base_image) -> Iterator[DockerWorkspace]:
    assert launcher() is not None, "install a C compiler: the launcher is to be tested too"
    with DockerWorkspace(Task(instruction="x", **LIMITS), docker_client) as workspace:
        yield workspace


@pytest.fixture(scope="module", params=["docker", "docker-shell", "bubblewrap", "namespaces-shell", "none"])
def workspace(request):
    """One workspace of each kind, shared by a module: its tests must leave it usable."""
    kind, _, plain = request.param.partition("-")
    if request.param == "docker":
        yield request.getfixturevalue("docker_workspace")
    elif kind == "docker":
        request.getfixturevalue("base_image")
        # Without a launcher a command takes eight processes more, and all of the battery runs at once.
        with ShellDocker(
            Task(instruction="x", **{**LIMITS, "pids": 256}), request.getfixturevalue("docker_client")
        ) as docker:
            yield docker
    else:
        with (ShellLocal if plain else LocalWorkspace)(Task(instruction="x"), isolation=Isolation(kind)) as local:
            yield local


@pytest.fixture(scope="module")
def bash_workspace() -> Iterator[LocalWorkspace]:
    """A workspace with bash, which the base image lacks."""
    with LocalWorkspace(Task(instruction="x")) as local:
        assert local.exec("echo ${BASH_VERSION:+bash}").stdout == "bash\n", "install bash"
        yield local
