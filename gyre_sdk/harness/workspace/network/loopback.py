"""A loopback interface that the runtime makes, for containers that have nothing else.

An engine that is asked for network `none` makes a namespace, keeps accounts of it and starts itself once more to hand it to the
runtime: half of a start's time. Asked not to connect a container at all (`NetworkDisabled`), it leaves that to the runtime,
which makes a namespace with the same in it: a loopback interface. Only the files that resolvers read are then empty, so they
are written here, into the layer that the engine makes for them below the container's own: no snapshot and no fork holds them,
nor what root inside made of them.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import docker
from docker.errors import DockerException

from gyre_sdk.harness.workspace.network.guard import IPV4_ONLY
from gyre_sdk.harness.workspace.overlay import NotHere

FILES: Mapping[str, bytes] = {
    "hosts": (
        b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nfe00::0\tip6-localnet\n"
        b"ff00::0\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"
    ),
    "resolv.conf": b"nameserver 127.0.0.1\n",
}
"""Name in /etc -> content. No name server answers; programs that want one named are refused at once."""
_LAYER = "-init/diff"
_UNLIKE = ("name=userns", "name=rootless", "name=selinux")
"""Of an engine's security options: files in its layers are another user's than ours, or need labels."""
_COVERS = {"trusted.overlay.opaque", "trusted.overlay.redirect"}
"""Attributes of a folder in a layer that hide the same folder of the layers below."""

_able: WeakKeyDictionary[docker.DockerClient, bool] = WeakKeyDictionary()


def can_be_left_to_the_runtime(client: docker.DockerClient) -> bool:
    """Tell whether an engine's containers can be: it is on this machine, its runtime is runc, and this process may write to its
    layers."""
    if client not in _able:
        try:
            local = os.geteuid() == 0 and client.api.base_url.startswith("http+docker://")
            _able[client] = local and of_engine(client.info())
        except (DockerException, OSError):
            return False
    return _able[client]


def of_engine(info: Mapping[str, Any]) -> bool:
    """Judge an engine that seems to be on this machine by what it says of itself (`docker info`)."""
    options = " ".join(info.get("SecurityOptions") or [])
    return (
        info.get("Driver") == "overlay2"
        and info.get("DefaultRuntime") == "runc"
        and not any(one in options for one in _UNLIKE)
        and Path(info.get("DockerRootDir") or "/nonexistent").is_dir()
    )


def settings() -> Mapping[str, Any]:
    """Return the engine's settings for such a container. One that knows no `NetworkDisabled` gives it network `none`."""
    has_ipv6 = Path("/proc/sys/net/ipv6").is_dir()
    return {"network_mode": "none", **({"sysctls": IPV4_ONLY} if has_ipv6 else {})}


def name_localhost(client: docker.DockerClient, container: str) -> None:
    """Write the files of a container that was created, not started; a fork has its files already.

    Raises:
        NotHere: a fork's /etc is no plain folder.
        DockerException: the engine does not answer.
    """
    if not write_below(client, container):
        _able[client] = False
        write_above(client, container)


def write_below(client: docker.DockerClient, container: str) -> bool:
    """Write them into the layer that the engine made for them; False where it is not to be found.

    Raises:
        NotHere: see `uncover`.
    """
    layers = (client.api.inspect_container(container).get("GraphDriver") or {}).get("Data") or {}
    layer, own = str(layers.get("LowerDir") or "").partition(":")[0], str(layers.get("UpperDir") or "")
    if not layer.endswith(_LAYER) or not own:
        return False
    uncover(Path(own))
    try:
        with folder(Path(layer) / "etc") as opened:
            return all(fill(opened, name, content) for name, content in FILES.items())
    except OSError:
        return False


def uncover(own: Path) -> None:
    """Take out of a container's own layer what would hide the files below: what root inside made of them where it was forked.

    Raises:
        NotHere: its /etc hides the one below as a whole, or is none.
    """
    try:
        with folder(own / "etc") as opened:
            if _COVERS & set(os.listxattr(opened)):
                raise NotHere("/etc was made anew inside")
            for name in FILES:
                discard(opened, name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise NotHere(f"/etc: {error}") from error


def discard(folder: int, name: str) -> None:
    """Remove whatever has a name in an open folder, without following links."""
    try:
        kind = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(kind):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


@contextmanager
def folder(path: Path) -> Iterator[int]:
    """Open a folder that is not a link."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield opened
    finally:
        os.close(opened)


def fill(folder: int, name: str, content: bytes) -> bool:
    """Give content to an empty file in an open folder; False where there is none, or something else has that name."""
    try:
        opened = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return False
    with os.fdopen(opened, "wb") as file:
        state = os.fstat(opened)
        if not stat.S_ISREG(state.st_mode) or state.st_size or state.st_nlink != 1:
            return False
        os.fchmod(opened, 0o644)
        file.write(content)
    return True


def write_above(client: docker.DockerClient, container: str) -> None:
    """Write them into the container's own layer, through the engine, which takes longer.

    Raises:
        DockerException: the engine refused.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, content in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o644, len(content)
            tar.addfile(entry, io.BytesIO(content))
    client.api.put_archive(container, "/etc", archive.getvalue())
