"""A workspace in a Docker container of its own."""

from __future__ import annotations

import json
import os
import posixpath
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task, await_healthy
from gyre_sdk.harness.workspace.channel import SocketChannel
from gyre_sdk.harness.workspace.commands import checked
from gyre_sdk.harness.workspace.container import Container, NotAttached, release
from gyre_sdk.harness.workspace.copying import Copying
from gyre_sdk.harness.workspace.disk import require_room
from gyre_sdk.harness.workspace.expose import Exposure
from gyre_sdk.harness.workspace.hardening import SUPERVISOR_FOLDER, Phase, host_settings, is_root
from gyre_sdk.harness.workspace.images import ENTRYPOINT_LABEL, MEMORY, phase_image
from gyre_sdk.harness.workspace.last import Last
from gyre_sdk.harness.workspace.layout import layout_of
from gyre_sdk.harness.workspace.memory import clear_attributes, pid_of
from gyre_sdk.harness.workspace.network import Network, plan
from gyre_sdk.harness.workspace.output import OUTPUT_LIMIT
from gyre_sdk.harness.workspace.overlay import NotHere
from gyre_sdk.harness.workspace.owner import RUN
from gyre_sdk.harness.workspace.recycling import cleaning
from gyre_sdk.harness.workspace.services import ADDRESS, Services
from gyre_sdk.harness.workspace.snapshots import KEPT_S, WORKDIR_OWNER, remove, take
from gyre_sdk.harness.workspace.supervised import SupervisedWorkspace
from gyre_sdk.harness.workspace.supervisor import Supervisor, SupervisorLost, arguments, fresh_name
from gyre_sdk.harness.workspace.toolbox import fitted, lending, shell_of
from gyre_sdk.records import ExecResult

if TYPE_CHECKING:
    import docker


