"""Scoring: what the agent left behind, evaluated after every one of its processes is dead.

Order: kill the agent's processes (its supervisor too), remove what lies at the reward path and at `/tests`, upload the tests,
run them, read the reward. Nothing the agent wrote to those places, or left running, can reach the reward.
Format (Harbor): `/logs/verifier/reward.json`, `{name: number}` or a number, before `/logs/verifier/reward.txt`, one number. Of
several names, `reward` is the reward; without it the mean of all is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from gyre_sdk.errors import ScoringError, WorkspaceUnavailable
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task import Task
from gyre_sdk.records import ExecResult, Score

REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TXT = "/logs/verifier/reward.txt"
_REWARD_LIMIT = 65_536
"""Bytes of a reward file."""

_PREPARE = """
for d in /logs/verifier /tests; do
  chmod -R u+rwX $d 2>/dev/null
  rm -rf $d 2>/dev/null
  for f in $d/* $d/.[!.]* $d/..?*; do { [ -e "$f" ] || [ -L "$f" ]; } && { rm -rf "$f" || { echo "$f"; exit 1; }; }; done
done
mkdir -p /logs/verifier /tests || exit 1
[ -d /logs/verifier ] && [ ! -L /logs/verifier ] && [ ! -L /logs ]
"""
_READ = f"""
for f in {REWARD_JSON} {REWARD_TXT}; do
  if [ -L $f ] || {{ [ -e $f ] && [ ! -f $f ]; }}; then echo "kind $f"; exit 0; fi
  if [ -f $f ]; then echo "file $f"; head -c {_REWARD_LIMIT + 1} $f; exit 0; fi
done
echo none
"""


def score(task: Task, workspace: Workspace) -> Score:
    """Evaluate a workspace once.

    Raises:
        ScoringError: the evaluation failed or gave no number: there is no reward.
        WorkspaceUnavailable: the workspace is dead.
    """
    workspace.kill_all()
    if task.scorer is not None:
        return _call_scorer(task, workspace)
    files = task.test_files()
    if not files:
        raise ScoringError(f"task {task.name!r} has neither tests nor a scorer; give it one")
    prepared = workspace.exec(_PREPARE, timeout=60.0, cwd="/")
    if prepared.exit_code != 0:
        raise ScoringError(
            f"task {task.name!r}: /logs/verifier and /tests could not be made clean: {_tail(prepared)}; the run is unscored"
        )
    workspace.write_many(files, "/tests")
    command = (
        task.test_command or "if command -v bash >/dev/null; then exec bash /tests/test.sh; fi; exec sh /tests/test.sh"
    )
    ran = workspace.exec(command, timeout=task.verifier_timeout_s, env=task.verifier_env)
    if ran.timed_out:
        raise ScoringError(
            f"task {task.name!r}: the tests ran past their limit of {task.verifier_timeout_s:g} s: {_tail(ran)}"
        )
    return _read_reward(task, workspace, ran)


def score_with_retries(task: Task, workspace: Workspace, *, retries: int = 2) -> Score:
    """Evaluate a workspace, again after a failure, at most `retries` times more.

    Raises:
        ScoringError: the last failure, with how often it was tried.
        WorkspaceUnavailable: the workspace is dead: nothing is left to evaluate.
    """
    for attempt in range(retries + 1):
        try:
            return score(task, workspace)
        except ScoringError as error:
            if attempt == retries:
                raise ScoringError(f"{error} (evaluated {attempt + 1} times)") from error
    raise AssertionError("unreachable")


def parse_reward(content: str, file: str) -> Score:
    """Return the score that a reward file holds.

    Raises:
        ScoringError: it is not a finite number, or names with finite numbers; names file and value.
    """
    if len(content.encode()) > _REWARD_LIMIT:
        raise ScoringError(f"{file} is larger than {_REWARD_LIMIT} bytes; write a number, or names with numbers")
    if not file.endswith(".json"):
        try:
            return Score(_finite(float(content.strip()), file))
        except ValueError:
            raise ScoringError(f"{file} holds {content[:80]!r}, which is not a number; write one number") from None
    try:
        value = msgspec.json.decode(content.encode())
    except msgspec.DecodeError as error:
        raise ScoringError(
            f"{file} holds {content[:80]!r}, which is not JSON ({error}); write {{name: number}}"
        ) from None
    return _from_value(value, file)


def _from_value(value: Any, where: str) -> Score:
    if isinstance(value, Mapping):
        if not value:
            raise ScoringError(f'{where} holds no reward: {{}}; write {{"reward": number}}')
        parts = {str(name): _finite(number, f"{where}: {name!r}") for name, number in value.items()}
        return Score(parts.get("reward", math.fsum(parts.values()) / len(parts)), parts)
    return Score(_finite(value, where))


def _finite(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ScoringError(
            f"{where} is {str(value)[:80]!r} ({type(value).__name__}), not a number; write a finite number"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ScoringError(f"{where} is {str(value)[:80]}, which is not finite; write a finite number")
    return number


def _read_reward(task: Task, workspace: Workspace, ran: ExecResult) -> Score:
    found = workspace.exec(_READ, timeout=30.0, cwd="/")
    head, _, content = found.stdout.partition("\n")
    state, _, file = head.partition(" ")
    if state == "file":
        try:
            return msgspec.structs.replace(parse_reward(content, file), explanation=_tail(ran))
        except ScoringError as error:
            raise ScoringError(f"task {task.name!r}: {error}") from error
    if state == "kind":
        raise ScoringError(f"task {task.name!r}: {file} is not a regular file; the tests must write a number there")
    raise ScoringError(
        f"task {task.name!r}: the tests left neither {REWARD_JSON} nor {REWARD_TXT} (exit code {ran.exit_code}): {_tail(ran)}"
    )


def _call_scorer(task: Task, workspace: Workspace) -> Score:
    assert task.scorer is not None
    try:
        value = task.scorer(workspace)
    except (ScoringError, WorkspaceUnavailable):
        raise
    except Exception as error:  # boundary: the user's scorer may raise anything; that is no reward
        raise ScoringError(f"task {task.name!r}: its scorer failed: {type(error).__name__}: {error}") from error
    if value is None:
        raise ScoringError(f"task {task.name!r}: its scorer gave no reward (None)")
    where = f"task {task.name!r}: the scorer's reward"
    if isinstance(value, Score):
        _finite(value.reward, where)
        return value
    return _from_value(value, where)


def _tail(ran: ExecResult) -> str:
    """Return the end of what an evaluation printed."""
    return (ran.stdout + ran.stderr).strip()[-600:] or "it printed nothing"
