"""SWE-bench-style instances: a repository at a commit, a problem, and the tests that a good change must turn.

A row has `instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS, PASS_TO_PASS` and, for the check of the
task itself, `patch`. The workspace is an image that has the repository, or any image with a snapshot of the repository given.
Grading: the files that the test patch touches are put back as they were at the base commit, the patch is applied, the tests
run, and what they print is read here, outside the workspace.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from gyre_sdk.errors import ScoringError, TaskError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task.model import Task, read_folder
from gyre_sdk.harness.task.testlogs import READERS, passed
from gyre_sdk.records import ExecResult, Score

_NEEDED = ("instance_id", "problem_statement", "test_patch", "FAIL_TO_PASS")
_TOUCHED = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_NO_COMMAND = (126, 127)
IMAGE = "swebench/sweb.eval.x86_64.{id}:latest"
TIMEOUT_S = 1800.0
PYTEST = "python -m pytest -rA --tb=no -p no:cacheprovider {files}"
_RUNNERS: Mapping[str, tuple[str, str]] = {
    "django/django": ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {modules}", "unittest"),
    "sympy/sympy": ("PYTHONWARNINGS=ignore::UserWarning,ignore::SyntaxWarning bin/test -C --verbose {files}", "sympy"),
}
"""Repository -> (command, reader) where it is not pytest; `{modules}` are the files as Django names them."""
_ACTIVATE = """if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed; fi
"""
"""The usual images of these instances have their Python in a conda environment of this name."""
_GIT = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c safe.directory='*'"

_APPLY = f"""p=$(mktemp) && cat >"$p" || exit 1
{_GIT} apply --whitespace=nowarn "$p" 2>/dev/null || patch -p1 --batch --forward <"$p"
s=$?; rm -f "$p"; exit $s"""
_TAKE_AWAY = """away() {
  p=; r=$1
  while case $r in */*) :;; *) false;; esac; do
    p=$p${r%%/*}; r=${r#*/}
    { [ -L "$p" ] || { [ -e "$p" ] && [ ! -d "$p" ]; }; } && rm -rf -- "$p"
    p=$p/
  done
  rm -rf -- "$1"
}"""
"""Removes a file, and whatever stands where its folders are to be: a link to elsewhere, for example."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwebenchOptions:
    """Where the instances of a set run, and what their reward is."""

    image: str = IMAGE
    """Image of an instance; `{instance_id}`, `{id}` (as image names spell it), `{repo}`, `{version}` are replaced."""
    snapshot: Path | None = None
    """Folder with the repository at the base commit, placed into the workspace; `{instance_id}` is replaced. None: the image has
    it, as a git repository."""
    workdir: str = "/testbed"
    """Where the repository is."""
    test_command: str | None = None
    """What runs the tests; `{files}` are the files that the test patch touches. None: as the repository's project does."""
    reader: Literal["pytest", "unittest", "sympy"] | None = None
    """Who prints the outcomes. None: as the repository's project, pytest with a `test_command`."""
    reward: Literal["resolved", "partial"] = "resolved"
    """`resolved`: 1 when every named test passes, else 0. `partial`: the share of FAIL_TO_PASS, 0 when a PASS_TO_PASS fails."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each `Task`, limits for example."""


def is_instance(row: Mapping[str, Any]) -> bool:
    """Tell whether a row is an instance of this kind."""
    return "instance_id" in row and "test_patch" in row


def swebench_task(row: Mapping[str, Any], options: SwebenchOptions | None = None) -> Task:
    """Return the task of an instance.

    Raises:
        TaskError: a key is missing or malformed, or the snapshot is not there.
    """
    options = options or SwebenchOptions()
    missing = [key for key in _NEEDED if not row.get(key)]
    if missing:
        raise TaskError(f"instance {row.get('instance_id')!r} has no {missing[0]}; needed are {', '.join(_NEEDED)}")
    name, repo = str(row["instance_id"]), str(row.get("repo", ""))
    command, reader = _RUNNERS.get(repo, (PYTEST, "pytest"))
    if options.test_command is not None:
        command, reader = options.test_command, "pytest"
    files: Mapping[str, bytes] = {}
    if options.snapshot is not None:
        place = Path(str(options.snapshot).replace("{instance_id}", name))
        if not place.is_dir():
            raise TaskError(f"instance {name!r}: snapshot {place} is not a folder; put the repository there")
        files = read_folder(place)
    grader = SwebenchScorer(
        instance=name,
        base_commit=str(row.get("base_commit") or "") if options.snapshot is None else "",
        originals={path: files[path] for path in touched(row["test_patch"]) if path in files},
        test_patch=row["test_patch"],
        command=command,
        reader=options.reader or reader,
        fail_to_pass=names(row, "FAIL_TO_PASS"),
        pass_to_pass=names(row, "PASS_TO_PASS"),
        reward=options.reward,
        timeout_s=float(options.fields.get("verifier_timeout_s", TIMEOUT_S)),
    )
    difficulty = row.get("difficulty")
    values: dict[str, Any] = {
        "name": name,
        "instruction": str(row["problem_statement"]),
        "image": _image(row, options),
        "workdir": options.workdir,
        "files": files,
        "scorer": grader,
        "verifier_timeout_s": grader.timeout_s,
        "solution": {"solve.sh": _SOLVE, "patch.diff": row["patch"]} if row.get("patch") else None,
        "tags": tuple(str(row[key]) for key in ("repo", "subset") if row.get(key)),
        "metadata": {key: row[key] for key in ("repo", "base_commit", "version", "created_at") if key in row}
        | ({"difficulty": difficulty} if difficulty else {}),
    }
    return Task(**(values | dict(options.fields)))


