"""A stand-in for the public base images that task folders start from, made without any image registry.

A Debian tree from the distribution's own archive, with what Dockerfiles and tests of the folders would install or download when
a network is there already inside: so `apt-get install` and `pip install` find it done, and `uvx` finds its cache. It is
tagged under the names that the Dockerfiles ask for. It is not those images: Debian 12 and its Python 3.11 stand in for
Ubuntu 24.04 and for other Pythons. Made once, then kept in ~/.cache/gyre.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("GYRE_CACHE", Path.home() / ".cache" / "gyre")) / "standin"
DEBIAN = "http://deb.debian.org/debian"
PACKAGES = "python3,curl,ca-certificates,git,patch"
IN_SYSTEM = ("pip", "flask", "fastmcp>=3.0", "anthropic>=0.52", "mpmath==1.3.0", "pytest==8.4.1")
UV = "uv==0.9.7"
UVX = ("--with", "pytest==8.4.1", "--with", "pytest-json-ctrf==0.3.5", "pytest", "--version")
NAMES = ("ubuntu:24.04", "debian:bookworm-slim", "python:3.11-slim", "python:3.12-slim")
_MADE_BY = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def missing() -> str | None:
    """Return what the tree cannot be made without, or None."""
    if os.geteuid() != 0:
        return "making a Debian tree needs root"
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed; apt-get install debootstrap"
    return None


def archive() -> Path:
    """Return the tree as a tar file, making it the first time."""
    made = CACHE / f"{_MADE_BY}.tar"
    if made.is_file():
        return made
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    tree = CACHE / "tree"
    _run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(tree), DEBIAN)
    _furnish(tree)
    partial = made.with_suffix(".partial")
    with tarfile.open(partial, "w") as out:
        for entry in sorted(tree.iterdir()):
            if entry.name not in ("dev", "proc", "sys"):
                out.add(entry, entry.name)
    shutil.rmtree(tree)
    return partial.rename(made)


def standin(client) -> str:  # type: ignore[no-untyped-def]
    """Import the tree, tag it under every name that is not there, and return the image's id."""
    changes = [
        "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "ENV UV_OFFLINE=1 PIP_NO_INDEX=1",
        'CMD ["bash"]',
    ]
    name = f"gyre/standin:{_MADE_BY}"
    if not client.images.list(name):
        repository, _, tag = name.partition(":")
        client.api.import_image_from_file(str(archive()), repository=repository, tag=tag, changes=changes)
    for wanted in NAMES:
        client.api.tag(name, *wanted.split(":"))
    return str(client.images.get(name).id)


def sympy() -> Path:
    """Return a folder with SymPy 1.7.1, the release before the instance's commit, downloaded once.

    It stands in for the repository at that commit: both patches of the instance apply to it, one with an offset of 2 lines.
    """
    folder = CACHE / f"{_MADE_BY}-sympy"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=CACHE) as place:
            wheel = ("--no-deps", "--only-binary=:all:", "sympy==1.7.1")
            _run(sys.executable, "-m", "pip", "--quiet", "download", "--dest", place, *wheel)
            tree = Path(place) / "tree"
            with zipfile.ZipFile(next(Path(place).glob("*.whl"))) as packed:
                packed.extractall(tree, [name for name in packed.namelist() if name.startswith("sympy/")])
            tree.rename(folder)
    return folder


def _furnish(tree: Path) -> None:
    """Put in what would be downloaded: Python packages, uv where its installer puts it, and a filled cache of uv."""
    site = tree / "usr/local/lib/python3.11/dist-packages"
    pip = (sys.executable, "-m", "pip", "--quiet", "install", "--no-compile", "--python-version", "3.11")
    _run(*pip, "--only-binary=:all:", "--target", str(site), *IN_SYSTEM)
    shutil.rmtree(site / "bin", ignore_errors=True)
    # by the tree's own Python: else each service compiles all that it imports at each start, longer than its health check waits
    compiled = ("-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
    _run("chroot", str(tree), "/usr/bin/python3", *compiled, "/" + str(site.relative_to(tree)))
    (tree / "usr/lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
    (tree / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    program = tree / "usr/local/bin/pip"
    program.write_text('#!/bin/sh\nexec python3 -m pip "$@"\n')
    program.chmod(0o755)
    home = tree / "root/.local"
    _run(*pip, "--only-binary=:all:", "--no-deps", "--target", str(home), UV)
    (home / "bin/env").write_text('export PATH="$HOME/.local/bin:$PATH"\n')
    cache = {"UV_CACHE_DIR": str(tree / "root/.cache/uv"), "UV_PYTHON": sys.executable, "HOME": str(tree / "root")}
    _run(str(home / "bin/uvx"), *UVX, env={**os.environ, **cache})
    (tree / "etc/apt/apt.conf.d/99-no-waiting").write_text('Acquire::Retries "0";\n')
    for rubbish in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
        shutil.rmtree(tree / rubbish, ignore_errors=True)
        (tree / rubbish).mkdir(parents=True)
    (tree / "var/cache/apt/archives/partial").mkdir()


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=CACHE)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed: {(done.stdout + done.stderr)[-2000:]}")
