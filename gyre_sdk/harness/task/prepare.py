"""What a workspace needs before an agent may begin: health checks, and the files and setup of a step."""

from __future__ import annotations

import time

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task.model import Task, contents
from gyre_sdk.harness.task.parts import Healthcheck
from gyre_sdk.records import ExecResult

SETUP = "setup.sh"
"""A file of this name among a step's files is run before the step."""
_FORGET = "[ -d /run/gyre ] && rm -rf /tests/* /tests/.[!.]* /logs/verifier"
"""Removes the tests of the step before, which an evaluation in the same workspace leaves. Only a workspace with a file system
of its own has that folder of the supervisor: elsewhere these places are the machine's."""


def await_healthy(workspace: Workspace, check: Healthcheck) -> None:
    """Run a health check until it passes.

    Raises:
        WorkspaceError: it failed `retries` times in a row after its start period; the message has what it printed last.
        WorkspaceUnavailable: the workspace is dead.
    """
    start, failures = time.monotonic(), 0
    while True:
        grace = time.monotonic() - start < check.start_period_s
        ran = workspace.exec(check.command, timeout=check.timeout_s)
        if ran.exit_code == 0 and not ran.timed_out:
            return
        failures = 0 if grace else failures + 1
        if failures >= check.retries:
            how = f"ran past {check.timeout_s:g} s" if ran.timed_out else f"gave exit code {ran.exit_code}"
            raise WorkspaceError(
                f"workspace {workspace.id} is not healthy: {check.command!r} {how}, {failures} times in a row: {said(ran)}"
            )
        time.sleep(check.start_interval_s if grace else check.interval_s)


def begin_step(workspace: Workspace, task: Task, number: int, *, setup_timeout_s: float = 600.0) -> Task:
    """Bring a step's files into the working directory, run its setup, wait for its health; return the step as a task.

    Args:
        number: index of the step, from 0.

    Raises:
        TaskError: there is no such step.
        WorkspaceError: the setup failed or the workspace is not healthy.
    """
    step_task, step = task.at_step(number), task.steps[number]
    if number > 0:
        workspace.exec(_FORGET, cwd="/", timeout=60.0)
    files = contents(step.files)
    if files:
        workspace.write_many(files, ".")
    if SETUP in files:
        ran = workspace.exec(
            f"if command -v bash >/dev/null; then exec bash ./{SETUP}; fi; exec sh ./{SETUP}", timeout=setup_timeout_s
        )
        if ran.exit_code != 0:
            raise WorkspaceError(
                f"task {task.name!r}, step {step.name!r}: {SETUP} failed with exit code {ran.exit_code}: {said(ran)}"
            )
    if step.healthcheck is not None:
        await_healthy(workspace, step.healthcheck)
    return step_task


def said(ran: ExecResult) -> str:
    """Return the end of what a command printed."""
    return (ran.stdout + ran.stderr).strip()[-600:] or "it printed nothing"