class DockerWorkspace(SupervisedWorkspace):
    """Runs commands in one container, removed by `close`, at exit, by signals, and after its lifetime.

    Args:
        run_id: goes into the container's labels.
        ttl_s: seconds that it may live; None is what the task's limits need.
        read_only: see `Task.read_only`, for a task that does not say it itself.
        snapshot: start from what `snapshot` gave, instead of the task's image and files.
        phase: whose workspace it is; the verifier has an image, a user and a network of its own.
        env: variables of every command besides the task's.
        recyclable: `recycle` may be called.

    Raises:
        ImageMissing, WorkspaceError: it cannot be started.
    """

    @lending
    def __init__(
        self,
        task: Task,
        client: docker.DockerClient,
        *,
        run_id: str = "",
        ttl_s: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        read_only: bool = False,
        snapshot: str | None = None,
        phase: Phase = "agent",
        env: Mapping[str, str] | None = None,
        copying: Copying | None = None,
        recyclable: bool = False,
    ) -> None:
        require_room(client, "another workspace")
        image = copying.image if copying else fitted(client, phase_image(client, task, snapshot, phase))
        layout = layout_of(client, task, image, phase=phase, read_only=read_only, ttl_s=ttl_s, env=env or {})
        self.task, self.phase, self.run_id, self.image, self.layout = task, phase, run_id, image, layout
        self._again: dict[str, Any] = {"read_only": read_only, "phase": phase, "env": env, "output_limit": output_limit}
        self._recyclable = recyclable
        self._basis: str | None = None
        self._exposed: dict[int, Exposure] = {}
        self._last = Last()
        self._services: Services | None = None
        self.network = Network(client, plan(task, phase), run=run_id, ttl_s=layout.ttl_s, shared=bool(task.services))
        try:
            container = Container(
                client,
                image,
                self._settings(),
                run=run_id,
                workdir=layout.workdir,
                ttl_s=layout.ttl_s,
                prepare=lambda id: self._prepare(client, id, copying),
                entrypoint=image.entrypoint if task.entrypoint else (),
                network_disabled=self.network.disabled,
            )
        except BaseException:
            self.network.close()
            raise
        super().__init__(
            container.id[:12],
            workdir=layout.workdir,
            user=layout.user,
            env={**self.network.variables, **layout.env},
            output_limit=output_limit,
        )
        self.container = container
        try:
            self.network.attach(container.id)
            if copying is not None:
                copying.after_start(container.id)
                threading.Thread(target=self._get_ready, name="gyre-fork", daemon=True).start()
            else:
                self._supervisor(self.user)
                self._restore()
                if snapshot is None:
                    self._furnish(task)
            if task.services and phase == "agent":
                self._services = Services(client, task, main=container.id, run=run_id, deadline=container.deadline)
            if task.healthcheck is not None and phase == "agent":
                await_healthy(self, task.healthcheck)
        except BaseException:
            self.close()
            raise

    def _get_ready(self) -> None:
        """Start the supervisor of a fork, whose source has shown that one can be, beside whatever its caller does next."""
        try:
            self._supervisor(self.user)
        except WorkspaceError:
            pass  # the first command meets the same, and tells

    def _settings(self) -> dict[str, Any]:
        cpus, layout = os.cpu_count() or 1, self.layout
        settings = host_settings(
            self.task, network=self.network.settings, memory=layout.memory, read_only=layout.read_only, cpus_there=cpus
        )
        if services := {service.name: ADDRESS for service in self.task.services}:
            settings["extra_hosts"] = services | settings.get("extra_hosts", {})
        return settings

    def _prepare(self, client: docker.DockerClient, container: str, copying: Copying | None) -> None:
        """Bring a fork's files, or make the working directory the user's, without running anything inside."""
        if copying is not None:
            copying.before_start(container)
        self.network.prepare(container)
        if copying is None and (archive := self.layout.workdir_to_give(client)) is not None:
            client.api.put_archive(container, posixpath.dirname(self.layout.workdir), archive)

    # -- commands ------------------------------------------------------------------------------------------------

    def exec(
        self,
        cmd: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        input: bytes | str | None = None,
        check: bool = False,
    ) -> ExecResult:
        """See `ports.Workspace`. Where root inside has removed the shell, that is the workspace's end, not a command's."""
        self._last.begins(cmd)
        result: ExecResult | None = None
        try:
            result = super().exec(cmd, timeout=timeout, cwd=cwd, env=env, user=user, input=input)
            if result.exit_code in (126, 127) and not result.stdout:
                self._require_shell(user or self.user)
        finally:
            self._last.ended(cmd, result)
        return checked(cmd, result, check)

    def _require_shell(self, user: str) -> None:
        shell = self._supervisor(user).shell
        if self._ask(f"[ -x {shell} ]")[0] != 0:
            self._abandon(f"{shell} inside, which commands are run with, is gone or cannot be run any more")

    # -- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self, *, keep: bool = False, ttl_s: float | None = None) -> str:
        """Make an image of every file of the workspace; processes are not kept. Returns its name on the engine.

        Commands that run meanwhile are halted for that time where the engine is on this machine; elsewhere call
        `kill_all` first. Under gVisor the working directory, /tmp, /logs and /tests are kept for certain, the rest as far as
        its settings let the engine see it.

        Args:
            keep: it outlives this process. Otherwise it is swept once this process is dead.
            ttl_s: seconds after which it is swept; None is a week for one that is kept, else the workspace's lifetime.

        Raises:
            WorkspaceUnavailable: the workspace is dead.
            WorkspaceError: it holds too much, or the engine refused.
        """
        with self._lock:
            self._alive()
        require_room(self.container.client, f"a snapshot of workspace {self.id}")
        try:
            return take(
                self.container.client,
                self.container.id,
                self.image,
                user=self.user,
                folders=self.layout.unseen,
                labels={
                    RUN: self.run_id,
                    WORKDIR_OWNER: self.layout.owned,
                    ENTRYPOINT_LABEL: json.dumps(self.image.entrypoint),
                },
                deadline=time.time() + (ttl_s or (KEPT_S if keep else self.container.ttl_s)),
                keep=keep,
                read_only=self.layout.read_only,
            )
        except WorkspaceError as error:
            self._check(str(error))
            raise

    def fork(self) -> DockerWorkspace:
        """Open another workspace with the same files, of which each then changes its own. Processes are not copied.

        Raises:
            WorkspaceUnavailable: the workspace is dead.
            WorkspaceError: it holds too much, or no other can be started.
        """
        with self._lock:
            self._alive()
        client = self.container.client
        try:
            with Copying(client, self.container.id, self.image, list(self.layout.memory)) as copying:
                return self._another(copying=copying)
        except NotHere:
            pass
        except WorkspaceError as error:
            self._check(str(error))
            raise
        basis = self.snapshot()
        try:
            forked = self._another(snapshot=basis)
        except BaseException:
            remove(client, basis)
            raise
        forked._basis = basis
        return forked

    def expose(self, port: int) -> tuple[str, int]:
        """Return the (host, port) on this machine's loopback that reaches 127.0.0.1:`port` inside, until the workspace closes.

        What listens there may start later. The host port is the system's choice, so that no two workspaces ever want the same.

        Raises:
            WorkspaceUnavailable: the workspace is dead.
            WorkspaceError: this process is not root on the engine's own machine.
        """
        with self._lock:
            self._alive()
            if self.layout.own_kernel:
                raise WorkspaceError(
                    f"port {port} of workspace {self.id} cannot be exposed: gVisor has a network of its own; run the client"
                    " inside the workspace, or use runtime=None"
                )
            if port not in self._exposed:
                self._exposed[port] = Exposure(self.container.pid(), self.container.id, port)
            return self._exposed[port].address

    def enter(self, phase: Phase) -> None:
        """Connect this same container as another phase is; the lanes and connections of the last one end.

        Raises:
            WorkspaceError: the phase needs a container of its own.
        """
        gone = self.network.variables
        self.network.change(plan(self.task, phase))
        left = {name: value for name, value in self._env.items() if gone.get(name) != value}
        self._env = {**self.network.variables, **left}

    def connect_proxy(self, base_url: str, api_key: str) -> str:
        """Make the recording proxy reachable inside for one lane, and return its base URL there; see `network.Network`.

        Raises:
            WorkspaceUnavailable: the workspace is dead.
            WorkspaceError: no listener can be placed inside.
        """
        with self._lock:
            self._alive()
        try:
            return self.network.connect_proxy(base_url, api_key)
        except WorkspaceError as error:
            self._check(str(error))
            raise

    def _another(self, **how: Any) -> DockerWorkspace:
        return DockerWorkspace(self.task, self.container.client, run_id=self.run_id, **self._again, **how)

    # -- runs one after the other ----------------------------------------------------------------------------------

    @property
    def nearly_over(self) -> bool:
        """Whether its lifetime has less than a third left."""
        return self.container.deadline - time.time() < self.container.ttl_s / 3

    def begin(self, task: Task, run_id: str) -> None:
        """Start another run in a workspace that `pool.recycle` made clean."""
        self.network.change(plan(task))
        self._env = {**self.network.variables, **task.env}
        if not is_root(self.user):
            self._env.setdefault("HOME", self.workdir)
        self.task, self.run_id = task, run_id
        self._restore()
        self._furnish(task)

    def _furnish(self, task: Task) -> None:
        """Place the task's files."""
        files = task.start_files()
        inside = {path: data for path, data in files.items() if not path.startswith("/")}
        if inside:
            self.write_many(inside, self.workdir)
        for path, data in files.items():
            if path not in inside:
                self.write(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)

    def _restore(self) -> None:
        """Place what the image has at folders that memory hides: the working directory, and what a snapshot had there."""
        kept = {self.workdir, *self.image.labels.get(MEMORY, "").split()}
        if self.phase == "verifier":
            kept.discard("/tests")  # what the agent put there, or where the reward goes, is not for the evaluation
        for folder in sorted(kept & self.layout.memory.keys()):
            if (content := self.image.content(self.container.client, folder)) is not None:
                self._place(posixpath.dirname(folder), content)
        if self.phase == "verifier" and "/logs" in kept:
            self._ask("rm -rf /logs/verifier")

    def _start_supervisor(self, user: str, keep: str) -> Supervisor:
        folder = f"{SUPERVISOR_FOLDER}/{fresh_name()}"
        shell, tools = shell_of(self.image, own_kernel=self.layout.own_kernel)
        argv = arguments(
            folder,
            half_cap=self._output_limit // 2,
            how="loop" if is_root(user) else "user",
            keep=keep,
            workspace=self.id,
            shell=shell,
            tools=tools,
            bare=self.plain is not None,
            again=self._recyclable,
        )
        return Supervisor(self._attach(argv, user), folder, launcher=self._launcher)

    def _attach(self, argv: list[str], user: str) -> SocketChannel:
        try:
            return _Attached(self.container.attach(argv, user=user))
        except NotAttached as error:
            raise SupervisorLost(str(error)) from error

    def _post_mortem(self, detail: str) -> str | None:
        return self.container.post_mortem(f"{self._last}; the supervisor: {detail}" if detail else str(self._last))

    def _remove(self) -> None:
        self._hide()
        self.network.disconnect()
        if self._services is not None:
            self._services.close()
        self.container.remove()
        self.network.close()
        if self._basis is not None:
            remove(self.container.client, self._basis)
            self._basis = None

    def _hide(self) -> None:
        for exposure in self._exposed.values():
            exposure.close()
        self._exposed.clear()

    def describe(self) -> str:
        """Say what this workspace is."""
        return f"docker container {self.id} of image {self.image.name} with {self.network.describe()}"

    def recycle(self, folders: tuple[str, ...]) -> None:
        """Kill everything, empty `folders` (mounts of their own), and look for other state; see the module `pool`.

        Raises:
            WorkspaceError: something of the last run may be left; the workspace must not be used again.
        """
        self._hide()
        self.network.disconnect()
        self.kill_all()
        try:
            clear_attributes(pid_of(self.container.client, self.container.id), folders)
            status, said = self._ask(cleaning(folders))
        except NotHere:  # attributes of the mounts themselves can only be seen, and removed, from the engine's machine
            status, said = self._ask(cleaning(folders, attributes=False))
        if status != 0 or said:
            found = said.decode(errors="replace").replace("\n", " ")[:300]
            raise WorkspaceError(f"workspace {self.id} keeps state of its last run: {found}")


class _Attached(SocketChannel):
    def close(self) -> None:
        super().close()
        release(self._socket)
