"""One evaluation in a workspace whose agent is dead: make the places of tests and reward clean, run the tests, read the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gyre_sdk.errors import ScoringError, WorkspaceUnavailable
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring.reward import (
    REWARD_JSON,
    REWARD_LIMIT,
    REWARD_TXT,
    as_score,
    finite,
    finite_parts,
    parse_reward,
)
from gyre_sdk.harness.task import Task
from gyre_sdk.records import ExecResult, Score

OUTPUT_KEPT = 32_768
"""Characters of what the tests printed that a score keeps."""
_CLEAN_SECONDS = 60.0
_READ_SECONDS = 30.0

_CLEAN = r"""
for d in /logs/verifier /tests; do
  [ -L $d ] && { printf '%s\0' "$d"; rm -f $d; }
  for f in $d/* $d/.[!.]* $d/..?*; do { [ -e "$f" ] || [ -L "$f" ]; } && printf '%s\0' "$f"; done
  chmod -R u+rwX $d 2>/dev/null
  rm -rf $d 2>/dev/null
  for f in $d/* $d/.[!.]* $d/..?*; do { [ -e "$f" ] || [ -L "$f" ]; } && { rm -rf "$f" || { echo "$f" >&2; exit 1; }; }; done
done
mkdir -p /logs/verifier /tests || exit 1
[ -d /logs/verifier ] && [ ! -L /logs/verifier ] && [ ! -L /logs ]
"""
"""Empties both places and prints, NUL after each, what was there."""
_READ = f"""
for f in {REWARD_JSON} {REWARD_TXT}; do
  if [ -L $f ] || {{ [ -e $f ] && [ ! -f $f ]; }}; then echo "kind $f"; exit 0; fi
  if [ -f $f ]; then echo "file $f"; head -c {REWARD_LIMIT + 1} $f; exit 0; fi
done
echo none
"""
_COMMAND = "if command -v bash >/dev/null; then exec bash /tests/test.sh; fi; exec sh /tests/test.sh"


class OverallLimit(Exception):
    """The overall limit was reached while tests ran. Internal."""


def clean(task: Task, workspace: Workspace) -> list[str]:
    """Empty the places of the reward and of the tests; return what was there.

    Raises:
        ScoringError: they cannot be made clean.
    """
    done = workspace.exec(_CLEAN, timeout=_CLEAN_SECONDS, cwd="/")
    if done.exit_code != 0:
        raise ScoringError(
            f"task {task.name!r}: /logs/verifier and /tests could not be made clean: {tail(done)}; the run is unscored"
        )
    return [name for name in done.stdout.split("\0") if name.startswith("/")]


def upload_tests(task: Task, workspace: Workspace) -> None:
    """Place the tests into a clean workspace.

    Raises:
        ScoringError: the task has none.
    """
    files = task.test_files()
    if not files:
        raise ScoringError(f"task {task.name!r} has neither tests nor a scorer; give it one")
    workspace.write_many(files, "/tests")


def evaluate_tests(
    task: Task, workspace: Workspace, *, apart: bool, env: Mapping[str, str], left: Callable[[], float | None]
) -> Score:
    """Run the tests that were uploaded, and read the reward.

    Args:
        apart: the workspace is the evaluation's own. What tests started, or what they ran started, is then killed before the
            reward is read: it is worth the time where tests run what the agent left.
        env: environment of the tests.
        left: seconds until the overall limit; None without one.

    Raises:
        ScoringError: they failed, or gave no number.
        OverallLimit: the overall limit was reached first.
    """
    if task.verifier_user is not None:
        workspace.exec("chmod 777 /logs/verifier", timeout=_CLEAN_SECONDS, cwd="/")
    remaining = left()
    limit = task.verifier_timeout_s if remaining is None else min(task.verifier_timeout_s, max(remaining, 0.0))
    ran = workspace.exec(task.test_command or _COMMAND, timeout=limit, env=env, user=task.verifier_user)
    if ran.timed_out:
        if limit < task.verifier_timeout_s:
            raise OverallLimit
        raise ScoringError(
            f"task {task.name!r}: the tests ran past their limit of {task.verifier_timeout_s:g} s: {tail(ran)}"
        )
    if apart:
        workspace.kill_all()
    return _read_reward(task, workspace, ran)


def evaluate_scorer(task: Task, workspace: Workspace) -> Score:
    """Call a task's scorer.

    Raises:
        ScoringError: it raised, or gave no number.
        WorkspaceUnavailable: the workspace is dead.
    """
    assert task.scorer is not None
    try:
        value = task.scorer(workspace)
    except (ScoringError, WorkspaceUnavailable):
        raise
    except (Exception, SystemExit) as error:  # boundary: the user's scorer may raise anything; that is no reward
        raise ScoringError(f"task {task.name!r}: its scorer failed: {type(error).__name__}: {error}") from error
    if value is None or (isinstance(value, Score) and value.reward is None):
        raise ScoringError(f"task {task.name!r}: its scorer gave no reward (None)")
    where = f"task {task.name!r}: the scorer's reward"
    if isinstance(value, Score):
        return msgspec.structs.replace(
            value,
            reward=finite(value.reward, where),
            parts=finite_parts(value.parts, where),
            explanation=str(value.explanation),
            output=str(value.output),
        )
    return as_score(value, where)


def _read_reward(task: Task, workspace: Workspace, ran: ExecResult) -> Score:
    found = workspace.exec(_READ, timeout=_READ_SECONDS, cwd="/")
    head, _, content = found.stdout.partition("\n")
    state, _, file = head.partition(" ")
    if state == "file":
        try:
            score = parse_reward(content, file)
        except ScoringError as error:
            raise ScoringError(f"task {task.name!r}: {error}") from error
        return msgspec.structs.replace(score, output=printed(ran))
    if state == "kind":
        raise ScoringError(f"task {task.name!r}: {file} is not a regular file; the tests must write a number there")
    raise ScoringError(
        f"task {task.name!r}: the tests left neither {REWARD_JSON} nor {REWARD_TXT} (exit code {ran.exit_code}): {tail(ran)}"
    )


def printed(ran: ExecResult) -> str:
    """Return both outputs of a command, the middle left out when they are long."""
    text = ran.stdout + ran.stderr
    if len(text) <= OUTPUT_KEPT:
        return text
    half = OUTPUT_KEPT // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


def tail(ran: ExecResult) -> str:
    """Return the end of what an evaluation printed."""
    return (ran.stdout + ran.stderr).strip()[-600:] or "it printed nothing"
