"""Ways to run a local process apart from the machine: bubblewrap, bare namespaces, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path

FOLDERS = ("workspace", "logs", "tests", "tmp", "run")
"""Folders of a workspace's root on the host."""
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_ETC = (
    "passwd",
    "group",
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "nsswitch.conf",
    "ssl",
    "localtime",
)

_NAMESPACES = r"""
set -e
R=$1 W=$2; shift 2
mount --make-rprivate /
mkdir -p "$R/rootfs"; mount -t tmpfs -o mode=755 tmpfs "$R/rootfs"; cd "$R/rootfs"
mkdir -p etc proc dev run/gyre tmp logs tests ".$W"
ro() { mount --rbind "$1" "$2"; mount -o remount,bind,ro "$2"; }
for d in /usr /bin /sbin /lib /lib64 /lib32; do
  if [ -L $d ]; then ln -s "$(readlink $d)" .$d; elif [ -d $d ]; then mkdir .$d; ro $d .$d; fi
done
for f in passwd group alternatives ld.so.cache ld.so.conf ld.so.conf.d nsswitch.conf ssl localtime; do
  [ -e /etc/$f ] || continue
  if [ -d /etc/$f ]; then mkdir etc/$f; else : >etc/$f; fi
  ro /etc/$f etc/$f
done
for n in null zero full random urandom; do : >dev/$n; mount --bind /dev/$n dev/$n; done
ln -s /proc/self/fd dev/fd; ln -s /proc/self/fd/0 dev/stdin; ln -s /proc/self/fd/1 dev/stdout; ln -s /proc/self/fd/2 dev/stderr
mount -t proc proc proc
mount --bind "$R/workspace" ".$W"; mount --bind "$R/logs" logs; mount --bind "$R/tests" tests
mount --bind "$R/tmp" tmp; mount --bind "$R/run" run/gyre
exec chroot . setpriv --bounding-set=-all --inh-caps=-all --no-new-privs sh -c 'cd "$1"; shift; exec "$@"' cd "$W" "$@"
"""


class Isolation(StrEnum):
    """How a local workspace is kept apart."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    NONE = "none"


@cache
def best_isolation() -> Isolation:
    """Return the strongest isolation that works here, found by trying."""
    for kind in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        if works(kind):
            return kind
    return Isolation.NONE


@cache
def works(kind: Isolation) -> bool:
    """Tell whether an isolation works here, by running `true` in it."""
    import tempfile

    if kind is Isolation.NONE:
        return True
    if shutil.which({Isolation.BUBBLEWRAP: "bwrap", Isolation.NAMESPACES: "unshare"}[kind]) is None:
        return False
    with tempfile.TemporaryDirectory(prefix="gyre-probe-") as folder:
        root = Path(folder)
        for name in FOLDERS:
            (root / name).mkdir()
        argv, environment = command(kind, root, "/workspace", ["true"], {})
        try:
            tried = subprocess.run(
                argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return tried.returncode == 0


def command(
    kind: Isolation, root: Path, workdir: str, argv: list[str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return (command line, environment) that runs `argv` in `workdir`, with `root`'s folders at their task paths."""
    environment = {"PATH": PATH, "HOME": workdir, "LANG": "C.UTF-8", **env}
    if kind is Isolation.BUBBLEWRAP:
        return [*_bubblewrap(root, workdir), *argv], environment
    if kind is Isolation.NAMESPACES:
        unshare = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"]
        return [
            *unshare,
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            _NAMESPACES,
            "gyre",
            str(root),
            workdir,
            *argv,
        ], environment
    return argv, environment


def _bubblewrap(root: Path, workdir: str) -> list[str]:
    argv = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    if os.getuid() == 0:
        argv += ["--uid", "1000", "--gid", "1000"]
    for path in _SYSTEM:
        if Path(path).is_symlink():
            argv += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            argv += ["--ro-bind", path, path]
    for name in _ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    for name, place in (
        ("workspace", workdir),
        ("logs", "/logs"),
        ("tests", "/tests"),
        ("tmp", "/tmp"),
        ("run", "/run/gyre"),
    ):
        argv += ["--bind", str(root / name), place]
    return [*argv, "--chdir", workdir]
