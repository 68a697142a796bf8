"""A workspace's connections: made for its container, gone with it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.network import internal, loopback
from gyre_sdk.harness.workspace.network.egress import Egress
from gyre_sdk.harness.workspace.network.guard import IPV4_ONLY, guard, shared_network
from gyre_sdk.harness.workspace.network.helper import Helper
from gyre_sdk.harness.workspace.network.inside import CannotEnter, listen_inside, process_handle
from gyre_sdk.harness.workspace.network.plan import EGRESS_PORT, PROXY_PORT, Plan, Wire, proxy_variables
from gyre_sdk.harness.workspace.network.relay import Relay
from gyre_sdk.harness.workspace.network.serving import Service, Serving

_PORTS: tuple[int, ...] = (PROXY_PORT, *range(EGRESS_PORT + 1, EGRESS_PORT + 100))
"""Where lanes are reached inside: the first one that is free."""


class Network:
    """What one workspace's container reaches. Made before the container, attached to it once it runs.

    Args:
        plan: how it is connected.
        run: id of the run, for the labels of what has to be made beside the container.
        ttl_s: seconds that the container may live.
        enter: whether this process may join the container's network namespace where it can; otherwise a relay container
            does what is needed, over the engine's API alone.
        shared: whether other containers are to join its network.

    Raises:
        WorkspaceError: the engine cannot connect a container like that.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        plan: Plan,
        *,
        run: str = "",
        ttl_s: float = 6 * 3600.0,
        enter: bool = True,
        shared: bool = False,
    ) -> None:
        self.plan = plan
        self.disabled = (
            plan.wire is Wire.NOTHING and not plan.apart and enter and not shared
        ) and loopback.can_be_left_to_the_runtime(client)
        """Whether the engine is not to connect the container at all: its runtime makes what it has, see `loopback`."""
        self.egress: Egress | None = None
        """The egress proxy of a workspace with an allow list; it knows what it refused."""
        self._client = client
        self._run = run
        self._deadline = time.time() + ttl_s
        self._enter = enter
        self._lock = threading.RLock()
        self._container, self._pid = "", 0
        self._helper: Helper | None = None
        self._serving: dict[int, Serving] = {}
        self._lanes: dict[tuple[str, str], int] = {}
        self._internal: internal.Internal | None = None
        self._shared = ""
        if plan.wire is Wire.INTERNAL:
            self._internal = internal.create(client, run=run, deadline=self._deadline)
            try:
                self._helper = self._start_helper()  # first on the network: its address must not be taken
            except BaseException:
                self._internal.remove(client)
                raise
        elif plan.wire is Wire.BRIDGE:
            self._shared = shared_network(client)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The engine's settings for the container: `network_mode` and what belongs to it."""
        if self._internal is not None:
            return {**self._internal.settings(), "sysctls": IPV4_ONLY}
        if self.plan.wire is Wire.BRIDGE:
            return {"network_mode": self._shared, "sysctls": IPV4_ONLY}
        return loopback.settings() if self.disabled else {"network_mode": "none"}

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment of every command: where the egress proxy is, for a workspace with an allow list."""
        if self.plan.allowed is None:
            return {}
        host = self._host
        return proxy_variables(host) if host == "127.0.0.1" else proxy_variables(host, f"localhost,127.0.0.1,{host}")

    def prepare(self, container: str) -> None:
        """Do what has to be done to a container that was created, before it starts.

        Raises:
            DockerException: the engine refused.
        """
        if self.disabled:
            loopback.name_localhost(self._client, container)

    def attach(self, container: str) -> None:
        """Connect a container that runs, before anything of the task runs in it.

        Raises:
            WorkspaceError: it cannot be connected; the container must not be used.
        """
        self._container = container
        if self._helper is not None:
            self._helper.end_with(container)
        if self.plan.wire is Wire.BRIDGE and not self.plan.apart:
            guard(self._client, container, run=self._run, local=self._local())
        self._begin()

    def change(self, plan: Plan) -> None:
        """Connect the same container for another phase, or another run: no lane and no connection of the last one is left.

        Raises:
            WorkspaceError: it needs another container; this one has no listener any more.
        """
        self.disconnect()
        if (plan.wire, plan.apart) != (self.plan.wire, self.plan.apart):
            raise WorkspaceError(
                f"container {self._container[:12]} is connected to {self.plan.wire.value!r} and cannot change to"
                f" {plan.wire.value!r}: network 'full' needs a container of its own; use verifier_mode = \"separate\""
            )
        self.plan = plan
        self._begin()

    def _begin(self) -> None:
        if self.plan.allowed is not None:
            self.egress = Egress(self.plan.allowed)
            self.serve(EGRESS_PORT, self.egress)

    def connect_proxy(self, base_url: str, api_key: str) -> str:
        """Make the recording proxy reachable inside for one lane, and return its base URL there.

        The key stays outside: the listener adds it, and every lane has a listener of its own. The same lane gets the same one.

        Args:
            base_url: of the lane, as this process reaches it: `http://host:port/v1`.
            api_key: of the lane.

        Raises:
            WorkspaceError: no listener can be placed inside.
        """
        if not self.plan.proxied:
            raise WorkspaceError(
                "the recording proxy cannot be placed inside a container of this runtime (its network stack is its own)"
                " without a network; give the task network 'proxy-only' or 'allowlist'"
            )
        with self._lock:
            port = self._lanes.get((base_url, api_key))
            if port is None or self._serving[port].closed:
                port = self._free_port(Relay(base_url, api_key))
                self._lanes[base_url, api_key] = port
        return f"http://{self._host}:{port}/v1"

    def serve(self, port: int, service: Service) -> None:
        """Answer connections to a port inside by a service of this process.

        Raises:
            WorkspaceError: no listener can be placed there.
        """
        try:
            self._listen(port, service)
        except OSError as error:
            raise WorkspaceError(
                f"nothing can listen on port {port} of container {self._container[:12]}: {error}"
            ) from error

    def disconnect(self) -> None:
        """End every listener and every connection through one. Idempotent."""
        with self._lock:
            serving, self._serving = self._serving, {}
            self._lanes.clear()
            helper, self._helper = self._helper, None
            self.egress = None
        for one in serving.values():
            one.close()
        if helper is not None:
            helper.close()

    def close(self) -> None:
        """Disconnect, and remove what was made beside the container; call it once the container is gone. Idempotent."""
        self.disconnect()
        if self._internal is not None:
            self._internal.remove(self._client)

    def describe(self) -> str:
        """Say what is reached, and what could not be cut off."""
        said = {
            Wire.NOTHING: "no network",
            Wire.INTERNAL: "a network of its own without a gateway",
            Wire.BRIDGE: "the internet over the engine's bridge",
        }[self.plan.wire]
        if self.plan.allowed is not None:
            said += f", an egress proxy for {', '.join(self.plan.allowed)}"
        if self.plan.wire is Wire.BRIDGE:
            said += (
                "; this machine, private ranges and metadata addresses are NOT cut off under this runtime"
                if self.plan.apart
                else "; private ranges and metadata addresses cut off"
                + ("" if self._local() else "; public addresses of the engine's machine are not")
            )
        return said

    @property
    def _host(self) -> str:
        return self._internal.relay if self._internal is not None else "127.0.0.1"

    def _free_port(self, service: Service) -> int:
        for port in _PORTS:
            if port in self._serving and not self._serving[port].closed:
                continue
            try:
                self._listen(port, service)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise WorkspaceError(
                    f"the recording proxy cannot be placed inside container {self._container[:12]}: {error}"
                ) from error
            return port
        raise WorkspaceError(
            f"every port from {PROXY_PORT} to {_PORTS[-1]} is taken inside container {self._container[:12]}"
        )

    def _listen(self, port: int, service: Service) -> None:
        """Place a listener, by joining the namespace where that is possible, else by a relay container."""
        with self._lock:
            if self._enter and self._internal is None:
                try:
                    self._serving[port] = self._listen_there(port, service)
                    return
                except CannotEnter:
                    pass
            if self._helper is None:
                self._helper = self._start_helper()
            serving = Serving(service)
            try:
                self._helper.serve(port, serving)
            except BaseException:
                serving.close()
                raise
            self._serving[port] = serving

    def _listen_there(self, port: int, service: Service) -> Serving:
        pid = self._first_process()
        life = process_handle(pid, container=self._container)
        try:
            listening = listen_inside(pid, port, container=self._container)
        except BaseException:
            os.close(life)
            raise
        serving = Serving(service)
        serving.listen(listening, life)
        return serving

    def _start_helper(self) -> Helper:
        left = max(1.0, self._deadline - time.time())
        if self._internal is not None:
            address = self._client.api.create_endpoint_config(ipv4_address=self._internal.relay)
            networking = self._client.api.create_networking_config({self._internal.name: address})
            settings = {**self._internal.settings(), "sysctls": IPV4_ONLY}
            helper = Helper(self._client, settings, run=self._run, ttl_s=left, networking=networking)
        else:
            settings = {"network_mode": f"container:{self._container}"}
            helper = Helper(self._client, settings, run=self._run, ttl_s=left)
        if self._container:
            helper.end_with(self._container)
        return helper

    def _first_process(self) -> int:
        if not self._pid:
            try:
                self._pid = int(self._client.api.inspect_container(self._container)["State"]["Pid"])
            except (DockerException, OSError) as error:
                raise WorkspaceError(f"container {self._container[:12]} cannot be looked at: {error}") from error
        return self._pid

    def _local(self) -> bool:
        """Tell whether the engine runs on this machine."""
        try:
            os.close(process_handle(self._first_process(), container=self._container))
        except CannotEnter:
            return False
        return True
