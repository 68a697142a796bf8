"""What a workspace's container is connected to, decided from its task before any container exists. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from gyre_sdk.harness.task import Task

PROXY_PORT = 8111
"""Where the recording proxy is reached inside."""
EGRESS_PORT = 8112
"""Where the egress proxy is reached inside."""
_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_DIRECT = "localhost,127.0.0.1,::1"


class Wire(StrEnum):
    """What the container is connected to by the engine."""

    NOTHING = "nothing"
    """No interface but loopback. Listeners are placed in the container's own network namespace."""
    INTERNAL = "internal"
    """A bridge of its own, without a gateway; a relay container on it is all that can be reached."""
    BRIDGE = "bridge"
    """The engine's bridge, with this machine, private ranges and other workspaces cut off."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one phase of a task is connected."""

    wire: Wire
    allowed: tuple[str, ...] | None = None
    """Hosts that an egress proxy lets through; None: there is no egress proxy."""
    apart: bool = False
    """The runtime has a network stack of its own: no listener can be placed in the container's namespace."""

    @property
    def proxied(self) -> bool:
        """Whether the recording proxy can be reached."""
        return not self.apart or self.wire is Wire.INTERNAL


def plan(task: Task, phase: Literal["agent", "verifier"] = "agent") -> Plan:
    """Return how a phase of a task is connected.

    `none` and `proxy-only` differ only where no listener can be placed inside (gVisor): there, `none` has nothing at all.
    """
    network = task.network if phase == "agent" else task.verifier_network
    hosts = task.allowed_hosts if phase == "agent" else task.verifier_allowed_hosts
    apart = task.runtime is not None
    if network == "full":
        return Plan(Wire.BRIDGE, apart=apart)
    wire = Wire.INTERNAL if apart and network != "none" else Wire.NOTHING
    return Plan(wire, allowed=tuple(hosts) if network == "allowlist" else None, apart=apart)


def proxy_variables(host: str, direct: str = _DIRECT) -> Mapping[str, str]:
    """Return the variables by which programs find the egress proxy; nothing depends on them: there is no other way out.

    Args:
        host: where it listens, as seen from inside.
        direct: hosts that are not asked for through it.
    """
    named = dict.fromkeys(_VARIABLES, f"http://{host}:{EGRESS_PORT}") | {"NO_PROXY": direct}
    return named | {name.lower(): value for name, value in named.items()}
