"""Scrubs what a repository in a workspace knows of its future, before the agent sees it.

A task's repository often still holds the commit that solves the task: in a branch, a tag, a note, the stash, a reflog, or as an
object that nothing names any more. After the scrub it holds what its current commit and its index reach, and nothing else.
Ids do not change. Tags of the past stay where they are not younger than the commit: build tools derive versions from them.
"""

from __future__ import annotations

import shlex

from gyre_sdk.errors import TaskError, WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task import Task

_SECONDS = 900.0

_FIND = r"""
find -H "$1" -name .git -prune -print 2>/dev/null | while IFS= read -r d; do printf '%s\n' "${d%/.git}"; done
"""
_SCRUB = r"""
set -e
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
g() { git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null -c gc.auto=0 "$@"; }
cd -- "$1"
command -v git >/dev/null || { [ -d .git/objects ] || [ -f .git ] || { echo "none $1"; exit 3; }; echo "there is no git"; exit 4; }
g rev-parse --git-dir >/dev/null 2>&1 || [ -d .git/objects ] || { echo "none $1"; exit 3; }
dir=$(cd "$(g rev-parse --git-dir)" && pwd -P)
common=$(cd "$(g rev-parse --git-common-dir)" && pwd -P)
[ "$dir" = "$common" ] || { echo "worktree $1"; exit 3; }
base=$(g rev-parse -q --verify HEAD^0) || { echo "unborn $1"; exit 3; }
branch=$(g symbolic-ref -q HEAD || true)
date=$(g show -s --format=%ct $base)
keep=
for ref in $(g for-each-ref --merged $base --format='%(refname)' refs/tags); do
  when=$(g for-each-ref --format='%(creatordate:unix)' $ref)
  [ -n "$when" ] && [ "$when" -le "$date" ] && keep="$keep $ref "
done
[ -z "$branch" ] || g update-ref --no-deref HEAD $base
g for-each-ref --format='%(refname)' | while IFS= read -r ref; do
  case "$keep" in *" $ref "*) ;; *) g symbolic-ref -q -d "$ref" >/dev/null 2>&1 || g update-ref --no-deref -d "$ref";; esac
done
rm -rf "$dir/logs" "$dir/refs/stash" "$dir/lost-found" "$dir/rebase-merge" "$dir/rebase-apply" "$dir/sequencer" "$dir/worktrees" \
  "$dir/refs/original" "$dir/refs/replace" "$dir/gitk.cache" "$dir/info/refs" "$dir/info/grafts" "$dir/objects/info/commit-graph" \
  "$dir/objects/info/commit-graphs" "$dir/objects/info/packs" "$dir/objects/pack"/*.bitmap "$dir/objects/pack"/multi-pack-index* "$dir/objects/pack"/*.keep \
  "$dir/branches" "$dir/remotes" "$dir/svn" "$dir/AUTO_MERGE"
for f in "$dir"/*_HEAD "$dir"/*_MSG "$dir"/*_EDITMSG "$dir"/*_MODE "$dir"/BISECT_* "$dir"/REBASE_*; do
  [ ! -e "$f" ] || rm -rf "$f"
done
if [ -n "$branch" ]; then
  g update-ref "$branch" $base
  g symbolic-ref HEAD "$branch"
  rm -rf "$dir/logs" "$dir/ORIG_HEAD"
fi
g config --local --name-only --get-regexp '^(remote|branch)\.' 2>/dev/null | sed 's/\.[^.]*$//' | sort -u | while IFS= read -r s; do
  g config --local --remove-section "$s" 2>/dev/null || true
done
if ls "$dir/objects/pack"/*.promisor >/dev/null 2>&1; then  # a partial clone: what it lacks cannot be fetched any more
  g config --local --unset extensions.partialclone || true
  g rev-list --objects --missing=allow-any --all --indexed-objects HEAD | cut -d ' ' -f 1 >"$dir/reached"
  set -- "$1" "$(g pack-objects -q "$dir/objects/pack/whole" <"$dir/reached")"
  rm -f "$dir/reached" "$dir/objects/pack/pack-"*
  for f in pack idx; do mv "$dir/objects/pack/whole-$2.$f" "$dir/objects/pack/pack-$2.$f"; done
  rm -f "$dir/objects/pack/whole-"*
  : >"$dir/objects/pack/pack-$2.promisor"
else
  g repack -a -d -q
fi
rm -f "$dir/objects/info/alternates" "$dir/objects/info/packs" "$dir/info/refs"
g prune --expire=now
g prune-packed -q
known=$(g cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l)
reached=$(g rev-list --objects --missing=allow-any --all --indexed-objects HEAD | wc -l)
[ $known -eq $reached ] || { echo "left $((known - reached)) objects in $1"; exit 4; }
"""

_without: set[tuple[str, str]] = set()
"""(image id, working directory) that were looked at and have no repository: runs come by the thousand."""


def scrub_history(task: Task, workspace: Workspace, workdir: str, *, image: str | None = None) -> list[str]:
    """Scrub every repository below the working directory; return their folders.

    A task whose `[metadata.gyre] history` is `keep` is left alone.

    Args:
        image: id of the workspace's image, whose working directory is then looked at once.

    Raises:
        TaskError: a repository cannot be scrubbed: the agent could look the answer up. Says what to do.
    """
    gyre = task.metadata.get("gyre")
    if isinstance(gyre, dict) and gyre.get("history") == "keep":
        return []
    key = (image, workdir) if image is not None else None
    brought = task.entrypoint or _may_have(task)  # beyond what the image holds
    if not brought and (key in _without if key is not None else not _may_have(task)):
        return []
    listed = workspace.exec(f"set -- {shlex.quote(workdir)}\n{_FIND}", timeout=_SECONDS, cwd="/")
    found = [line for line in listed.stdout.split("\n") if line]
    if not found and key is not None and not brought:
        _without.add(key)
    scrubbed = [folder for folder in found if _scrub(task, workspace, folder)]
    return scrubbed


def _may_have(task: Task) -> bool:
    """Tell whether a workspace without an image of its own may hold a repository."""
    return any(".git" in path.split("/") for path in task.files)


def _scrub(task: Task, workspace: Workspace, folder: str) -> bool:
    try:
        done = workspace.exec(f"set -- {shlex.quote(folder)}\n{_SCRUB}", timeout=_SECONDS, cwd="/")
    except WorkspaceError as error:
        raise TaskError(f"task {task.name!r}: the repository at {folder} cannot be scrubbed: {error}") from error
    if done.exit_code == 0:
        return True
    if done.exit_code == 3 and not done.stdout.startswith("worktree"):
        return False  # no repository, or one without a commit, has no future
    why = " ".join((done.stdout + done.stderr).split())[-300:] or f"exit code {done.exit_code}"
    raise TaskError(
        f"task {task.name!r}: the repository at {folder} could not be scrubbed of its future history: {why}; install git in"
        ' the image, or remove .git from it, or set [metadata.gyre] history = "keep"'
    )
