"""Repositories in workspaces do not know their future. Case: scoring-git-future-history."""

from __future__ import annotations

import subprocess

import pytest
from tools_image import build_tools_image
from tree_inputs import case

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.scoring import history, prepare, scrub_history
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, Isolation, LocalWorkspace, WorkspacePool

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def pool(docker_client, base_image):
    with WorkspacePool(recycle=True) as pool:
        yield pool


@pytest.fixture
def task(docker_client, base_image):
    return Task(instruction="x", image=build_tools_image(docker_client), memory_mb=256)


@pytest.fixture(autouse=True)
def unseen():
    """No image has been looked at: the repositories here are made in workspaces of an image without one."""
    history._without.clear()


@pytest.mark.parametrize("packed", ["", "git gc -q --prune=never", "git repack -q -a -d; git pack-refs --all"])
def test_git_future_history(pool, task, packed):
    found = case("scoring", "scoring-git-future-history")
    given, expected = found["input"], found["expected"]
    with pool.take(task) as workspace:

        def git(command: str) -> tuple[int, str]:
            done = workspace.exec(command, cwd="repo")
            return done.exit_code, done.stdout.strip()

        assert workspace.exec(given["build_script"]).exit_code == 0
        git("git tag v1.0 work; touch .git/FETCH_HEAD; cp .git/HEAD .git/ORIG_HEAD")
        git(packed or "true")
        assert "FUTURE" in git("git log --all --format=%s")[1]
        assert git(f"git cat-file -e {given['solution_commit']}")[0] == 0
        prepare(task, workspace)
        for probe in given["probes_in_workspace"]:
            status, out = git(probe)
            if probe.startswith("git cat-file"):
                assert status != 0, probe
            elif probe.startswith(("grep", "git reflog")):
                assert out == "", probe
            elif probe == "git tag":
                assert out == "v1.0"  # of the past
            else:
                assert out == expected.get(probe, ""), probe
        for commit in (given["solution_commit"], given["other_future_commit"], given["solution_blob_calc_py"]):
            assert git(f"git cat-file -e {commit}")[0] != 0
        assert git("git rev-parse HEAD") == (0, given["base_commit"])
        assert git("git status --porcelain; git diff; git branch --format='%(refname:short)'") == (0, "work")
        author = "-c user.name=a -c user.email=a@b"
        assert git(f"echo more >> calc.py && git {author} commit -qam new && git log --format=%s") == (
            0,
            "new\nbase state",
        )


def test_what_is_staged_and_changed_stays(pool, task):
    with pool.take(task) as workspace:
        workspace.exec(
            "git init -q -b main . && git config user.email a@b && git config user.name n && echo 1 > a && git add a &&"
            " git commit -qm one && echo 2 > a && git commit -qam FUTURE && git reset -q --hard HEAD~1 &&"
            " echo staged > b && git add b && echo changed > a && git checkout -q --detach"
        )
        assert scrub_history(task, workspace, "/workspace") == []  # nothing says that there may be one
        assert scrub_history(task, workspace, "/workspace", image="an image") == ["/workspace"]
        done = workspace.exec("git status --porcelain; git show :b; git log --all --format=%s; cat .git/HEAD | wc -c")
        assert done.stdout == " M a\nA  b\nstaged\none\n41\n"


KINDS = {
    "kept packs": "mv up r && cd r && git gc -q && for p in .git/objects/pack/*.pack; do : >${p%pack}keep; done",
    "without old blobs": "mv up r && cd r && git rev-list --objects --all --filter=blob:none --no-object-names >l &&"
    " git rev-parse HEAD:a HEAD~1:a >>l && x=$(git pack-objects -q .git/objects/pack/pack <l) && rm -r l .git/objects/?? &&"
    " : >.git/objects/pack/pack-$x.promisor && git config core.repositoryformatversion 1 &&"
    " git config extensions.partialclone origin && git config remote.origin.promisor true",
}


@pytest.mark.parametrize("kind", KINDS)
def test_clones_that_hold_on_to_their_packs(pool, task, kind):
    """Packs that git is told to keep; and those of a partial clone, where what the past lacks cannot be fetched any more."""
    with pool.take(task) as workspace:
        made = workspace.exec(
            "export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=n GIT_CONFIG_KEY_1=user.email GIT_CONFIG_VALUE_1=e\n"
            "git init -q -b main up && cd up && for n in old base FUTURE; do echo $n >a && git add a && git commit -qm $n || exit; done\n"
            f"cd .. && {KINDS[kind]} && git checkout -q --detach HEAD~1 && git rev-parse HEAD && rm -rf ../up"
        )
        assert made.exit_code == 0, made
        assert scrub_history(task, workspace, "/workspace", image=kind) == ["/workspace/r"]
        seen = workspace.exec(
            "git rev-parse HEAD; git log --all --format=%s; git status --porcelain; git diff; cat a\n"
            "for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done | grep -c FUTURE",
            cwd="r",
        )
        assert seen.stdout == f"{made.stdout}base\nold\nbase\n0\n", seen


