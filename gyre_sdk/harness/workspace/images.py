"""Images of workspaces: found by name, built once from a Dockerfile, or built from `sandboxes/` without any registry."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import ImageMissing, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.architecture import check_architecture
from gyre_sdk.harness.workspace.building import alone, build
from gyre_sdk.harness.workspace.contents import folder_tar, owned_tar, read_path
from gyre_sdk.harness.workspace.contexts import context_of, digest_of

DEFAULT_IMAGE = "gyre/base"
TASK_IMAGES = "gyre/task"
"""Name of the images that are built for tasks; their tag is a digest of what they are built from."""
BUILT = "gyre.built"
"""Label with the name of an image that was built for a task."""
USER_LABEL = "gyre.user"
ENTRYPOINT_LABEL = "gyre.entrypoint"
"""Entry point, as JSON, of the image that a snapshot was made from."""
SNAPSHOT = "gyre.snapshot"
"""Label with the name of a snapshot."""
MEMORY = "gyre.memory"
"""Label of a snapshot that names the folders whose content was in memory."""
SHELL_LABEL = "gyre.supervisor"
"""Label that names a busybox which users can run but not read, for the supervisor."""
_building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_FROM = re.compile(r"^\s*FROM\s+(?:--\S+\s+)*(\S+)", re.IGNORECASE | re.MULTILINE)
_contents: dict[tuple[str, str], bytes | None] = {}


@dataclass(frozen=True, slots=True)
class Image:
    """An image that is present on the engine."""

    name: str
    id: str
    user: str
    """User that commands run as when the task names none."""
    workdir: str
    """Its own working directory, or `/workspace`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""
    """What it runs on: `amd64`, `arm64`, ...; empty when it does not say."""
    entrypoint: tuple[str, ...] = ()
    """Its entry point, for tasks that want it run; of a snapshot, that of the image it was made from."""

    @property
    def passing(self) -> bool:
        """Whether it is a snapshot, used once or twice: what it holds is not worth remembering."""
        return SNAPSHOT in self.labels

    def content(self, client: docker.DockerClient, folder: str) -> bytes | None:
        """Return what the image has at `folder` as a tar whose first entry is that folder, or None when it has none."""
        if self.passing:
            return read_path(client, self.id, folder)
        key = (self.id, folder)
        with _building[f"folder {self.id}"]:
            if key not in _contents:
                _contents[key] = read_path(client, self.id, folder)
            return _contents[key]

    def workdir_for(self, client: docker.DockerClient, workdir: str, uid: int, gid: int) -> bytes | None:
        """Return the tar that makes `workdir` (created when absent) uid:gid's, or None when it is already."""
        found = self.content(client, workdir)
        if found is not None:
            return owned_tar(found, uid, gid)
        return folder_tar(workdir, uid, gid)


def image_missing(name: str) -> ImageMissing:
    """Return the error for an image that is not on the engine."""
    sandbox = name.removeprefix("gyre/").partition(":")[0] if name.startswith("gyre/") else None
    step = f"gyre sandbox build {sandbox}" if sandbox else f"docker pull {name}"
    return ImageMissing(f"image {name!r} is not present; run: {step} (or give the task a Dockerfile)")


def ensure_image(client: docker.DockerClient, task: Task) -> Image:
    """Return the task's image, building it when the task has a Dockerfile whose contents were not built yet.

    Raises:
        ImageMissing: a named image is not present.
        WorkspaceError: the build failed, or the image is for another architecture than the engine's.
    """
    if task.dockerfile is not None:
        found = _built(client, task.dockerfile, task.build_timeout_s)
    else:
        name = task.image or DEFAULT_IMAGE
        there = find_image(client, name)
        if there is None:
            raise image_missing(name)
        found = there
    check_architecture(client, found.name, found.architecture)
    return found


def phase_image(client: docker.DockerClient, task: Task, snapshot: str | None, phase: str) -> Image:
    """Return the image that a workspace starts from: a snapshot, else the verifier's own in its phase, else the task's.

    Raises:
        ImageMissing: it is not present.
        WorkspaceError: a build failed.
    """
    if snapshot is not None:
        found = find_image(client, snapshot)
        if found is None:
            raise ImageMissing(f"snapshot {snapshot!r} is not on the engine: it was removed, or its time was over")
        return found
    if phase == "verifier" and (task.verifier_image or task.verifier_dockerfile):
        task = replace(task, image=task.verifier_image, dockerfile=task.verifier_dockerfile)
    return ensure_image(client, task)


def find_image(client: docker.DockerClient, name: str) -> Image | None:
    """Return an image by name or id, or None when the engine does not have it.

    Raises:
        WorkspaceError: the engine does not answer.
    """
    try:
        found: dict[str, Any] = client.api.inspect_image(name)
    except (ImageNotFound, NotFound):
        return None
    except DockerException as error:
        raise WorkspaceError(f"image {name!r} cannot be looked up: {error}; is the Docker engine up?") from error
    config = found.get("Config") or {}
    labels = config.get("Labels") or {}
    user = labels.get(USER_LABEL) or config.get("User") or "0:0"
    entrypoint = json.loads(labels[ENTRYPOINT_LABEL]) if ENTRYPOINT_LABEL in labels else config.get("Entrypoint") or ()
    return Image(
        name,
        found["Id"],
        user,
        config.get("WorkingDir") or "/workspace",
        labels,
        found.get("Architecture") or "",
        tuple(entrypoint),
    )


def _built(client: docker.DockerClient, folder: Path, timeout: float) -> Image:
    dockerfile = folder / "Dockerfile"
    if not dockerfile.is_file():
        raise WorkspaceError(f"{dockerfile} does not exist; write it, or name an image")
    bases = {base: find_image(client, base) for base in bases_of(dockerfile)}
    digest = digest_of(folder, [f"{base}={found.id if found else ''}" for base, found in bases.items()])
    tag = f"{TASK_IMAGES}:{digest}"
    with _building[tag]:
        found = find_image(client, tag)
        if found is None:
            with alone(client, tag):
                found = find_image(client, tag)
                if found is None:
                    build(client, context_of(folder), tag, timeout, {BUILT: tag})
                    found = find_image(client, tag)
        if found is None:
            raise image_missing(tag)
        return found


def bases_of(dockerfile: Path) -> list[str]:
    """Return the images that a Dockerfile starts from, as far as they are named outright."""
    named = _FROM.findall(dockerfile.read_text(errors="replace"))
    return [base for base in dict.fromkeys(named) if base != "scratch" and "$" not in base]