def names(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the test names of a row: a list, or one written as JSON or as Python.

    Raises:
        TaskError: it is neither.
    """
    value = row.get(key) or []
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                value = None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise TaskError(f"{key} = {str(row.get(key))[:80]!r} is no list of test names; write a JSON list of strings")
    return tuple(value)


def touched(patch: str) -> tuple[str, ...]:
    """Return the paths that a patch changes, creates or removes, in its order."""
    return tuple(dict.fromkeys(new for _, new in _TOUCHED.findall(patch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SwebenchScorer:
    """Grades a workspace by the tests of an instance."""

    instance: str
    base_commit: str
    """Commit that the touched files are taken from; empty: they are `originals`."""
    originals: Mapping[str, bytes] = field(repr=False)
    """The touched files as they were; one that is not here did not exist."""
    test_patch: str = field(repr=False)
    command: str
    reader: str
    fail_to_pass: Sequence[str] = field(repr=False)
    pass_to_pass: Sequence[str] = field(repr=False)
    reward: Literal["resolved", "partial"] = "resolved"
    timeout_s: float = TIMEOUT_S
    """Limit of the tests; what passed until then counts."""

    def __call__(self, workspace: Workspace) -> Score:
        """Put the test files back, patch them, run them, and read what they print.

        Raises:
            ScoringError: the test files cannot be put back or patched, or the test command does not exist.
        """
        files = touched(self.test_patch)
        self._put_back(workspace, files)
        self._must(
            workspace.exec(_APPLY, input=self.test_patch),
            "its test patch does not apply (git or patch must be in the image)",
        )
        runnable = [path for path in files if path.endswith(".py")]
        command = self.command.replace("{files}", " ".join(map(shlex.quote, runnable)))
        command = command.replace("{modules}", " ".join(dict.fromkeys(map(_django_module, runnable))))
        ran = workspace.exec(_ACTIVATE + command, timeout=self.timeout_s)
        if ran.exit_code in _NO_COMMAND:
            raise self._failed(f"its test command cannot run: {command!r}", ran)
        return self.grade(ran)

    def grade(self, ran: ExecResult) -> Score:
        """Return the score of what the tests printed."""
        outcomes = READERS[self.reader](ran.stdout + "\n" + ran.stderr)
        turned, kept = passed(outcomes, self.fail_to_pass), passed(outcomes, self.pass_to_pass)
        shares = {
            "fail_to_pass": turned / len(self.fail_to_pass) if self.fail_to_pass else 1.0,
            "pass_to_pass": kept / len(self.pass_to_pass) if self.pass_to_pass else 1.0,
        }
        resolved = float(min(shares.values()) == 1.0)
        partial = shares["fail_to_pass"] if shares["pass_to_pass"] == 1.0 else 0.0
        late = "; they ran past their limit" if ran.timed_out else ""
        return Score(
            resolved if self.reward == "resolved" else partial,
            {"resolved": resolved, **shares},
            f"{turned} of {len(self.fail_to_pass)} FAIL_TO_PASS and {kept} of {len(self.pass_to_pass)} PASS_TO_PASS pass{late}",
            output=(ran.stdout + ran.stderr)[-20_000:],
        )

    def _put_back(self, workspace: Workspace, files: Sequence[str]) -> None:
        quoted = " ".join(map(shlex.quote, files))
        self._must(
            workspace.exec(f'{_TAKE_AWAY}\nfor f in {quoted}; do away "$f"; done'), "its test files cannot be replaced"
        )
        if not self.base_commit:
            if self.originals:
                workspace.write_many(self.originals, ".")
            return
        commit = shlex.quote(self.base_commit)
        self._must(
            workspace.exec(
                f"for f in {quoted}; do "
                f'if {_GIT} cat-file -e {commit}:"$f" 2>/dev/null; then {_GIT} checkout {commit} -- "$f" || exit 1; fi; done; '
                f"{_GIT} cat-file -e {commit}"
            ),
            f"its test files cannot be taken from commit {self.base_commit} (git and the repository must be in the image)",
        )

    def _must(self, ran: ExecResult, what: str) -> None:
        if ran.exit_code != 0:
            raise self._failed(what, ran)

    def _failed(self, what: str, ran: ExecResult) -> ScoringError:
        said = (ran.stdout + ran.stderr).strip()[-600:] or "it printed nothing"
        return ScoringError(f"instance {self.instance!r}: {what} (exit code {ran.exit_code}): {said}")


_SOLVE = """#!/bin/sh
set -e
here=$(dirname "$0")
git apply --whitespace=nowarn "$here/patch.diff" 2>/dev/null || patch -p1 --batch --forward <"$here/patch.diff"
"""


def _django_module(path: str) -> str:
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")


def _image(row: Mapping[str, Any], options: SwebenchOptions) -> str:
    own = row.get("image_name") or row.get("docker_image")
    if own and options.image == IMAGE:
        return str(own)
    name = str(row["instance_id"])
    return (
        options.image.replace("{instance_id}", name)
        .replace("{id}", name.lower().replace("__", "_1776_"))
        .replace("{repo}", str(row.get("repo", "")))
        .replace("{version}", str(row.get("version", "")))
    )
