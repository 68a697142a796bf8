"""How a task's container is to be: from which image, as whom, where, with what in memory. Known before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import docker

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.container import lifetime
from gyre_sdk.harness.workspace.hardening import SUPERVISOR_FOLDER, Phase, is_root, memory_folders, user_of
from gyre_sdk.harness.workspace.images import Image
from gyre_sdk.harness.workspace.snapshots import WORKDIR_OWNER
from gyre_sdk.harness.workspace.users import ids_of


@dataclass(frozen=True, slots=True)
class Layout:
    """One workspace's container."""

    image: Image
    user: str
    """Who commands run as: a name, or `uid[:gid]`."""
    ids: str
    """The same as `uid:gid`."""
    workdir: str
    ttl_s: float
    read_only: bool
    memory: Mapping[str, str]
    """Folder kept in memory -> mount options."""
    own_kernel: bool
    """Whether it runs under gVisor, which may keep what is written to itself."""
    env: Mapping[str, str]
    """Variables of every command, besides those of the network."""

    @property
    def owned(self) -> str:
        """Value of a snapshot's label for a working directory that is all the user's."""
        return f"{self.ids} {self.workdir}"

    @property
    def unseen(self) -> list[str]:
        """Folders whose content the engine does not see, so that it is read from inside."""
        apart = {self.workdir, "/tmp"} if self.own_kernel else set()
        return sorted((self.memory.keys() | apart) - {SUPERVISOR_FOLDER})

    def workdir_to_give(self, client: docker.DockerClient) -> bytes | None:
        """Return the tar that makes the working directory, and what the image has there, the user's; None when nothing has to."""
        if self.workdir in self.memory or self.image.labels.get(WORKDIR_OWNER) == self.owned:
            return None
        if self.image.passing and is_root(self.user):
            return None  # what is in a snapshot stays whose it is; root does not need it
        uid, gid = self.ids.split(":")
        return self.image.workdir_for(client, self.workdir, int(uid), int(gid))


def layout_of(
    client: docker.DockerClient,
    task: Task,
    image: Image,
    *,
    phase: Phase,
    read_only: bool,
    ttl_s: float | None,
    env: Mapping[str, str],
) -> Layout:
    """Return the layout for a phase of a task.

    Raises:
        WorkspaceError: the image has no such user.
    """
    user = user_of(task, phase, image.user)
    ids = ids_of(client, image, user)
    workdir = task.workdir or image.workdir
    read_only = read_only or task.read_only
    variables = {**task.env, **env}
    if not is_root(user):
        variables.setdefault("HOME", workdir)
    memory = memory_folders(task, uid=ids, workdir=workdir, read_only=read_only)
    return Layout(
        image, user, ids, workdir, ttl_s or lifetime(task), read_only, memory, task.runtime is not None, variables
    )
