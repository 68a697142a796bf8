"""An image with this machine's own bash, git, Python and pytest on top of the base sandbox: real programs without a registry."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from functools import cache
from pathlib import Path

import docker
import pytest

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.images import ensure_image

TOOLS = "gyre/test-tools"
_LEFT_OUT = {
    "site-packages",
    "test",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "__pycache__",
    "distutils",
}
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")


@cache
def build_tools_image(client: docker.DockerClient) -> str:
    """Build the image once on an engine that has the base sandbox; return its name."""
    programs = {name: shutil.which(name, path="/usr/bin:/bin") for name in ("bash", "git", "nohup")}
    missing = [name for name, found in programs.items() if found is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} must be installed for these tests")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    python = Path(sys.base_exec_prefix, "bin", version)
    lib = Path(sysconfig.get_paths(vars={"base": sys.base_prefix})["stdlib"])
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:

        def add(source: Path, target: str) -> None:
            archive.add(source.resolve(), target, filter=_kept)

        add(python, f"usr/local/bin/{version}")
        for name in ("python3", "python"):
            _link(archive, f"usr/local/bin/{name}", version)
        add(Path(programs["bash"] or ""), "bin/bash")
        add(Path(programs["git"] or ""), "usr/bin/git")
        add(Path(programs["nohup"] or ""), "usr/bin/nohup")
        add(lib, f"usr/local/lib/{version}")
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            add(place, f"usr/local/lib/{version}/site-packages/{place.name}")
        binaries = [str(python), *filter(None, programs.values()), *map(str, lib.glob("lib-dynload/*.so"))]
        for name, path in sorted(libraries(binaries).items()):
            add(Path(path), path.lstrip("/") if name.startswith("ld-") else f"usr/lib/{name}")
        script = f"#!/usr/local/bin/{version}\nimport sys\nfrom pytest import main\nsys.exit(main())\n".encode()
        entry = tarfile.TarInfo("usr/local/bin/pytest")
        entry.mode, entry.size = 0o755, len(script)
        archive.addfile(entry, io.BytesIO(script))
    context = io.BytesIO()
    dockerfile = b"FROM gyre/base\nADD tools.tar /\nENV PATH=/usr/local/bin:/usr/bin:/bin\n"
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, data in (("Dockerfile", dockerfile), ("tools.tar", out.getvalue())):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    context.seek(0)
    for event in client.api.build(
        fileobj=context,
        custom_context=True,
        tag=TOOLS,
        rm=True,
        forcerm=True,
        decode=True,
        labels={"gyre.user": "1000:1000"},
    ):
        assert "error" not in event, event
    assert ensure_image(client, Task(instruction="x", image=TOOLS)).name == TOOLS
    return TOOLS


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    inner = entry.name.split("/")[4:]
    of_package = inner[:1] == ["site-packages"] and len(inner) > 1
    if any(part in _LEFT_OUT or part.startswith("config-") for part in inner[of_package:]):
        return None
    if entry.name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)


def libraries(binaries: list[str]) -> dict[str, str]:
    """Return name -> path of the shared libraries that programs load."""
    found: dict[str, str] = {}
    for binary in binaries:
        said = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
        for path in re.findall(r"(?:=> )?(/\S+) \(0x", said):
            found[Path(path).name] = path
    return found
