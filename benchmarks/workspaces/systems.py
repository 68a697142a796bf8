"""The systems that are compared: what each needs, and how it is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from docker.errors import ImageNotFound
from proxy.children import Child, ChildError

from gyre_sdk.harness.workspace import engine

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "peers"
CACHE = Path.home() / ".cache" / "gyre" / "bench"
IMAGE = "gyre-bench/python"
OURS, SHELL = "gyre", "gyre, shell only"
EXECUTE, DOCKER_PY = "SWE-ReX execute", "docker-py"
_MIRROR = "http://deb.debian.org/debian"
_SUITE = "bookworm"


@dataclass(frozen=True)
class Entry:
    """A system that is compared."""

    script: str
    """Path below `benchmarks`."""
    arguments: tuple[str, ...]
    requirements: tuple[str, ...] = ()
    """Pinned; empty for what runs in this environment."""

    @property
    def environment(self) -> str:
        """Name of its environment's folder."""
        return self.requirements[0].partition("==")[0]


_REX = ("swe-rex==1.4.0", "aiohttp==3.14.5")
TABLE = {
    OURS: Entry("workspaces/ours.py", ("launcher",)),
    SHELL: Entry("workspaces/ours.py", ("shell",)),
    DOCKER_PY: Entry("peers/docker_engine.py", ("py",)),
    "docker CLI": Entry("peers/docker_engine.py", ("cli",)),
    "mini-swe-agent": Entry("peers/mini_swe_agent.py", (), ("mini-swe-agent==2.4.6",)),
    EXECUTE: Entry("peers/swe_rex.py", ("execute",), _REX),
    "SWE-ReX session": Entry("peers/swe_rex.py", ("session",), _REX),
}


@contextmanager
def running(names: list[str], problems: dict[str, str]) -> Iterator[dict[str, Child]]:
    """Start systems; stop them at the end. One that does not start is named in `problems`."""
    children: dict[str, Child] = {}
    with ExitStack() as stack:
        for name in names:
            entry = TABLE[name]
            try:
                python = install(entry) if entry.requirements else Path(sys.executable)
                script = str(HERE.parent / entry.script)
                path = os.pathsep.join([str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
                child = Child(
                    [str(python), script, IMAGE, *entry.arguments], HERE, {"PYTHONPATH": path.rstrip(os.pathsep)}
                )
            except (ChildError, OSError, subprocess.CalledProcessError) as error:
                problems[name] = str(error)
                continue
            stack.callback(_quit, child)
            children[name] = child
        yield children


def _quit(child: Child) -> None:
    """Let it remove its containers."""
    try:
        assert child.process.stdin is not None
        child.process.stdin.write("quit\n")
        child.process.stdin.flush()
        child.process.wait(60)
    except (OSError, subprocess.TimeoutExpired):
        child.kill()


def install(entry: Entry) -> Path:
    """Return the python of a peer's environment, made when it is missing or pinned otherwise.

    Raises:
        CalledProcessError: pip failed.
    """
    home, pins = CACHE / entry.environment, "\n".join(entry.requirements)
    python, mark = home / "bin" / "python", home / "pins.txt"
    if not (mark.is_file() and mark.read_text() == pins):
        sys.stderr.write(f"installing {pins} into {home}\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, *entry.requirements], check=True, stdout=subprocess.DEVNULL)
        mark.write_text(pins)
    return python


def make_image() -> None:
    """Have the image that everybody is measured on: a minimal Debian with Python, its tree kept in the cache. Its working directory
    belongs to user 1000, as in gyre's sandboxes: elsewhere a start of ours takes longer by an upload to make it so.

    Raises:
        OSError, CalledProcessError: it cannot be made: that needs root and debootstrap, once.
    """
    client = engine.shared_client()
    try:
        client.api.inspect_image(IMAGE)
        return
    except ImageNotFound:
        pass
    tree = CACHE / "workspace" / "python.tar"
    if not tree.is_file():
        tree.parent.mkdir(parents=True, exist_ok=True)
        folder = tree.parent / "rootfs"
        shutil.rmtree(folder, ignore_errors=True)
        sys.stderr.write(f"making {tree} with debootstrap\n")
        include = ["--variant=minbase", "--include=python3"]
        subprocess.run(["debootstrap", *include, _SUITE, str(folder), _MIRROR], check=True, stdout=subprocess.DEVNULL)
        (folder / "workspace").mkdir()
        os.chown(folder / "workspace", 1000, 1000)
        without = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*", "--exclude=./dev/*"]
        subprocess.run(["tar", "-C", str(folder), *without, "-cf", f"{tree}.part", "."], check=True)
        Path(f"{tree}.part").replace(tree)
        shutil.rmtree(folder)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    client.api.import_image(str(tree), repository=IMAGE, changes=[f"ENV PATH={path}", "WORKDIR /workspace"])
