"""The compiled launcher of commands: built once from `launcher.c`, where this machine has a C compiler.

It is never needed. A supervisor that gets it tries it, and launches by itself where it does not run (another architecture,
a mount that runs no programs).
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("launcher.c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    *("-Os", "-s", "-static", "-nostdlib", "-nostartfiles", "-ffreestanding", "-fno-builtin"),
    *("-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-fno-pie", "-no-pie"),
    *("-fno-ident", "-Wl,-z,noseparate-code", "-Wl,--build-id=none"),  # half as large: it travels with every supervisor
)
_LIMIT_S = 60.0


@cache
def launcher(folder: Path | None = None) -> bytes | None:
    """Return the launcher for this machine's architecture, from `folder` (default `~/.cache/gyre`) or compiled; or None."""
    folder = folder or Path.home() / ".cache" / "gyre"
    source = SOURCE.read_bytes()
    digest = hashlib.sha256(b"\0".join([source, platform.machine().encode(), " ".join(_FLAGS).encode()])).hexdigest()
    kept = folder / f"launcher-{digest[:16]}"
    try:
        if not kept.is_file():
            _compile(kept)
        return kept.read_bytes()
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(target: Path) -> None:
    """Compile and try it; what does not work is not kept."""
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="launcher-") as folder:
        made = Path(folder) / "launcher"
        run = {"check": True, "capture_output": True, "timeout": _LIMIT_S}
        subprocess.run([compiler, *_FLAGS, "-o", str(made), str(SOURCE)], **run)  # type: ignore[call-overload]
        tried = subprocess.run([str(made), "check"], **run)  # type: ignore[call-overload]
        if tried.stdout != b"ok\n":
            raise OSError("the launcher does not run here")
        made.replace(target)
