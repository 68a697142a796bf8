"""Copying one container's files into another that is about to start: a fork without an image in between."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import docker

from gyre_sdk.harness.workspace import memory
from gyre_sdk.harness.workspace.halting import go_on, halt
from gyre_sdk.harness.workspace.hardening import SUPERVISOR_FOLDER
from gyre_sdk.harness.workspace.images import Image
from gyre_sdk.harness.workspace.overlay import NotHere, copy_tree, folder_of, upper_folder


class Copying:
    """One fork under way. The source's processes are halted from `before_start` until all is copied.

    An overlay file system must not be changed below while it is mounted, so what the source changed of its image is copied
    into the other container's own layer before that starts; what is in memory is copied after.
    """

    def __init__(self, client: docker.DockerClient, source: str, image: Image, folders: Iterable[str]) -> None:
        """Prepare to copy from the container `source`, made from `image`, with `folders` in memory.

        Raises:
            NotHere: this machine cannot; see `overlay`.
        """
        upper = upper_folder(client, source)
        if upper is None:
            raise NotHere("the engine is elsewhere, or stores otherwise")
        self.image = image
        self._client, self._source, self._folders = client, source, [one for one in folders if one != SUPERVISOR_FOLDER]
        self._upper: Path = upper
        self._halting = ThreadPoolExecutor(1)
        self._halted: Future[None] | None = self._halting.submit(halt, client, source)
        self._pid = 0
        self._held: list[str] = []

    def before_start(self, container: str) -> None:
        """Copy the source's layer into that of a container that was created, not started."""
        target = upper_folder(self._client, container)
        if target is None:
            raise NotHere("the layer of the new container cannot be reached")
        if self._halted is None:  # for another container than the first, which did not start
            self._halted = self._halting.submit(halt, self._client, self._source)
        self._halted.result()
        self._pid = memory.pid_of(self._client, self._source)
        self._held = memory.filled(self._pid, self._folders)
        copy_tree(self._upper, target)
        if not self._held:
            self._go_on()

    def after_start(self, container: str) -> None:
        """Copy what the source holds in memory into the started container."""
        started = memory.pid_of(self._client, container)
        if self._held:
            memory.copy(self._pid, started, self._held)
        self._go_on()
        with folder_of(started, SUPERVISOR_FOLDER) as folder:
            os.fchmod(folder, 0o1777)  # mounted on a folder that the source left there, memory takes that folder's mode

    def _go_on(self) -> None:
        """Let the source run again, beside whatever comes next."""
        if self._halted is not None:
            self._halted = None
            self._halting.submit(go_on, self._client, self._source)

    def __enter__(self) -> Copying:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._go_on()
        self._halting.shutdown(wait=True)
