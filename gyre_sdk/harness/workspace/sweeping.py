"""What dead processes left on an engine is removed: containers, their networks, snapshots. Nothing without gyre's labels is."""

from __future__ import annotations

from dataclasses import dataclass, field

import docker
from docker.errors import APIError

from gyre_sdk.harness.workspace.images import BUILT, TASK_IMAGES
from gyre_sdk.harness.workspace.network.internal import sweep_networks
from gyre_sdk.harness.workspace.reaper import sweep_containers
from gyre_sdk.harness.workspace.snapshots import ROOM, Snapshot, make_room


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep removed."""

    containers: list[str] = field(default_factory=list)
    """Ids."""
    networks: list[str] = field(default_factory=list)
    """Ids."""
    snapshots: list[Snapshot] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Disk room that the snapshots took beyond their images."""
        return sum(one.bytes for one in self.snapshots)


def sweep(client: docker.DockerClient, *, room: int = ROOM) -> Swept:
    """Remove gyre's containers, networks and snapshots whose owner is dead or whose deadline has passed.

    Those of living owners, and whatever has no label of gyre's, are never touched.

    Args:
        room: bytes that kept snapshots may take; beyond, the oldest go.
    """
    containers = sweep_containers(client)  # first: a container in use keeps its network and its snapshot
    return Swept(containers, sweep_networks(client), make_room(client, room))


def sweep_images(client: docker.DockerClient) -> list[str]:
    """Remove the images that were built for tasks and that no container uses; return their names. They are built again when needed."""
    removed = []
    for image in client.api.images(filters={"label": BUILT}):
        for name in image.get("RepoTags") or []:
            if not name.startswith(f"{TASK_IMAGES}:"):
                continue
            try:
                client.api.remove_image(name)
                removed.append(name)
            except APIError:  # a container uses it, or a snapshot starts from it
                continue
    return removed
