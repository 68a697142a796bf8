"""An image with the real agent programs: Claude Code, Codex with its Node.js, mini-swe-agent with its Python.

The programs are those that `clients.programs` installs, unchanged, laid on the image of this machine's own tools; of
mini-swe-agent's dependencies those that only its benchmarks need are left out.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import docker
import pytest
from clients import programs
from tools_image import libraries

from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace.images import ensure_image

AGENTS = "gyre/test-agents"
_BENCHMARKS = {"pyarrow", "pandas", "datasets", "hf_xet", "numpy", "numpy.libs", "boto3", "botocore", "_experimental"}
_LEFT_OUT = {*_BENCHMARKS, "voice"}


def build_agents_image(client: docker.DockerClient, tools: str) -> str:
    """Build the image on an engine that has the image of tools; return its name."""
    node = shutil.which("node")
    if node is None:
        pytest.fail("node must be installed for these tests (Debian: apt-get install nodejs)")
    python = f"/usr/local/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    claude = programs.installed_claude_code()
    codex = programs.installed_codex()
    mini = programs.python_of("mini-swe-agent", programs.MINI_SWE_AGENT).parents[1]
    _compile(mini)
    base = client.images.get(tools)

    def write(archive: tarfile.TarFile) -> None:
        there = _copy(client, tools, archive)
        archive.add(node, "usr/local/bin/node", filter=_kept)
        archive.add((claude / "node_modules/.bin/claude").resolve(), "usr/local/bin/claude", filter=_kept)
        archive.add(codex / "node_modules/@openai", "opt/codex/node_modules/@openai", filter=_kept)
        _link(archive, "usr/local/bin/codex", "/opt/codex/node_modules/@openai/codex/bin/codex.js")
        archive.add(mini / "lib", "opt/mini/lib", filter=_kept)
        _text(archive, "opt/mini/pyvenv.cfg", "home = /usr/local/bin\ninclude-system-site-packages = false\n")
        _link(archive, "opt/mini/bin/python", python)
        script = (mini / "bin/mini").read_text().partition("\n")[2]
        _text(archive, "usr/local/bin/mini", f"#!/opt/mini/bin/python\n{script}", mode=0o755)
        extensions = [str(path) for path in (mini / "lib").rglob("*.so") if not _LEFT_OUT & set(path.parts)]
        for name, path in sorted(libraries([node, *extensions]).items()):
            if f"usr/lib/{name}" not in there and not name.startswith("ld-") and not path.startswith(str(mini)):
                archive.add(Path(path).resolve(), f"usr/lib/{name}", filter=_kept)

    # One layer from one stream: a build would write each of these 900 MB three times.
    variables = [f"ENV {name}={value}" for name, value in (pair.split("=", 1) for pair in base.attrs["Config"]["Env"])]
    labels = [f'LABEL {name}="{value}"' for name, value in base.labels.items()]
    with _streamed(write) as stream:
        client.api.import_image_from_stream(
            stream, repository=AGENTS, tag="latest", changes=[*variables, *labels, "WORKDIR /workspace", 'CMD ["sh"]']
        )
    assert ensure_image(client, Task(instruction="x", image=AGENTS)).name == AGENTS
    return AGENTS


def _compile(environment: Path) -> None:
    """Compile an environment's modules, once: in a workspace nobody may write them down, and each start would do it again."""
    done = environment / "compiled"
    if not done.exists():
        left_out = "|".join(_BENCHMARKS)
        command = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "-j",
            "0",
            "-x",
            rf"/({left_out})/",
            str(environment / "lib"),
        ]
        subprocess.run(command, check=False, capture_output=True)  # some packages hold code for other versions
        done.touch()


def _copy(client: docker.DockerClient, image: str, archive: tarfile.TarFile) -> set[str]:
    """Copy the files of an image into an archive; return their names."""
    container = client.api.create_container(image, command="true")["Id"]
    try:
        with tempfile.TemporaryFile() as whole:
            for chunk in client.api.export(container):
                whole.write(chunk)
            whole.seek(0)
            with tarfile.open(fileobj=whole) as files:
                for entry in files:
                    archive.addfile(entry, files.extractfile(entry) if entry.isreg() else None)
                return set(files.getnames())
    finally:
        client.api.remove_container(container)


@contextmanager
def _streamed(write: Callable[[tarfile.TarFile], None]) -> Iterator[IO[bytes]]:
    """Give a stream of the archive that a function writes, while it does."""
    reading, writing = os.pipe()

    def produce() -> None:
        with os.fdopen(writing, "wb") as out, tarfile.open(fileobj=out, mode="w|") as archive:
            write(archive)

    thread = threading.Thread(target=produce)
    with os.fdopen(reading, "rb") as stream:
        thread.start()
        yield stream
    thread.join()


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if _LEFT_OUT & set(Path(entry.name).parts):
        return None
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _text(archive: tarfile.TarFile, name: str, text: str, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), mode
    archive.addfile(entry, io.BytesIO(text.encode()))


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)
