"""What a container must be rid of before another run gets it; run by its supervisor, see the module `pool`."""

from __future__ import annotations

import shlex

from gyre_sdk.harness.workspace.hardening import SUPERVISOR_FOLDER

RECYCLED_FOLDERS = ("/tmp", "/logs", "/tests")
"""Writable folders of a read-only container, besides the working directory."""


def cleaning(folders: tuple[str, ...], *, attributes: bool = True) -> str:
    """Return shell code that empties `folders` (mounts of their own) and names whatever else is left, with a status above 0.

    Args:
        attributes: whether those of the mounts themselves were removed; if not, an image whose tools can set some is refused.
    """
    names = " ".join(shlex.quote(folder) for folder in folders)
    return f'f0={SUPERVISOR_FOLDER}\nset -- {names}\n{_CLEAN}{"" if attributes else f"{_REFUSE} && "}clean "$@"\n'


_REFUSE = """
refuse() {
  for x in setfattr setfacl python3 perl; do command -v $x >/dev/null && { echo "maybe attributes, as there is $x"; return 1; }; done
  return 0
}
refuse"""
_CLEAN = r"""
clean() {
  for f; do
    chmod 755 "$f" 2>/dev/null || [ -k "$f" ] || { echo "mode $f"; return 1; }
    find "$f" -mindepth 1 -delete 2>/dev/null || { chmod -R u+rwX "$f"; rm -rf "$f"/* "$f"/.[!.]* "$f"/..?*; } 2>/dev/null
    for x in "$f"/* "$f"/.[!.]* "$f"/..?*; do
      { [ -e "$x" ] || [ -L "$x" ]; } && { echo "file $x"; return 1; }
    done
  done
  for x in "$f0"/*; do [ "$x" = "$D" ] || rm -rf "$x" 2>/dev/null || { echo "file $x"; return 1; }; done
  for x in "$D"/* /dev/mqueue/* /dev/shm/*; do
    case $x in "$D/launcher") continue;; "$D"/*) rm -rf "$x";; esac
    [ -e "$x" ] && { echo "file $x"; return 1; }
  done
  for x in shm msg sem; do
    { IFS= read -r row; IFS= read -r row && { echo "ipc $x"; return 1; }; } </proc/sysvipc/$x
  done
  others
  [ -z "$left" ] || { echo "processes $left"; return 1; }
  [ "$STATE" = "$(state 2>/dev/null)" ] || { echo "limits of the supervisor"; return 1; }
}
"""
