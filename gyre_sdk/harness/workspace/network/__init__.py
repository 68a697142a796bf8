"""What a workspace reaches: nothing but the recording proxy, hosts of an allow list, or the internet.

`Network` connects one container as `plan` says: `none` has loopback only, with the recording proxy listening on it
(`Relay`); `allowlist` has an egress proxy beside it (`Egress`). Listeners are sockets of this process, made inside the
container's network namespace (`inside`), or connections that a relay container carries here (`helper`).
"""

from __future__ import annotations

from gyre_sdk.harness.workspace.network.attached import Network
from gyre_sdk.harness.workspace.network.egress import Egress
from gyre_sdk.harness.workspace.network.inside import CannotEnter, connect_inside, listen_inside
from gyre_sdk.harness.workspace.network.internal import sweep_networks
from gyre_sdk.harness.workspace.network.plan import EGRESS_PORT, PROXY_PORT, Plan, Wire, plan
from gyre_sdk.harness.workspace.network.relay import Relay

__all__ = [
    "EGRESS_PORT",
    "PROXY_PORT",
    "CannotEnter",
    "Egress",
    "Network",
    "Plan",
    "Relay",
    "Wire",
    "connect_inside",
    "listen_inside",
    "plan",
    "sweep_networks",
]
