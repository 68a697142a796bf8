"""Building an image on an engine with the classic builder, which every engine has."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError

_LINES = 15
"""Last lines of a build that a message shows."""


def build(
    client: docker.DockerClient, context: bytes, tag: str, timeout: float, labels: Mapping[str, str] | None = None
) -> None:
    """Build a context (a tar) as the image `tag`, leaving no intermediate container.

    Raises:
        WorkspaceError: it failed, or took more than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    lines: list[str] = []
    try:
        for event in client.api.build(
            fileobj=io.BytesIO(context),
            custom_context=True,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            labels=dict(labels or {}),
            timeout=int(timeout) + 1,
        ):
            lines += str(event.get("stream") or event.get("error") or "").splitlines()
            if "error" in event:
                raise WorkspaceError(_failed(tag, lines))
            if time.monotonic() > deadline:
                raise WorkspaceError(
                    f"image {tag!r} was not built within {timeout:g} s; raise build_timeout_s. Last lines:\n"
                    + "\n".join(lines[-_LINES:])
                )
    except (DockerException, OSError) as error:
        raise WorkspaceError(f"image {tag!r} cannot be built: {error}") from error


def _failed(tag: str, lines: list[str]) -> str:
    text = "\n".join(lines[-_LINES:])
    step = ""
    if "no space left on device" in text:
        step = " for want of disk room: gyre gc --images removes images of tasks that nothing uses"
    elif "pull access denied" in text or "manifest unknown" in text or "registry" in lines[-1]:
        step = ", as its base image is not present and cannot be pulled: docker pull or docker load it"
    return f"image {tag!r} cannot be built{step}; its last lines:\n{text}"


@contextmanager
def alone(client: docker.DockerClient, tag: str) -> Iterator[None]:
    """Keep other threads and processes of this machine from building the same image on the same engine meanwhile."""
    try:
        engine = str(client.info().get("ID") or "")
    except (DockerException, OSError):
        engine = ""
    name = hashlib.sha256(f"{os.getuid()} {engine} {tag}".encode()).hexdigest()[:24]
    place = Path(tempfile.gettempdir()) / f"gyre-build-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    with (place / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
