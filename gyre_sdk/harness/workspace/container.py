"""One hardened container: created, started, attached to, removed. Knows nothing of commands or files."""

from __future__ import annotations

import os
import posixpath
import socket
import threading
import time
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Ulimit

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import owner, reaper
from gyre_sdk.harness.workspace.images import Image, image_missing

SUPERVISOR_FOLDER = "/run/gyre"
RECYCLED_FOLDERS = ("/tmp", "/logs", "/tests")
"""Writable folders of a read-only container, besides the working directory."""
_SLACK = 900.0
"""Seconds of lifetime beyond the agent's and the verifier's limits (retries, queues)."""
_starts = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""A burst of starts is slower than a ramp: 50 at once took longer than 8 at a time."""


def lifetime(task: Task) -> float:
    """Return how long a container for this task may live, seconds."""
    return (task.agent_timeout_s or 6 * 3600.0) + 3 * task.verifier_timeout_s + _SLACK


def host_config(client: docker.DockerClient, task: Task, *, uid: str, workdir: str, read_only: bool) -> dict[str, Any]:
    """Return the engine's limits for a task: no capability, no network, no new privileges, bounded everything."""
    numeric = [part for part in uid.split(":") if part.isdigit()]
    whose = f"uid={numeric[0]},gid={numeric[-1]},mode=755" if numeric else "mode=1777"
    size = f"size={task.disk_mb or max(64, task.memory_mb // 2)}m"
    tmpfs = {
        SUPERVISOR_FOLDER: "rw,size=64m,mode=1777",
        "/logs": f"rw,{whose},{size}",
        "/tests": f"rw,exec,{whose},{size}",
    }
    if read_only or task.disk_mb:
        tmpfs[workdir] = f"rw,exec,{whose},{size}"
    if read_only:
        tmpfs["/tmp"] = f"rw,exec,mode=1777,{size}"
    config: dict[str, Any] = client.api.create_host_config(
        network_mode=task.network,
        init=True,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        pids_limit=task.pids,
        mem_limit=f"{task.memory_mb}m",
        memswap_limit=f"{task.memory_mb}m",
        nano_cpus=int(min(task.cpus, os.cpu_count() or 1) * 1e9),
        read_only=read_only,
        ipc_mode="none" if read_only else None,
        tmpfs=tmpfs,
        auto_remove=True,
        log_config=LogConfig(type="none"),
        ulimits=[Ulimit(name="nofile", soft=4096, hard=8192), Ulimit(name="core", soft=0, hard=0)],
    )
    return config


class Container:
    """A container that ends itself when its lifetime is over, whatever becomes of its owner.

    Its first process sleeps as root under an init, without any capability: no signal of an unprivileged agent reaches it.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        image: Image,
        task: Task,
        *,
        run: str,
        uid: str,
        workdir: str,
        read_only: bool = False,
        ttl_s: float | None = None,
    ) -> None:
        self.client = client
        self.ttl_s = ttl_s or lifetime(task)
        self.deadline = time.time() + self.ttl_s
        self.workdir = workdir
        self._started = time.time()
        self.id = ""
        try:
            with _starts:
                self.id = client.api.create_container(
                    image.id,
                    command=["sleep", str(max(1, int(self.ttl_s)))],
                    user="0:0",
                    working_dir=workdir,
                    host_config=host_config(client, task, uid=uid, workdir=workdir, read_only=read_only),
                    labels=owner.labels(owner.me(), run=run, deadline=self.deadline),
                )["Id"]
                reaper.watch(id(self), self.remove)
                if not read_only and not task.disk_mb:
                    self._give_workdir(image, uid)
                client.api.start(self.id)
        except ImageNotFound as error:
            raise image_missing(image.name) from error
        except DockerException as error:
            self.remove()
            raise WorkspaceError(f"a container of image {image.name!r} does not start: {_said(error)}") from error
        except BaseException:
            self.remove()
            raise

    def _give_workdir(self, image: Image, uid: str) -> None:
        """Make the working directory and what the image has there the user's, without running anything inside."""
        numbers = uid.split(":")
        if not numbers[0].isdigit():
            return
        archive = image.workdir_for(self.client, self.workdir, int(numbers[0]), int(numbers[-1]))
        if archive is not None:
            self.client.api.put_archive(self.id, posixpath.dirname(self.workdir), archive)

    def attach(self, argv: list[str], *, user: str) -> socket.socket:
        """Start a process inside and return the socket of its three streams.

        Raises:
            NotAttached: the engine refused.
        """
        try:
            api = self.client.api
            made = api.exec_create(self.id, argv, stdin=True, user=user, workdir=self.workdir)["Id"]
            found = api.exec_start(made, socket=True)
        except (DockerException, OSError) as error:
            raise NotAttached(_said(error)) from error
        raw: socket.socket = getattr(found, "_sock", found)
        raw.settimeout(None)
        _kept.append_response(raw, found)
        return raw

    def post_mortem(self, detail: str) -> str | None:
        """Return why the container is dead, or None when it runs."""
        try:
            state = self.client.api.inspect_container(self.id)["State"]
        except NotFound:
            state = {}
        except (DockerException, OSError) as error:
            return f"the Docker engine does not answer ({_said(error)})"
        if state.get("Running") and not state.get("Dead"):
            return None
        if time.time() >= self.deadline - 1:
            return f"its lifetime of {self.ttl_s:g} s is over; give the task longer time limits"
        end = self._end(state)
        return f"its container stopped{end}; last heard: {detail or 'nothing'}"

    def _end(self, state: dict[str, Any]) -> str:
        """Describe how the container ended, from its state or, once removed, from the engine's recent events."""
        code, out_of_memory = state.get("ExitCode"), bool(state.get("OOMKilled"))
        try:
            window = {"since": int(self._started) - 1, "until": int(time.time()) + 1}
            events = self.client.api.events(
                decode=True, filters={"container": self.id, "event": ["die", "oom"]}, **window
            )
            for event in events:
                out_of_memory |= event.get("Action") == "oom"
                if event.get("Action") == "die":
                    code = event["Actor"]["Attributes"].get("exitCode", code)
        except (DockerException, OSError, KeyError):
            pass
        return (f" with exit code {code}" if code is not None else "") + (", out of memory" if out_of_memory else "")

    def remove(self) -> None:
        """Remove the container. Idempotent; an engine that does not answer leaves it to its deadline and to `sweep`."""
        reaper.unwatch(id(self))
        if not self.id:
            return
        try:
            reaper.remove(self.client, self.id)
        except (DockerException, OSError):
            pass


class NotAttached(Exception):
    """The engine could not start a process in a container. Internal."""


class _Kept:
    """Keeps the HTTP response of an attached socket alive: collected, it would close the socket under us."""

    def __init__(self) -> None:
        self._responses: dict[int, object] = {}

    def append_response(self, sock: socket.socket, response: object) -> None:
        self._responses[id(sock)] = (sock, response)

    def drop(self, sock: socket.socket) -> None:
        self._responses.pop(id(sock), None)


_kept = _Kept()


def release(sock: socket.socket) -> None:
    """Forget an attached socket that was closed."""
    _kept.drop(sock)


def _said(error: BaseException) -> str:
    text = error.explanation if isinstance(error, APIError) and error.explanation else str(error)
    return str(text).strip()[:400]
