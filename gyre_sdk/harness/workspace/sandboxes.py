"""Images built from `sandboxes/` without any image registry."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import docker

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.building import build
from gyre_sdk.harness.workspace.contexts import context_of
from gyre_sdk.harness.workspace.images import Image, find_image, image_missing

SANDBOXES = Path(__file__).parents[3] / "sandboxes"
"""One folder per sandbox image, in a checkout of gyre."""


def build_sandbox(client: docker.DockerClient, name: str, *, folder: Path = SANDBOXES) -> Image:
    """Build the image `gyre/<name>` from `sandboxes/<name>`, and run its smoke test.

    `base` gets its root file system from the busybox of this machine: no registry is needed.

    Raises:
        WorkspaceError: no such sandbox, busybox is missing, or the build or the smoke test failed.
    """
    place = folder / name
    if not (place / "Dockerfile").is_file():
        known = sorted(path.parent.name for path in folder.glob("*/Dockerfile"))
        raise WorkspaceError(f"{place / 'Dockerfile'} does not exist; sandboxes here: {', '.join(known) or 'none'}")
    extra = {"rootfs.tar": base_rootfs()} if name == "base" else {}
    build(client, context_of(place, extra), f"gyre/{name}", 600.0)
    found = find_image(client, f"gyre/{name}")
    if found is None:
        raise image_missing(f"gyre/{name}")
    return found


def base_rootfs() -> bytes:
    """Return a root file system, as a tar, made of this machine's static busybox.

    Raises:
        WorkspaceError: there is none.
    """
    busybox = shutil.which("busybox", path=f"{os.environ.get('PATH', '')}:/bin:/usr/bin")
    advice = "install it: apt-get install busybox-static"
    if busybox is None:
        raise WorkspaceError(f"busybox is not installed; {advice}")
    content = Path(busybox).read_bytes()
    if b"ld-linux" in content[:4096] or b"ld-musl" in content[:4096]:
        raise WorkspaceError(f"{busybox} is not static; {advice}")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:

        def add(path: str, mode: int, *, data: bytes | None = None, link: str = "", uid: int = 0) -> None:
            entry = tarfile.TarInfo(path)
            entry.mode, entry.uid, entry.gid = mode, uid, uid
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
            elif data is None:
                entry.type = tarfile.DIRTYPE
            else:
                entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data) if data is not None else None)

        for path in ("bin", "dev", "etc", "proc", "run", "sys", "usr", "usr/bin", "var", "logs", "tests"):
            add(path, 0o755)
        add("root", 0o700)
        add("tmp", 0o1777)
        add("workspace", 0o755, uid=1000)
        add("bin/busybox", 0o755, data=content)
        add("bin/busybox-supervisor", 0o711, data=content)
        for applet in applets:
            if applet != "busybox":
                add(f"bin/{applet}", 0o777, link="busybox")
        add("usr/bin/env", 0o777, link="/bin/busybox")
        add("etc/passwd", 0o644, data=b"root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/workspace:/bin/sh\n")
        add("etc/group", 0o644, data=b"root:x:0:\nagent:x:1000:\n")
    return out.getvalue()
