"""A Debian file system made of packages from this machine's package sources: no image registry, no root, nothing run.

`apt-get` chooses and fetches (and checks signatures), `dpkg-deb` unpacks, and the result is one tar in which dpkg knows every
package as unpacked; `dpkg --configure -a`, run by a Dockerfile, is what is left to do. With the state of an image that was made
like this, only what that image lacks is taken.
"""

from __future__ import annotations

import io
import posixpath
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from gyre_sdk.errors import WorkspaceError

STATUS = "var/lib/dpkg/status"
_MINIMUM = ("?essential", "?priority(required)", "apt")
"""Patterns of what every such file system has, as `apt-get install` takes them."""
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders that are links to their namesakes in /usr."""
_LEFT_OUT = re.compile(r"usr/share/(doc/(?!.*/copyright$).+/[^/]+|(man|info|locale|lintian|bug)/.+)")
_KEEP_OUT = """path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/lintian/*
"""
_FOLDERS = {"dev": 0o755, "proc": 0o755, "run": 0o755, "sys": 0o755, "tmp": 0o1777, "root": 0o700, "usr": 0o755}
_LISTS = Path("/var/lib/apt/lists")
_NEEDED = "apt-get and dpkg-deb are needed (Debian, Ubuntu); elsewhere take an image from a registry"


def tree(packages: Sequence[str], *, status: bytes = b"", sources: Sequence[str] = ()) -> bytes:
    """Return the files of packages, and of all that they need, as a tar.

    Args:
        packages: names.
        status: dpkg's state of the file system that they are added to; empty for a new one.
        sources: further options for `apt-get`, for other package sources than this machine's.

    Raises:
        WorkspaceError: a tool is missing, or a package cannot be had.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise WorkspaceError(f"no Debian file system can be made here: {_NEEDED}")
    with tempfile.TemporaryDirectory(prefix="gyre-packages-") as folder:
        wanted = [*(() if status else _MINIMUM), *packages]
        files = _fetch(Path(folder), wanted, status, sources)
        return _assemble(files, status)


def _fetch(folder: Path, wanted: Sequence[str], status: bytes, sources: Sequence[str]) -> list[Path]:
    """Let apt-get choose and fetch into `folder`."""
    (folder / "archives" / "partial").mkdir(parents=True)
    (folder / "status").write_bytes(status)
    command = [
        *("apt-get", "-qq", "-y", "--download-only", "--no-install-recommends"),
        *("-o", f"Dir::State::status={folder}/status", "-o", f"Dir::Cache={folder}"),
        *("-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=", "-o", "Dpkg::Use-Pty=0"),
    ]
    install = [*sources, "install", "--", *wanted]
    done = _run([*command, *install], check=False)
    if done.returncode != 0 and not (b"Unable to locate" in done.stderr and any(_LISTS.glob("*_Packages*"))):
        (folder / "lists" / "partial").mkdir(parents=True)  # this machine's are missing or out of date
        command += ["-o", f"Dir::State::lists={folder}/lists"]
        _run([*command, *sources, "update"])
        done = _run([*command, *install], check=False)
    if done.returncode != 0:
        raise _refused(done)
    return sorted((folder / "archives").glob("*.deb"))


def _run(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if check and done.returncode != 0:
        raise _refused(done)
    return done


def _refused(done: subprocess.CompletedProcess[bytes]) -> WorkspaceError:
    said = (done.stderr or done.stdout).decode(errors="replace").strip()[-600:]
    return WorkspaceError(f"packages cannot be had: {said}; look at their names, and run apt-get update")


def _assemble(files: Sequence[Path], status: bytes) -> bytes:
    out = io.BytesIO()
    stanzas = [status.rstrip() + b"\n"] if status.strip() else []
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as target:
        there: set[str] = set()
        if not status:
            _foundation(target, there)
        with ThreadPoolExecutor(4) as opening:
            for control, data in opening.map(_opened, files):
                stanza, scripts = _control(control)
                stanzas.append(stanza)
                listed = list(_add(target, there, data))
                name = _database_name(stanza)
                _file(
                    target, there, f"var/lib/dpkg/info/{name}.list", "".join(f"/{path}\n" for path in listed).encode()
                )
                for kind, content in scripts.items():
                    mode = 0o755 if kind in ("preinst", "postinst", "prerm", "postrm", "config") else 0o644
                    _file(target, there, f"var/lib/dpkg/info/{name}.{kind}", content, mode)
        _file(target, there, STATUS, b"\n".join(stanzas) + b"\n", replace=True)
    return out.getvalue()


def _opened(file: Path) -> tuple[bytes, bytes]:
    """Return (control, data) of a package as tars."""
    return _run(["dpkg-deb", "--ctrl-tarfile", str(file)]).stdout, _run(
        ["dpkg-deb", "--fsys-tarfile", str(file)]
    ).stdout


def _foundation(target: tarfile.TarFile, there: set[str]) -> None:
    """Add what no package has: mount points, the links of a merged /usr, dpkg's folders and settings."""
    for name, mode in _FOLDERS.items():
        _folder(target, there, name, mode)
    for name in _MERGED:
        _folder(target, there, f"usr/{name}", 0o755)
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, f"usr/{name}", 0o777
        target.addfile(entry)
        there.add(name)
    for name in ("etc", "etc/dpkg", "etc/dpkg/dpkg.cfg.d", "var", "var/lib", "var/lib/dpkg"):
        _folder(target, there, name, 0o755)
    for name in ("info", "updates", "triggers", "alternatives", "parts"):
        _folder(target, there, f"var/lib/dpkg/{name}", 0o755)
    _file(target, there, "var/lib/dpkg/available", b"")
    _file(target, there, "etc/dpkg/dpkg.cfg.d/gyre", _KEEP_OUT.encode())


def _control(control: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return (the stanza for dpkg's state, kind -> content of its other files)."""
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(control)) as archive:
        for entry in archive:
            content = archive.extractfile(entry) if entry.isreg() else None
            if content is not None:
                found[posixpath.basename(entry.name)] = content.read()
    stanza = found.pop("control").strip()
    head, _, rest = stanza.partition(b"\n")
    return head + b"\nStatus: install ok unpacked\n" + rest + b"\n", found


def _database_name(stanza: bytes) -> str:
    """Return the name of a package's files in dpkg's database."""
    fields = dict(re.findall(rb"^(Package|Architecture|Multi-Arch): *(\S+)", stanza, re.MULTILINE))
    name, kind = fields[b"Package"].decode(), fields[b"Architecture"].decode()
    return f"{name}:{kind}" if fields.get(b"Multi-Arch") == b"same" else name


def _add(target: tarfile.TarFile, there: set[str], data: bytes) -> Iterator[str]:
    """Add a package's files; yield the paths that dpkg is to know."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            name = posixpath.normpath(entry.name)
            yield "." if name == "." else name
            entry.name = merged(name)
            if name == "." or entry.name in there or _LEFT_OUT.fullmatch(entry.name):
                continue
            there.add(entry.name)
            if entry.islnk():
                entry.linkname = merged(posixpath.normpath(entry.linkname))
            content: IO[bytes] | None = archive.extractfile(entry) if entry.isreg() else None
            target.addfile(entry, content)


def merged(name: str) -> str:
    """Return where a path lies in a file system whose /bin, /lib, ... are links into /usr."""
    top, slash, _ = name.partition("/")
    return f"usr/{name}" if top in _MERGED and slash else name


def _folder(target: tarfile.TarFile, there: set[str], name: str, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    target.addfile(entry)
    there.add(name)


def _file(
    target: tarfile.TarFile, there: set[str], name: str, content: bytes, mode: int = 0o644, *, replace: bool = False
) -> None:
    if name in there and not replace:
        return
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    target.addfile(entry, io.BytesIO(content))
    there.add(name)
