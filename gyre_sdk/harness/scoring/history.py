"""Scrubs what a repository in a workspace knows of its future, before the agent sees it.

A task's repository often still holds the commit that solves the task: in a branch, a tag, a note, the stash, a reflog, or as an
object that nothing names any more. After the scrub it holds what its current commit and its index reach, and nothing else.
Ids do not change. Tags of the past stay where they are not younger than the commit: build tools derive versions from them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from gyre_sdk.errors import TaskError, WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task import Task

_SECONDS = 900.0

_FIND = r"""
find -H "$1" -name .git -prune -print -o -name HEAD ! -type d -print 2>/dev/null | while IFS= read -r d; do
  case $d in
  */.git) printf 'tree %s\n' "${d%/.git}";;
  *) [ ! -d "${d%/HEAD}/objects" ] || printf 'bare %s\n' "${d%/HEAD}";;
  esac
done
"""
_SCRUB = r"""
set -e
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0
g() { git -c safe.directory='*' -c core.fsmonitor=false -c core.hooksPath=/dev/null -c gc.auto=0 "$@"; }
kind=$1 within=$(cd -- "$2" && pwd -P)
cd -- "$3"
shift 3
command -v git >/dev/null || { [ $kind != tree ] || [ -d .git/objects ] || [ -f .git ] || exit 3; echo "there is no git"; exit 4; }
dir=.
if [ $kind = tree ]; then
  g rev-parse --git-dir >/dev/null 2>&1 || [ -d .git/objects ] || exit 3
  dir=$(g rev-parse --git-common-dir)
fi
dir=$(cd -- "$dir" && pwd -P)
within=${within%/}
case $dir/ in "$within"/*) ;; *) echo "it is part of the repository $dir, which is not the workspace's"; exit 4;; esac
export GIT_DIR="$dir" GIT_WORK_TREE="$dir"
each() { while IFS=' ' read -r c branch w; do [ -z "$c" ] || "$@" || exit; done; }

bare=$(g config --bool core.bare || true)
case $kind in
bare) bare=true;;
module) bare=true; [ ! -e "$(g config core.worktree || echo none)/.git" ] || bare=false;;
esac
places= bases= heads=
for w in "$dir"/worktrees/*; do
  [ -e "$w/gitdir" ] || continue
  IFS= read -r place <"$w/gitdir"
  case $place in /*) ;; *) place=$w/$place;; esac
  if [ -e "$place" ]; then places="$places$w
"; else rm -rf "$w"; fi
done
[ "$bare" = true ] || places="$places$dir
"
while IFS= read -r w; do
  c=$(g --git-dir="$w" rev-parse -q --verify HEAD^0) || continue
  bases="$bases $c"
  heads="$heads$c $(g --git-dir="$w" symbolic-ref -q HEAD || echo -) $w
"
done <<END
${places%?}
END
for c; do ! g cat-file -e "$c^{commit}" 2>/dev/null || bases="$bases $c"; done
if [ -z "$bases" ]; then
  [ $kind != bare ] || exit 3
  [ $kind != module ] || { rm -rf "$dir"; exit 0; }
  [ -n "$(g cat-file --batch-all-objects --batch-check='%(objectname)' | head -n 1)" ] || exit 3
fi

keep= past=refs/tags
[ $kind != bare ] || past="refs/tags refs/heads"
for c in $bases; do
  date=$(g show -s --format=%ct $c)
  for ref in $(g for-each-ref --merged $c --format='%(refname)' $past); do
    when=$(g for-each-ref --format='%(creatordate:unix)' $ref)
    [ -n "$when" ] && [ "$when" -le "$date" ] && keep="$keep $ref "
  done
done
if [ "$bare" = true ] && g rev-parse -q --verify HEAD >/dev/null; then
  branch=$(g symbolic-ref -q HEAD || echo -)
  set -- $bases
  case "$keep" in *" $branch "*) ;; *) heads="$heads$1 $branch $dir
";; esac
fi
detach() { g --git-dir="$w" update-ref --no-deref HEAD $c; }
attach() { [ "$branch" = - ] || { g update-ref "$branch" $c && g --git-dir="$w" symbolic-ref HEAD "$branch"; }; }
each detach <<END
$heads
END
g for-each-ref --format='%(refname)' | while IFS= read -r ref; do
  case "$keep" in *" $ref "*) ;; *) g symbolic-ref -q -d "$ref" >/dev/null 2>&1 || g update-ref --no-deref -d "$ref";; esac
done
for w in "$dir" "$dir"/worktrees/*; do
  rm -rf "$w/refs/stash" "$w/refs/original" "$w/refs/replace" "$w/refs/bisect" "$w/refs/rewritten" "$w/refs/worktree" \
    "$w/lost-found" "$w/rebase-merge" "$w/rebase-apply" "$w/sequencer" "$w/gitk.cache" "$w/AUTO_MERGE"
  for f in "$w"/*_HEAD "$w"/*_MSG "$w"/*_EDITMSG "$w"/*_MODE "$w"/BISECT_* "$w"/REBASE_*; do
    [ ! -e "$f" ] || rm -rf "$f"
  done
done
rm -rf "$dir/info/refs" "$dir/info/grafts" "$dir/objects/info/commit-graph" "$dir/objects/info/commit-graphs" \
  "$dir/objects/info/packs" "$dir/objects/pack"/*.bitmap "$dir/objects/pack"/multi-pack-index* "$dir/objects/pack"/*.keep \
  "$dir/branches" "$dir/remotes" "$dir/svn"
[ "$bare" != true ] || rm -f "$dir/index"
each attach <<END
$heads
END
for w in "$dir" "$dir"/worktrees/*; do rm -rf "$w/logs" "$w/ORIG_HEAD"; done
g config --local --name-only --get-regexp '^(remote|branch)\.' 2>/dev/null | sed 's/\.[^.]*$//' | sort -u | while IFS= read -r s; do
  g config --local --remove-section "$s" 2>/dev/null || true
done
if ls "$dir/objects/pack"/*.promisor >/dev/null 2>&1; then  # a partial clone: what it lacks cannot be fetched any more
  g config --local --unset extensions.partialclone || true
  g rev-list --objects --missing=allow-any --all --indexed-objects | cut -d ' ' -f 1 >"$dir/reached"
  pack=$(g pack-objects -q "$dir/objects/pack/whole" <"$dir/reached")
  rm -f "$dir/reached" "$dir/objects/pack/pack-"*
  for f in pack idx; do mv "$dir/objects/pack/whole-$pack.$f" "$dir/objects/pack/pack-$pack.$f"; done
  rm -f "$dir/objects/pack/whole-"*
  : >"$dir/objects/pack/pack-$pack.promisor"
else
  g repack -a -d -q
fi
rm -f "$dir/objects/info/alternates" "$dir/objects/info/packs" "$dir/info/refs"
g prune --expire=now
g prune-packed -q
known=$(g cat-file --batch-all-objects --batch-check='%(objectname)' | wc -l)
reached=$(g rev-list --objects --missing=allow-any --all --indexed-objects | wc -l)
[ $known -eq $reached ] || { echo "left $((known - reached)) objects"; exit 4; }

for c in $bases; do
  echo "commit $c"
  g ls-tree -r $c | sed -n 's/^160000 commit \([0-9a-f]*\).*/commit \1/p'
