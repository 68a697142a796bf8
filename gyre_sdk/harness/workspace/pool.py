"""Workspaces for many runs: containers that are recycled between runs of the same image and limits.

A recyclable container has a read-only root and no shared memory; all that a command can write to is memory mounted on the
working directory, /tmp, /logs and /tests. Between runs every process is killed and proven dead, those folders are
emptied, and what else could carry state is checked (docs/decisions/0003-recycled-workspaces.md). Any doubt, and the
container is removed instead. Without recycling, `prepare` still saves the time of a start: containers wait for their one run.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.choice import choose
from gyre_sdk.harness.workspace.docker import DockerWorkspace
from gyre_sdk.harness.workspace.engine import shared_client
from gyre_sdk.harness.workspace.hardening import is_root, user_of
from gyre_sdk.harness.workspace.images import ensure_image
from gyre_sdk.harness.workspace.local import LocalWorkspace
from gyre_sdk.harness.workspace.network import plan
from gyre_sdk.harness.workspace.pooled import PooledWorkspace
from gyre_sdk.harness.workspace.recycling import RECYCLED_FOLDERS

if TYPE_CHECKING:
    import docker

Key = tuple[object, ...]


class WorkspacePool:
    """Gives out workspaces, one per run at a time.

    Args:
        kind: `docker`, `local` or `auto` (see `open_workspace`).
        recycle: reuse containers between runs. Tasks that run as root never share a container.
        size: containers that may exist at a time; `take` waits for one. None: no limit.
        idle: containers kept for later runs.
        ttl_s: lifetime of a container that waits or is recycled, seconds.
        engine: URL of the Docker engine; None is $DOCKER_HOST or the default socket.
    """

    def __init__(
        self,
        kind: Literal["docker", "local", "auto"] = "docker",
        *,
        recycle: bool = False,
        size: int | None = None,
        idle: int = 64,
        ttl_s: float = 6 * 3600.0,
        engine: str | None = None,
    ) -> None:
        self.kind, self._reason = choose(kind, engine)
        self.engine = engine
        self._client: docker.DockerClient | None = shared_client(engine) if self.kind == "docker" else None
        self._recycle = recycle and self.kind == "docker"
        self._idle_limit = idle
        self._ttl_s = ttl_s
        self._slots = threading.Semaphore(size) if size is not None else None
        self._idle: defaultdict[Key, list[DockerWorkspace]] = defaultdict(list)
        self._held: dict[str, DockerWorkspace | LocalWorkspace] = {}
        self._returning: defaultdict[Key, int] = defaultdict(int)
        self._ahead: dict[Key, tuple[Task, int, bool]] = {}
        self._starting: defaultdict[Key, int] = defaultdict(int)
        self._changed = threading.Condition()
        self._closed = False
        self._cleaners = ThreadPoolExecutor(2 * (os.cpu_count() or 1), thread_name_prefix="gyre-recycle")
        self.runs: dict[str, str] = {}
        """Workspace id -> id of the run that holds it now: labels cannot change, so the pool knows."""
        self.started = 0
        """Workspaces started so far."""
        self.recycled = 0
        """Times that a workspace was made ready for another run."""
        self.discarded = 0
        """Times that one could not be, and was removed."""

    def describe(self) -> str:
        """Say what kind of workspaces this pool gives out, and why."""
        return f"{self.kind} workspaces{', recycled' if self._recycle else ''} ({self._reason})"

    def take(self, task: Task, *, run_id: str = "") -> PooledWorkspace:
        """Return a clean workspace with the task's files; its `close` gives it back.

        Raises:
            ImageMissing, WorkspaceError: none can be started.
        """
        if self._slots is not None:
            self._slots.acquire()
        try:
            key, workspace = self._obtain(task, run_id)
        except BaseException:
            if self._slots is not None:
                self._slots.release()
            raise
        with self._changed:
            self.runs[workspace.id] = run_id
            self._held[workspace.id] = workspace
        return PooledWorkspace(workspace, lambda: self._give_back(key, workspace))

    def _obtain(self, task: Task, run_id: str) -> tuple[Key | None, DockerWorkspace | LocalWorkspace]:
        if self._closed:
            raise WorkspaceError("the workspace pool is closed; open another one")
        if self._client is None:
            self.started += 1
            return None, LocalWorkspace(task, run_id=run_id)
        key, reusable = self._kind_of(self._client, task)
        while key is not None and (ready := self._pop(key)) is not None:
            self._start_ahead(key)
            try:
                ready.begin(task, run_id)
                return (key if reusable else None), ready
            except WorkspaceError:
                self._discard(ready)
        self.started += 1
        if not reusable:
            return None, DockerWorkspace(task, self._client, run_id=run_id)
        started = DockerWorkspace(task, self._client, run_id="pool", read_only=True, ttl_s=self._ttl_s, recyclable=True)
        started.run_id = run_id
        return key, started

    def _kind_of(self, client: docker.DockerClient, task: Task) -> tuple[Key | None, bool]:
        """Return (what tasks that can have the same container share, or None for one that cannot; whether runs can)."""
        image = ensure_image(client, task)
        user = user_of(task, "agent", image.user)
        if task.services or task.healthcheck or (task.entrypoint and image.entrypoint):
            return None, False  # started once, for one run
        limits = (task.cpus, task.memory_mb, task.pids, task.disk_mb, task.profile, task.runtime, task.read_only)
        return (image.id, user, task.workdir, limits, plan(task)), self._recycle and not is_root(
            user
        ) and task.runtime is None

    def prepare(self, task: Task, count: int) -> None:
        """Start containers ahead, in the background: a `take` of this task, or of one like it, then finds one ready.

        Args:
            task: says the image, user, limits and network; its files are placed when a run takes a container.
            count: containers that wait at a time; each that is taken is replaced. 0 starts no more.

        Raises:
            ImageMissing, WorkspaceError: the task's image cannot be had, or its containers serve one run only.
        """
        if self._client is None:
            return
        key, reusable = self._kind_of(self._client, task)
        if key is None:
            raise WorkspaceError(
                f"task {task.name!r} has services, a health check or an entry point: its containers are started with the run"
            )
        with self._changed:
            self._ahead[key] = (replace(task, files={}, env={}), count, reusable)
        for _ in range(count):
            self._start_ahead(key)

    def _start_ahead(self, key: Key) -> None:
        with self._changed:
            task, count, reusable = self._ahead.get(key, (None, 0, False))
            if task is None or self._closed or len(self._idle[key]) + self._starting[key] >= count:
                return
            self._starting[key] += 1
        try:
            self._cleaners.submit(self._started_ahead, key, task, reusable)
        except RuntimeError:  # the pool closed meanwhile
            self._arrived(key, None)

    def _started_ahead(self, key: Key, task: Task, reusable: bool) -> None:
        ready: DockerWorkspace | None = None
        try:
            assert self._client is not None
            ready = DockerWorkspace(
                task, self._client, run_id="pool", read_only=reusable, ttl_s=self._ttl_s, recyclable=reusable
            )
        except WorkspaceError:
            pass  # a `take` tries again, and tells
        finally:
            self._arrived(key, ready)

    def _arrived(self, key: Key, ready: DockerWorkspace | None) -> None:
        with self._changed:
            self._starting[key] -= 1
            if ready is not None and not self._closed:
                self.started += 1
                self._idle[key].append(ready)
                ready = None
            self._changed.notify_all()
        if ready is not None:
            ready.close()

    def _pop(self, key: Key) -> DockerWorkspace | None:
        """Return an idle workspace, waiting for one that is being cleaned or started already: faster than a start."""
        with self._changed:
            pending = (self._returning, self._starting)
            self._changed.wait_for(lambda: self._idle[key] or not any(some[key] for some in pending), timeout=10.0)
            return self._idle[key].pop() if self._idle[key] else None

    def _give_back(self, key: Key | None, workspace: DockerWorkspace | LocalWorkspace) -> None:
        with self._changed:
            self.runs.pop(workspace.id, None)
            self._held.pop(workspace.id, None)
        if key is None or self._closed or not isinstance(workspace, DockerWorkspace):
            workspace.close()
            self._free()
            return
        with self._changed:
            self._returning[key] += 1
        try:
            self._cleaners.submit(self._clean, key, workspace)
        except RuntimeError:  # the pool closed meanwhile
            self._settled(key, None)
            workspace.close()
            self._free()

    def _clean(self, key: Key, workspace: DockerWorkspace) -> None:
        ready: DockerWorkspace | None = None
        try:
            if not workspace.nearly_over:
                workspace.recycle((*RECYCLED_FOLDERS, workspace.workdir))
                ready = workspace
        except WorkspaceError:
            pass
        finally:
            self._settled(key, ready)
            if ready is None:
                self._discard(workspace)
            self._free()

    def _settled(self, key: Key, ready: DockerWorkspace | None) -> None:
        surplus = None
        with self._changed:
            self._returning[key] -= 1
            if ready is not None:
                self.recycled += 1
                if self._closed or sum(map(len, self._idle.values())) >= self._idle_limit:
                    surplus = ready
                else:
                    self._idle[key].append(ready)
            self._changed.notify_all()
        if surplus is not None:
            surplus.close()

    def _discard(self, workspace: DockerWorkspace) -> None:
        self.discarded += 1
        workspace.close()

    def _free(self) -> None:
        if self._slots is not None:
            self._slots.release()

    def close(self) -> None:
        """Remove every workspace, those in use too: what they run ends with `WorkspaceUnavailable`. Idempotent."""
        with self._changed:
            self._closed = True
            closing: list[DockerWorkspace | LocalWorkspace] = [one for some in self._idle.values() for one in some]
            closing += self._held.values()
            self._idle.clear()
        self._cleaners.shutdown(wait=True)
        with ThreadPoolExecutor(8) as removing:
            list(removing.map(lambda one: one.close(), closing))

    def __enter__(self) -> WorkspacePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
