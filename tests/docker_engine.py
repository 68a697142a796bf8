"""The Docker engine of the tests: $DOCKER_HOST or the default socket, else a private dockerd started here.

A pytest plugin: `docker_url`, `docker_client` and `base_image`. At the session's end no container of this process may be left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from gyre_sdk.harness.workspace import engine
from gyre_sdk.harness.workspace.images import DEFAULT_IMAGE
from gyre_sdk.harness.workspace.reaper import owned
from gyre_sdk.harness.workspace.sandboxes import build_sandbox


@pytest.fixture(scope="session")
def docker_url() -> Iterator[str]:
    """URL of an engine that answers; DOCKER_HOST points to it for the rest of the session."""
    given = os.environ.get("DOCKER_HOST") or engine.DEFAULT_URL
    if engine.answers(given):
        yield given
        return
    missing = engine.can_start_private_engine()
    if missing is not None:
        without = pytest.fail if os.environ.get("CI") else pytest.skip  # in CI nothing is skipped for want of Docker
        without(f"no Docker engine answers at {given} and none can be started: {missing}")
    folder = tempfile.mkdtemp(prefix="gyre-dockerd-")
    private = engine.start_private_engine(folder)
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = private.url
    try:
        yield private.url
    finally:
        if before is None:
            os.environ.pop("DOCKER_HOST", None)
        else:
            os.environ["DOCKER_HOST"] = before
        private.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def docker_client(docker_url):  # type: ignore[no-untyped-def]
    """A client of the engine; at the end, nothing that this process opened is left there."""
    client = engine.shared_client(docker_url)
    yield client
    left = owned(client)
    assert not left, f"containers left behind: {left}"


@pytest.fixture(scope="session")
def base_image(docker_client) -> str:  # type: ignore[no-untyped-def]
    """Name of the base sandbox, built on the engine."""
    return build_sandbox(docker_client, "base").name or DEFAULT_IMAGE
