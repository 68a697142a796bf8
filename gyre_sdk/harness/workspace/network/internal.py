"""A bridge for one workspace and its relay container: no gateway, no other member, no way to this machine.

The engine's own choice of subnets ends after about thirty networks, so each gets eight addresses of a range of ours.
"""

from __future__ import annotations

import ipaddress
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import owner

RANGE = ipaddress.IPv4Network("198.18.0.0/15")
"""Set aside for measurements (https://www.rfc-editor.org/rfc/rfc2544): on no network that a machine is part of."""
_PREFIX = 29
_TRIES = 50
_LEAVING_S = 5.0
_OPTIONS = {"com.docker.network.bridge.inhibit_ipv4": "true", "com.docker.network.bridge.enable_ip_masquerade": "false"}


@dataclass(frozen=True, slots=True)
class Internal:
    """A network that exists on the engine."""

    id: str
    name: str
    relay: str
    """Address of the relay container on it."""

    def settings(self) -> Mapping[str, Any]:
        """Return the engine's settings of a container on it: no name is resolved, by nobody."""
        return {"network_mode": self.name, "dns": ["127.0.0.1"]}

    def remove(self, client: docker.DockerClient) -> None:
        """Remove it, once it has no member. Idempotent; what cannot be removed is left to `sweep_networks`."""
        give_up = time.monotonic() + _LEAVING_S
        while True:
            try:
                client.api.remove_network(self.id)
            except NotFound:
                return
            except APIError:  # a member is being removed
                if time.monotonic() < give_up:
                    time.sleep(0.05)
                    continue
            except (DockerException, OSError):
                pass
            return


def create(client: docker.DockerClient, *, run: str, deadline: float) -> Internal:
    """Make a network.

    Raises:
        WorkspaceError: the engine cannot.
    """
    drawn = random.SystemRandom()  # processes that share an engine must not draw the same ones
    problem = ""
    for _ in range(_TRIES):
        first = int(RANGE.network_address) + drawn.randrange(1 << (_PREFIX - RANGE.prefixlen)) * (1 << (32 - _PREFIX))
        subnet = ipaddress.IPv4Network((first, _PREFIX))
        pool = docker.types.IPAMPool(subnet=str(subnet), gateway=str(subnet[1]))
        name = owner.container_name()
        try:
            made = client.api.create_network(
                name,
                driver="bridge",
                options=_OPTIONS,
                internal=True,
                ipam=docker.types.IPAMConfig(pool_configs=[pool]),
                labels=owner.labels(owner.me(), run=run, deadline=deadline, name=name),
            )
        except APIError as error:
            problem = str(error.explanation or error)
            if "overlap" in problem.lower():
                continue
            break
        except (DockerException, OSError) as error:
            problem = str(error)
            break
        return Internal(made["Id"], name, str(subnet[2]))
    raise WorkspaceError(f"the engine cannot make a network of the workspace's own: {problem}; use network 'none'")


def sweep_networks(client: docker.DockerClient) -> list[str]:
    """Remove networks whose owner is dead or whose deadline has passed and that have no member; return their names."""
    removed = []
    for found in client.api.networks(filters={"label": owner.RUN}):
        if not owner.is_stale(found.get("Labels") or {}):
            continue
        try:
            client.api.remove_network(found["Id"])
        except NotFound:
            continue
        except APIError:  # it still has a member, which is swept first
            continue
        removed.append(found["Name"])
    return removed