done
g ls-files -s | sed -n 's/^160000 \([0-9a-f]*\).*/commit \1/p'
find "$dir/modules" "$dir"/worktrees/*/modules -name HEAD ! -type d 2>/dev/null | while IFS= read -r d; do
  [ ! -d "${d%/HEAD}/objects" ] || printf 'module %s\n' "${d%/HEAD}"
done
exit 0
"""
"""Takes its kind, the folder that it must be in, its own, and commits that others are at.

`tree` is a repository with files, also a linked worktree of one: what every checkout of it is at stays. `bare` is one without: what
it has of the commits of others stays; one that has none of them is another project's, and left alone. `module` is one of a
submodule, `bare` as long as it is not checked out; one that nothing asks for goes. Prints the commits that are its present, those of
its submodules too, and where these are."""

_without: set[tuple[str, str]] = set()
"""(image id, working directory) that were looked at and have no repository: runs come by the thousand."""


def scrub_history(task: Task, workspace: Workspace, workdir: str, *, image: str | None = None) -> list[str]:
    """Scrub every repository below the working directory, and what their files are checkouts of; return their folders.

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
    if listed.timed_out or listed.truncated:
        raise TaskError(
            f"task {task.name!r}: {workdir} has more files than can be looked through for repositories; remove what is not"
            ' needed, or set [metadata.gyre] history = "keep"'
        )
    found = [
        (kind, folder) for kind, _, folder in (line.partition(" ") for line in listed.stdout.split("\n")) if folder
    ]
    if not found and key is not None and not brought:
        _without.add(key)
    within = "/" if image is not None else workdir  # without an image, what is outside is this machine's own
    return _scrub_all(task, workspace, found, within)


def _scrub_all(task: Task, workspace: Workspace, found: list[tuple[str, str]], within: str) -> list[str]:
    """Scrub repositories (kind, folder): those with files first, as they say what the present of the others is."""
    scrubbed: list[str] = []
    commits: dict[str, None] = {}
    modules: set[str] = set()

    def scrub(kind: str, folder: str) -> None:
        said = _scrub(task, workspace, kind, within, folder, () if kind == "tree" else commits)
        if said is None:
            return
        scrubbed.append(folder)
        for what, _, value in (line.partition(" ") for line in said):
            if what == "commit":
                commits[value] = None
            elif what == "module":
                modules.add(value)

    for folder in [folder for kind, folder in found if kind == "tree"]:
        scrub("tree", folder)
    for folder in sorted(modules):
        scrub("module", folder)
    for folder in [folder for kind, folder in found if kind == "bare"]:
        scrub("bare", folder)
    return scrubbed


def _may_have(task: Task) -> bool:
    """Tell whether a workspace without an image of its own may hold a repository."""
    return any(".git" in (parts := path.split("/")) or parts[-1] == "HEAD" for path in task.files)


def _scrub(
    task: Task, workspace: Workspace, kind: str, within: str, folder: str, commits: Iterable[str]
) -> list[str] | None:
    """Return what a scrubbed repository says, or None for what is none, or has nothing to scrub."""
    words = shlex.join([kind, within, folder, *commits])
    try:
        done = workspace.exec(f"set -- {words}\n{_SCRUB}", timeout=_SECONDS, cwd="/")
    except WorkspaceError as error:
        raise TaskError(f"task {task.name!r}: the repository at {folder} cannot be scrubbed: {error}") from error
    if done.exit_code == 0:
        return done.stdout.split("\n")
    if done.exit_code == 3:
        return None
    why = " ".join((done.stdout + done.stderr).split())[-300:] or f"exit code {done.exit_code}"
    raise TaskError(
        f"task {task.name!r}: the repository at {folder} could not be scrubbed of its future history: {why}; install git in"
        ' the image, or remove .git from it, or set [metadata.gyre] history = "keep"'
    )
