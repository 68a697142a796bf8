"""The services of a task: containers beside a workspace that share its network, as in a pod, and nothing else.

Each runs with the limits of the workspace and no capability, and ends with its lifetime even when its owner was killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Healthcheck, Service, Task
from gyre_sdk.harness.workspace import owner, reaper
from gyre_sdk.harness.workspace.hardening import host_settings
from gyre_sdk.harness.workspace.images import ensure_image

ADDRESS = "127.0.0.1"
"""Where a service is reached from the workspace: its own loopback address."""
_KEPT = 4096
"""Bytes of what a service prints that are kept."""


class Services:
    """The running services of one workspace.

    Args:
        main: id of the workspace's container, which runs.
        run: id of the run, for the labels.
        deadline: when they end, seconds since the epoch.

    Raises:
        ImageMissing, WorkspaceError: one cannot be started, ended, or is not healthy; the message has what it printed last.
    """

    def __init__(self, client: docker.DockerClient, task: Task, *, main: str, run: str, deadline: float) -> None:
        self._client = client
        self._started: dict[str, str] = {}
        self._printed: dict[str, _Tail] = {}
        self._settings: dict[str, Any] = {
            **host_settings(
                task,
                network={"network_mode": f"container:{main}"},
                memory={},
                read_only=False,
                cpus_there=os.cpu_count() or 1,
            ),
            "cap_add": None,
        }
        try:
            for service in task.services:
                self._start(service, task, run, deadline)
                if service.healthcheck is not None:
                    self._await_healthy(service.name, service.healthcheck)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove them. Idempotent; an engine that does not answer leaves them to their deadline and to `sweep`."""
        reaper.unwatch(id(self))
        for container in self._started.values():
            reaper.remove(self._client, container)
        self._started.clear()

    def _start(self, service: Service, task: Task, run: str, deadline: float) -> None:
        image = ensure_image(self._client, replace(task, image=service.image, dockerfile=service.dockerfile))
        name = owner.container_name()
        left = max(1, int(deadline - time.time()))
        try:
            config = self._client.api.inspect_image(image.id).get("Config") or {}
            made = self._client.api.create_container(
                image.id,
                name=name,
                entrypoint=["timeout", "-s", "KILL", str(left)],
                command=[*_argv(service, config.get("Entrypoint") or (), config.get("Cmd") or ())],
                environment=dict(service.env),
                user=service.user or config.get("User") or "0:0",
                working_dir=service.workdir or config.get("WorkingDir") or "/",
                host_config=self._client.api.create_host_config(**self._settings),
                labels=owner.labels(owner.me(), run=run, deadline=deadline, name=name),
            )["Id"]
            self._started[service.name] = made
            reaper.watch(id(self), self.close)
            self._printed[service.name] = _Tail(self._client, made)
            self._client.api.start(made)
        except DockerException as error:
            raise WorkspaceError(
                f"service {service.name!r} does not start: {error}; its image needs the program `timeout`"
            ) from error

    def _await_healthy(self, name: str, check: Healthcheck) -> None:
        start, failures = time.monotonic(), 0
        while True:
            grace = time.monotonic() - start < check.start_period_s
            code, printed = self._probe(name, check)
            if code == 0:
                return
            failures = 0 if grace else failures + 1
            if failures >= check.retries:
                raise WorkspaceError(
                    f"service {name!r} is not healthy: {check.command!r} gave exit code {code}, {failures} times in a row:"
                    f" {printed or self._said(name)}"
                )
            time.sleep(check.start_interval_s if grace else check.interval_s)

    def _probe(self, name: str, check: Healthcheck) -> tuple[int, str]:
        """Run a health check inside a service; return its exit code and the end of what it printed."""
        api, container = self._client.api, self._started[name]
        argv = ["timeout", "-s", "KILL", f"{check.timeout_s:g}", "sh", "-c", check.command]
        try:
            made = api.exec_create(container, argv)["Id"]
            printed: bytes = api.exec_start(made)
            code = api.exec_inspect(made)["ExitCode"]
            if code is not None:
                return int(code), printed.decode(errors="replace").strip()[-600:]
            problem = "its health check was cut off"
        except DockerException as error:
            problem = str(error)
        raise WorkspaceError(
            f"service {name!r} cannot be asked for its health: {problem}"
            if self._runs(name)
            else f"service {name!r} ended: {self._said(name)}"
        )

    def _runs(self, name: str) -> bool:
        try:
            return bool(self._client.api.inspect_container(self._started[name])["State"].get("Running"))
        except DockerException:
            return False

    def _said(self, name: str) -> str:
        return self._printed[name].text() or "it printed nothing"


class _Tail:
    """The end of what a container prints, followed from before its start: once it has ended it is gone, and its log with it."""

    def __init__(self, client: docker.DockerClient, container: str) -> None:
        self._kept = b""
        stream = client.api.attach(container, stdout=True, stderr=True, stream=True)
        self._reader = threading.Thread(target=self._read, args=(stream,), name="gyre service output", daemon=True)
        self._reader.start()

    def _read(self, stream: Iterable[bytes]) -> None:
        try:
            for piece in stream:
                self._kept = (self._kept + piece)[-_KEPT:]
        except (DockerException, OSError, ValueError):  # the connection ends with the container
            pass

    def text(self) -> str:
        """Return it, waiting a little for the rest of a container that has ended."""
        self._reader.join(1.0)
        return self._kept.decode(errors="replace").strip()[-600:]


def _argv(service: Service, entrypoint: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Return the command line of a service: its own entry point takes no command of the image."""
    if service.entrypoint is not None:
        return (*service.entrypoint, *(service.command or ()))
    return (*entrypoint, *(command if service.command is None else service.command))
