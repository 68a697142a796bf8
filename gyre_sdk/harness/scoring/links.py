"""Links of a run's work that lead into the tests or the reward.

An answer that is a link to the file that it is compared with is right whatever is asked: the agent need only guess its name,
and that file is not there before the evaluation. So once the tests are there, such links are taken away. Those that were there when
the run started are the task's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection

from gyre_sdk.errors import ScoringError, WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task import Task

_SECONDS = 120.0
_HERE = {True: '"$PWD"/', False: ""}

_FIND = r"""
command -v find >/dev/null && command -v readlink >/dev/null && cd /tests || exit 0
for place in /*; do
  case $place in
    /bin|/boot|/dev|/etc|/lib|/lib[36x]*|/opt|/proc|/run|/sbin|/sys|/tests|/usr|/var) ;;
    *) set -- "$@" "$place" ;;
  esac
done
find -H "$@" -xdev -type d ! -perm -500 -exec sh -c '(cd "$1" && ls) >/dev/null || chmod u+rx "$1"' sh {} \; 2>/dev/null
each='for f; do
  case /$(readlink "$f")/ in */tests/*|*/verifier/*|*/proc/*|*/dev/*) ;; *) continue ;; esac
  case $(readlink -f "$f")/ in /tests/*|/logs/verifier/*|/proc/*) ;; *) continue ;; esac
  case $NL$KEPT$NL in *"$NL$f$NL"*) continue ;; esac
  printf "%s\0" "$f"
  [ -n "$TAKE" ] || continue
  rm -f "$f" 2>/dev/null || { chmod u+rwx "${f%/*}"; rm -f "$f"; } 2>/dev/null
  [ ! -L "$f" ] || printf "!%s\0" "$f"
done'
if find / -maxdepth 0 -lname x >/dev/null 2>&1; then  # a process less for each link that leads nowhere near
  find -H "$@" -xdev -type l \( -lname '*tests*' -o -lname '*verifier*' -o -lname '*proc*' -o -lname '*dev*' \) \
    -exec sh -c "$each" sh {} +
else
  find -H "$@" -xdev -type l -exec sh -c "$each" sh {} +
fi 2>/dev/null
exit 0
"""
"""Prints, NUL after each, the links that lead there; with TAKE each is taken away, and `!` is before one that stays. What a
link into /proc leads to depends on who follows it: in /tests, where an evaluation may be too."""


def leading_links(task: Task, workspace: Workspace) -> tuple[str, ...]:
    """Return the links that lead into the tests or the reward.

    Raises:
        WorkspaceError: the workspace could not be asked.
    """
    return tuple(_found(task, workspace, kept=(), take=False))


def take_away(task: Task, workspace: Workspace, kept: Collection[str]) -> list[str]:
    """Take away the links that lead into the tests or the reward, but for those that are `kept`; return a note for each.

    Raises:
        ScoringError: they cannot be found or taken away.
    """
    try:
        found = _found(task, workspace, kept=kept, take=True)
    except WorkspaceError as error:
        raise ScoringError(f"task {task.name!r}: the workspace cannot be looked through: {error}") from error
    stuck = [path for path in found if path.startswith("!")]
    if stuck:
        raise ScoringError(f"task {task.name!r}: the link {stuck[0][1:]} cannot be taken away; the run is unscored")
    return [f"link {path}: leads into the tests or the reward; taken away" for path in found]


def _found(task: Task, workspace: Workspace, *, kept: Collection[str], take: bool) -> list[str]:
    paths = [artifact.source for artifact in task.artifacts]
    words = " ".join(f"{_HERE[not path.startswith('/')]}{shlex.quote(path)}" for path in paths)
    env = {"NL": "\n", "KEPT": "\n".join(kept), "TAKE": "x" if take else ""}
    done = workspace.exec(f'cd -P .; set -- "$PWD" /tmp {words}\n{_FIND}', timeout=_SECONDS, env=env)
    if done.timed_out or done.truncated:
        raise WorkspaceError("it has more files and links than can be looked through")
    return list(dict.fromkeys(done.stdout.split("\0")[:-1]))
