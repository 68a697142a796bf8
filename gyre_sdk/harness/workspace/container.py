"""One hardened container: created, started, attached to, removed. Knows nothing of commands or files."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import disk, owner, reaper
from gyre_sdk.harness.workspace.images import Image, image_missing
from gyre_sdk.harness.workspace.patience import Patience, passes
from gyre_sdk.harness.workspace.toolbox import TOOLS_LABEL, Unfit

_SLACK = 900.0
"""Seconds of lifetime beyond the agent's and the verifier's limits (retries, queues)."""
_starts = threading.BoundedSemaphore(2 * (os.cpu_count() or 1))
"""A burst of starts is slower than a ramp: 50 at once took longer than 8 at a time."""


def lifetime(task: Task) -> float:
    """Return how long a container for this task may live, seconds."""
    return (task.agent_timeout_s or 6 * 3600.0) + 3 * task.verifier_timeout_s + _SLACK


class Container:
    """A container that ends itself when its lifetime is over, whatever becomes of its owner.

    Its first process sleeps as root under an init, without any capability: no signal of an unprivileged agent reaches it.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        image: Image,
        settings: Mapping[str, Any],
        *,
        run: str,
        workdir: str,
        ttl_s: float,
        prepare: Callable[[str], None],
        entrypoint: Sequence[str] = (),
        network_disabled: bool = False,
    ) -> None:
        """Create and start a container.

        Args:
            settings: the engine's limits, see `hardening.host_settings`.
            run: id of the run, for the labels.
            ttl_s: seconds that it may live.
            prepare: called with the container's id once it is created, before it starts.
            entrypoint: program, with arguments, that gets the command that sleeps as further ones and ends in running it.
            network_disabled: the engine does not connect it at all.

        Raises:
            ImageMissing, WorkspaceError: it cannot be started.
        """
        self.client = client
        self.ttl_s = ttl_s
        self.deadline = time.time() + self.ttl_s
        self.workdir = workdir
        self._started = time.time()
        self.id = ""
        self._name = ""
        tools = image.labels.get(TOOLS_LABEL)
        settled = {
            "entrypoint": [*entrypoint, f"{tools}/sleep" if tools else "sleep"],
            "command": [str(max(1, int(self.ttl_s)))],
            "user": "0:0",
            "working_dir": workdir,
            "network_disabled": network_disabled,
            "host_config": client.api.create_host_config(**settings),
        }
        patience = Patience()
        while True:
            try:
                self._start(image.id, settled, run, prepare)
                return
            except ImageNotFound as error:
                raise image_missing(image.name) from error
            except DockerException as error:
                self.remove()  # one that did not start is of no use any more
                if not (passes(error) and patience.again()):
                    raise self._not_started(image.name, settings.get("runtime"), error) from error
            except BaseException:
                self.remove()
                raise

    def _start(self, image: str, settled: Mapping[str, Any], run: str, prepare: Callable[[str], None]) -> None:
        with _starts, reaper.starting:
            reaper.refuse_when_ending()
            self._name = name = owner.container_name()
            labels = owner.labels(owner.me(), run=run, deadline=self.deadline, name=name)
            self.id = self.client.api.create_container(image, name=name, labels=labels, **settled)["Id"]
            reaper.watch(id(self), self.remove)
            disk.guard(self.client)
            prepare(self.id)
            self.client.api.start(self.id)

    def _not_started(self, image: str, runtime: str | None, error: DockerException) -> WorkspaceError:
        try:
            there = sorted(self.client.info().get("Runtimes") or {}) if runtime else []
        except (DockerException, OSError):
            there = []
        if there and runtime not in there:
            return WorkspaceError(
                f"the Docker engine has no runtime {runtime!r}; it has {', '.join(there)}: install gVisor and register it"
                " (runsc install, then restart dockerd), or use runtime=None"
            )
        said = _said(error)
        kind = Unfit if "sleep" in said and "not found" in said else WorkspaceError
        return kind(f"a container of image {image!r} does not start: {said}")

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

    def pid(self) -> int:
        """Return the id of its first process on the engine's machine; 0 when it is not running or cannot be asked for."""
        try:
            return int(self.client.api.inspect_container(self.id)["State"].get("Pid") or 0)
        except (DockerException, OSError, KeyError):
            return 0

    def post_mortem(self, detail: str) -> str | None:
        """Return why the container is dead, or None when it runs.

        Raises:
            WorkspaceError: the engine is too busy to tell; the container may well run.
        """
        try:
            state = self.client.api.inspect_container(self.id)["State"]
        except NotFound:
            state = {}
        except (DockerException, OSError) as error:
            if passes(error):
                raise WorkspaceError(f"container {self.id[:12]} cannot be looked at: {_said(error)}") from error
            return f"the Docker engine does not answer ({_said(error)})"
        if state.get("Running") and not state.get("Dead"):
            return None
        ended = disk.why_ended(self.id)
        if ended is not None:
            return ended
        if time.time() >= self.deadline - 1:
            return f"its lifetime of {self.ttl_s:g} s is over; give the task longer time limits"
        end = self._end(state)
        return f"its container stopped{end}; {detail}"

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
        if self._name:  # also one whose creation was not answered
            reaper.remove(self.client, self.id or self._name)


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
