"""Whether an engine can run an image: asked before a container starts, as afterwards it is one cryptic line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import docker
from docker.errors import DockerException

from gyre_sdk.errors import WorkspaceError

_ALSO = {"amd64": {"386"}, "arm64": {"arm"}}
"""What a machine runs besides its own."""
_QEMU = {"amd64": "x86_64", "arm64": "aarch64", "386": "i386"}
_engines: WeakKeyDictionary[docker.DockerClient, tuple[str, str]] = WeakKeyDictionary()


def check_architecture(client: docker.DockerClient, image: str, architecture: str) -> None:
    """Do nothing when the engine can run an image of an architecture (`amd64`, `arm64`, ...; empty when the image has none).

    Raises:
        WorkspaceError: it cannot; says both architectures.
    """
    machine, system = _engine(client)
    if not architecture or not machine or architecture in {machine, *_ALSO.get(machine, ())}:
        return
    if "Docker Desktop" in system or _emulated(architecture):
        return
    raise WorkspaceError(
        f"image {image!r} is for {architecture}, the Docker engine runs on {machine}; use an image for {machine}, or set up"
        " emulation (docker run --privileged --rm tonistiigi/binfmt --install all)"
    )


def _engine(client: docker.DockerClient) -> tuple[str, str]:
    found = _engines.get(client)
    if found is None:
        try:
            version = client.version()
            found = str(version.get("Arch") or ""), str((version.get("Platform") or {}).get("Name") or "")
        except (DockerException, OSError):
            return "", ""
        _engines[client] = found
    return found


@cache
def _emulated(architecture: str) -> bool:
    """Tell whether this machine's kernel hands programs of an architecture to an emulator."""
    rule = Path(f"/proc/sys/fs/binfmt_misc/qemu-{_QEMU.get(architecture, architecture)}")
    try:
        return rule.read_text().startswith("enabled")
    except OSError:
        return False
