"""The files of a container seen from its engine's machine: for root, where the engine is local and stores with overlay2.

Everything here is a short cut. Each function says by None or `NotHere` when it cannot be taken; callers then go through the
engine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException

_OPENAT2 = 437
"""Number of the system call; the same on every architecture of Linux."""
_IN_ROOT, _NO_MAGICLINKS = 0x10, 0x02


class NotHere(Exception):
    """The short cut cannot be taken on this machine. Internal."""


def upper_folder(client: docker.DockerClient, container: str) -> Path | None:
    """Return the folder with what a container changed of its image, or None when it cannot be reached from here."""
    if os.geteuid() != 0 or not client.api.base_url.startswith("http+docker://"):
        return None
    try:
        found = client.api.inspect_container(container)
        driver = found["GraphDriver"]
    except (DockerException, OSError, KeyError):
        return None
    if not shares_kernel(found):
        return None
    place = Path((driver.get("Data") or {}).get("UpperDir") or "/nonexistent")
    return place if driver.get("Name") == "overlay2" and place.is_dir() and can_copy() else None


def shares_kernel(found: Mapping[str, Any]) -> bool:
    """Tell whether an inspected container's files and processes are this kernel's; gVisor keeps them to itself."""
    return "runsc" not in str((found.get("HostConfig") or {}).get("Runtime"))


@cache
def can_copy() -> bool:
    """Tell whether this machine's `cp` keeps everything that a file has (GNU coreutils)."""
    tool = shutil.which("cp")
    if tool is None:
        return False
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    return "GNU coreutils" in said


@contextmanager
def folder_of(pid: int, path: str) -> Iterator[int]:
    """Open a folder inside the container of process `pid`; links on the way are followed as that container would.

    Raises:
        NotHere: it cannot be opened from this machine.
    """
    if os.geteuid() != 0 or platform.system() != "Linux":
        raise NotHere("needs root on Linux")
    try:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise NotHere(str(error)) from error
    try:
        # struct open_how: flags, mode, resolve. A link inside that names /etc means the container's, never this machine's.
        how = struct.pack("QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0, _IN_ROOT | _NO_MAGICLINKS)
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(_OPENAT2, root, path.encode(), how, len(how))
        if found < 0:
            raise NotHere(f"{path}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(root)
    try:
        yield found
    finally:
        os.close(found)


def copy_tree(source: Path | int, target: Path | int) -> None:
    """Copy all of a folder into another, with owners, modes, times, links, attributes; sharing blocks where a file system can.

    The source must be at rest, and nothing untrusted may be able to write to the target.

    Raises:
        NotHere: something could not be copied.
    """
    passed = [one for one in (source, target) if isinstance(one, int)]
    place = [f"/proc/self/fd/{one}" if isinstance(one, int) else str(one) for one in (source, target)]
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", "--", f"{place[0]}/.", f"{place[1]}/"],
        pass_fds=passed,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        raise NotHere(done.stderr.decode(errors="replace")[-300:])
