"""Is a task sound? Its solution must reach reward 1, doing nothing must not: both in real workspaces, scored as runs are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from gyre_sdk.errors import GyreError, WorkspaceError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.scoring import RunScoring
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.task.prepare import said
from gyre_sdk.harness.workspace import open_workspace
from gyre_sdk.harness.workspace.engine import shared_client
from gyre_sdk.harness.workspace.images import ensure_image
from gyre_sdk.records import Score

SOLUTION = "/solution"
"""Where the format puts a solution while it runs."""

_SHOWN = 300
"""Characters of what tests printed that a message shows."""

Act = Callable[[Workspace, Task], str]
"""Does something in the agent's place; returns what is worth telling when the reward is not the expected one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check of a task came to."""

    check: str
    """`image`, `verifier image`, `solution` or `no-op`."""
    ok: bool
    said: str
    """What was found; of a failure, the exact reason."""
    seconds: float
    """Wall time of the check."""


def check_task(task: Task, *, engine: str | None = None) -> Iterator[Finding]:
    """Yield the outcome of each check, as they are made; the later ones need the image.

    Args:
        engine: URL of the Docker engine; None is $DOCKER_HOST or the default socket.
    """
    missing = _without_solution(task)
    if missing is not None:
        yield Finding("solution", False, missing, 0.0)
    images = [("image", task)]
    if task.verifier_image is not None or task.verifier_dockerfile is not None:
        images.append(("verifier image", replace(task, image=task.verifier_image, dockerfile=task.verifier_dockerfile)))
    for name, whose in images:
        found = _finding(name, partial(_image, whose, engine))
        yield found
        if not found.ok:
            return
    if missing is None:
        yield _finding("solution", partial(_solution, task, engine))
    yield _finding("no-op", partial(_nothing, task, engine))


def rehearse(task: Task, act: Act, *, engine: str | None = None) -> tuple[Score, str]:
    """Run `act` in the agent's place, in each step of a task with several, and score what it left.

    Returns:
        The score, and what `act` said last.

    Raises:
        GyreError: the workspace or a step's setup failed; a failed evaluation is a score without a reward.
    """
    workspace = open_workspace(task, engine=engine)
    try:
        scoring = RunScoring(task, time, retries=0)
        scoring.begin(workspace)
        told = ""
        for step in scoring.steps(workspace):
            told = act(workspace, step)
        return scoring.evaluate(workspace), told
    finally:
        workspace.close()


def solve(workspace: Workspace, task: Task) -> str:
    """Run a task's solution as the format says: placed at `/solution`, started in the working directory.

    Raises:
        WorkspaceError: it cannot be placed.
    """
    made = workspace.exec(f"mkdir -p {SOLUTION} && chmod 1777 {SOLUTION}", cwd="/", user="0:0")
    if made.exit_code != 0:
        raise WorkspaceError(f"{SOLUTION} cannot be made: {said(made)}; the root file system must not be read-only")
    workspace.write_many(task.solution_files(), SOLUTION)
    ran = workspace.exec(
        f"if [ -x {SOLUTION}/solve.sh ]; then exec {SOLUTION}/solve.sh; fi; exec sh {SOLUTION}/solve.sh",
        timeout=task.agent_timeout_s,
        env={"DEBIAN_FRONTEND": "noninteractive", **task.solution_env},
    )
    workspace.exec(f"rm -rf {SOLUTION} 2>/dev/null || rm -rf {SOLUTION}/*", cwd="/")
    if ran.timed_out:
        return f"solve.sh ran past {task.agent_timeout_s:g} s: {said(ran)}"
    return "" if ran.exit_code == 0 else f"solve.sh gave exit code {ran.exit_code}: {said(ran)}"


def do_nothing(workspace: Workspace, task: Task) -> str:
    """Leave everything as it is."""
    return ""


def _image(task: Task, engine: str | None) -> tuple[bool, str]:
    image = ensure_image(shared_client(engine), task)
    return True, f"built from {task.dockerfile}" if task.dockerfile is not None else f"{image.name} is present"


def _without_solution(task: Task) -> str | None:
    """Return what a task lacks that nothing but its solution can show, or None."""
    without = [step.name for step in task.steps if not step.solution] if task.steps else [] if task.solution else [""]
    if not without:
        return None
    place = f"steps/{without[0]}/solution/solve.sh" if task.steps else "solution/solve.sh"
    return f"there is no {place}: nothing shows that reward 1 can be reached; write one"


def _solution(task: Task, engine: str | None) -> tuple[bool, str]:
    got, told = rehearse(task, solve, engine=engine)
    return got.reward is not None and got.reward >= 1, _tell(got, told)


def _nothing(task: Task, engine: str | None) -> tuple[bool, str]:
    got, told = rehearse(task, do_nothing, engine=engine)
    good = got.reward is not None and got.reward < 1
    return good, _tell(got, told) if good or got.reward is None else f"doing nothing gets {_tell(got, told)}"


def _tell(got: Score, told: str) -> str:
    """Say what an evaluation came to, with all that explains a reward that is not the expected one."""
    if got.reward is None:
        return f"no reward: {got.explanation}"
    parts = ", ".join(f"{name} {value:g}" for name, value in got.parts.items() if name != "reward")
    said = f"reward {got.reward:g}" + (f" ({parts})" if parts else "")
    if got.reward >= 1:
        return f"{said}; {told}" if told else said
    printed = " ".join(got.output.split())
    shown = f"the tests printed: {'... ' if len(printed) > _SHOWN else ''}{printed[-_SHOWN:]}" if printed else ""
    return "; ".join(part for part in (said, told, got.explanation, shown) if part)


def _finding(check: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    start = time.monotonic()
    try:
        ok, told = look()
    except GyreError as error:
        ok, told = False, " ".join(str(error).split())
    return Finding(check, ok, told, time.monotonic() - start)