REPOSITORIES = """
set -e
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=user.name GIT_CONFIG_VALUE_0=n GIT_CONFIG_KEY_1=user.email GIT_CONFIG_VALUE_1=e
for one in lib gone own; do
  git init -q -b main /tmp/made/$one; cd /tmp/made/$one
  for n in old FUTURE; do echo $n $one >a; git add a; git commit -qm "$n $one"; done
done
link() { git update-index --add --cacheinfo "160000,$(git -C /tmp/made/$1 rev-parse $2),$1"; mkdir -p $1; }
git init -q -b main /workspace/r; cd /workspace/r
echo old >a; git add a; git commit -qm old; link lib main~1; git commit -qm base
echo FUTURE >a; git add a; link lib main; link gone main; git commit -qm FUTURE; git branch -q side main~2
for one in origin.git orphan/.git near.git; do mkdir -p ../$one; cp -r .git/. ../$one; done
mkdir .git/modules; for one in lib gone; do mv /tmp/made/$one/.git .git/modules/$one; done
git -C .git/modules/lib config core.worktree ../../../lib; mv /tmp/made/own/.git ../own.git; git -C ../own.git config core.bare true
git checkout -q main~1; rm -rf gone
git worktree add -q "../a side" side; git worktree add -q ../stale main; rm -rf ../stale
git -C ../origin.git config core.bare true; git -C ../orphan symbolic-ref HEAD refs/heads/none; rm ../orphan/.git/index
mv ../near.git /tmp/near.git; cd /tmp/near.git; git config core.bare true; git worktree add -q --detach /workspace/near main~1
"""


def test_repositories_without_files_and_with_several_checkouts(pool, task):
    """Bare ones, submodules that are not checked out, linked worktrees: they have what the checkouts are at, and their past."""
    with pool.take(task) as workspace:
        made = workspace.exec(REPOSITORIES, timeout=60)
        assert made.exit_code == 0, made.stderr
        found = scrub_history(task, workspace, "/workspace", image="several")
        w = "/workspace"
        assert {f"{w}/r", f"{w}/a side", f"{w}/near", f"{w}/orphan", f"{w}/origin.git"} < set(found)
        assert f"{w}/own.git" not in found
        seen = workspace.exec(
            "for d in r/.git r/.git/modules/lib origin.git /tmp/near.git orphan/.git; do cd $d; export GIT_DIR=$PWD GIT_WORK_TREE=$PWD\n"
            "for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done | grep -c FUTURE\n"
            "cd /workspace; done; unset GIT_DIR GIT_WORK_TREE; ls r/.git/modules r/.git/worktrees\n"
            "cd r; git status --porcelain; git log --format=%s; git --git-dir=.git/modules/lib --work-tree=lib show HEAD:a; cd '../a side'\n"
            "git status --porcelain -b; git log --format=%s; cd ../near; git status --porcelain -b; git log --format=%s; cd ..\n"
            "git -C origin.git log main --format=%s; git -C own.git log --format=%s"
        )
        assert seen.stdout.split("\n") == [
            *("0", "0", "0", "0", "0"),
            *("r/.git/modules:", "lib", "", "r/.git/worktrees:", "a-side"),
            *("base", "old", "old lib"),
            *("## side", "old"),
            *("## HEAD (no branch)", "base", "old"),
            *("base", "old", "FUTURE own", "old own", ""),
        ], seen


def test_a_repository_of_this_machine_is_never_scrubbed(tmp_path):
    """A task's folder may be a linked worktree: without a container around, its repository is the user's own."""
    own = tmp_path / "own"
    git = ["git", "-C", str(own), "-c", "user.name=n", "-c", "user.email=e"]
    own.mkdir()
    for words in (
        "init -q -b main",
        "commit -q --allow-empty -m one",
        "worktree add -q ../w -b side",
        "commit -q --allow-empty -m two",
    ):
        subprocess.run([*git, *words.split()], check=True)
    task = Task(instruction="x", files={".git": (tmp_path / "w" / ".git").read_bytes()})
    with LocalWorkspace(task, isolation=Isolation.NONE) as workspace:
        with pytest.raises(TaskError, match=r"part of the repository .*/own/.git, which is not the workspace's"):
            prepare(task, workspace)
    said = subprocess.run([*git, "log", "--format=%s", "main"], check=True, capture_output=True, text=True).stdout
    assert said == "two\none\n"


def test_a_repository_that_cannot_be_scrubbed_is_an_error(docker_client, base_image):
    """The base sandbox has no git, but whoever has Python can read the objects."""
    task = Task(instruction="x", memory_mb=64, files={".git/objects/aa/x": b"", ".git/HEAD": "ref: refs/heads/main\n"})
    with DockerWorkspace(task, docker_client) as workspace:
        with pytest.raises(TaskError, match=r"/workspace could not be scrubbed.*install git"):
            prepare(task, workspace)
    kept = Task(instruction="x", memory_mb=64, files=task.files, metadata={"gyre": {"history": "keep"}})
    with DockerWorkspace(kept, docker_client) as workspace:
        prepare(kept, workspace)
