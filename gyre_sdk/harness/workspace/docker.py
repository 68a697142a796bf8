"""A workspace in a Docker container of its own."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.channel import SocketChannel
from gyre_sdk.harness.workspace.container import SUPERVISOR_FOLDER, Container, NotAttached, release
from gyre_sdk.harness.workspace.images import SHELL_LABEL, ensure_image
from gyre_sdk.harness.workspace.output import OUTPUT_LIMIT
from gyre_sdk.harness.workspace.supervised import SupervisedWorkspace
from gyre_sdk.harness.workspace.supervisor import Supervisor, SupervisorLost, arguments, fresh_nonce

if TYPE_CHECKING:
    import docker


class DockerWorkspace(SupervisedWorkspace):
    """Runs commands in one container, removed by `close`, at exit, by signals, and after its lifetime.

    Raises:
        ImageMissing, WorkspaceError: it cannot be started.
    """

    def __init__(
        self,
        task: Task,
        client: docker.DockerClient,
        *,
        run_id: str = "",
        ttl_s: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        read_only: bool = False,
    ) -> None:
        image = ensure_image(client, task)
        user = task.user or image.user
        workdir = task.workdir or image.workdir
        env = dict(task.env)
        if not _is_root(user):
            env.setdefault("HOME", workdir)
        container = Container(
            client, image, task, run=run_id, uid=_ids(user), workdir=workdir, read_only=read_only, ttl_s=ttl_s
        )
        super().__init__(container.id[:12], workdir=workdir, user=user, env=env, output_limit=output_limit)
        self.container = container
        self.image = image
        self._in_memory = read_only or task.disk_mb is not None
        try:
            self._supervisor(self.user)
            self._furnish(task)
        except BaseException:
            self.close()
            raise

    @property
    def nearly_over(self) -> bool:
        """Whether its lifetime has less than a third left."""
        return self.container.deadline - time.time() < self.container.ttl_s / 3

    def begin(self, task: Task) -> None:
        """Start another run in a workspace that `pool.recycle` made clean."""
        self._env = dict(task.env)
        self._env.setdefault("HOME", self.workdir)
        self._furnish(task)

    def _furnish(self, task: Task) -> None:
        """Place what the image has at the working directory (hidden by the memory there), then the task's files."""
        if self._in_memory:
            content = self.image.workdir_content(self.container.client, self.workdir)
            if content is not None:
                self._place(self._supervisor(self.user), self.workdir.rpartition("/")[0] or "/", content)
        files = task.start_files()
        inside = {path: data for path, data in files.items() if not path.startswith("/")}
        if inside:
            self.write_many(inside, self.workdir)
        for path, data in files.items():
            if path not in inside:
                self.write(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)

    def _start_supervisor(self, user: str, keep: str) -> Supervisor:
        nonce = fresh_nonce()
        folder = f"{SUPERVISOR_FOLDER}/{nonce}"
        argv = arguments(
            nonce,
            folder,
            half_cap=self._output_limit // 2,
            how="loop" if _is_root(user) else "user",
            keep=keep,
            workspace=self.id,
            shell=(guarded, "sh") if (guarded := self.image.labels.get(SHELL_LABEL)) else ("sh",),
        )
        try:
            sock = self.container.attach(argv, user=user)
        except NotAttached as error:
            raise SupervisorLost(str(error)) from error
        return Supervisor(_Attached(sock), nonce, folder)

    def _post_mortem(self, detail: str) -> str | None:
        return self.container.post_mortem(detail)

    def _remove(self) -> None:
        self.container.remove()

    def describe(self) -> str:
        """Say what this workspace is."""
        return f"docker container {self.id} of image {self.image.name}"

    def recycle(self, folders: tuple[str, ...]) -> None:
        """Kill everything, empty `folders` (mounts of their own), and look for other state; see the module `pool`.

        Raises:
            WorkspaceError: something of the last run may be left; the workspace must not be used again.
        """
        self.kill_all()
        names = " ".join(shlex.quote(folder) for folder in folders)
        status, lines = self._ask(f"f0={SUPERVISOR_FOLDER}\nset -- {names}\n{_CLEAN}")
        if status != 0 or lines:
            found = b" ".join(lines).decode(errors="replace")[:300]
            raise WorkspaceError(f"workspace {self.id} keeps state of its last run: {found}")


_CLEAN = r"""
clean() {
  for f; do
    chmod 755 "$f" 2>/dev/null || [ -k "$f" ] || { echo "mode $f"; return 1; }
    find "$f" -mindepth 1 -delete 2>/dev/null || { chmod -R u+rwX "$f"; rm -rf "$f"/* "$f"/.[!.]* "$f"/..?*; } 2>/dev/null
    for x in "$f"/* "$f"/.[!.]* "$f"/..?*; do
      { [ -e "$x" ] || [ -L "$x" ]; } && { echo "file $x"; return 1; }
    done
  done
  for x in "$f0"/*; do [ "$x" = "$D" ] || rm -rf "$x" 2>/dev/null || { echo "file $x"; return 1; }; done
  for x in "$D"/* /dev/mqueue/* /dev/shm/*; do
    case $x in "$D"/*) rm -rf "$x";; esac
    [ -e "$x" ] && { echo "file $x"; return 1; }
  done
  for x in shm msg sem; do
    { IFS= read -r row; IFS= read -r row && { echo "ipc $x"; return 1; }; } </proc/sysvipc/$x
  done
  others
  [ -z "$left" ] || { echo "processes $left"; return 1; }
  [ "$STATE" = "$(state 2>/dev/null)" ] || { echo "limits of the supervisor"; return 1; }
}
clean "$@"
"""


class _Attached(SocketChannel):
    def close(self) -> None:
        super().close()
        release(self._socket)


def _is_root(user: str) -> bool:
    return user.partition(":")[0] in ("0", "root", "")


def _ids(user: str) -> str:
    return "0:0" if _is_root(user) else user
