"""An agent program inside the workspace: its tools act on what is scored, and it reaches the model alone."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.agent import Agent
from gyre_sdk.harness.ports import Process

HOME = "/tmp/.gyre-agent"
"""Home of the program inside: outside of the working directory, so that its settings are no work product."""
_LOOK_SECONDS = 0.2


class Start(Protocol):
    """What a program is started with; see `attempt.Start`."""

    command: list[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]


def run_inside(
    agent: Agent, start: Callable[[str], Any], *, show: Callable[[bytes], None], check: Callable[[], None]
) -> int:
    """Run a program in the run's workspace to its end; return its exit code.

    Args:
        start: gets the base URL of the model as it is inside, and says what to start.
        show: gets its output and error output, as it comes.
        check: is called several times a second; what it raises ends the program, and is raised.

    Raises:
        WorkspaceError: the workspace takes no proxy, or has no such program.
    """
    workspace: Any = agent.context.workspace
    if not hasattr(workspace, "connect_proxy"):
        raise WorkspaceError(
            f"{workspace.id} is a local workspace: no agent can be put into it; use --workspace docker, or --host"
        )
    given = start(workspace.connect_proxy(agent.base_url, agent.api_key))
    program = given.command[0]
    if workspace.exec(f"command -v -- {shlex.quote(program)}", timeout=60.0).exit_code != 0:
        raise WorkspaceError(
            f"the workspace has no program {program!r}; build it into the task's image, or run the agent on this machine"
            " with --host"
        )
    for name, content in given.files.items():
        workspace.write(f"{HOME}/{name}", content)
    # Programs that find an open input wait for its end.
    line = f"exec </dev/null 2>&1\n{shlex.join(given.command)}"
    with workspace.start(line, env={"HOME": HOME, **given.variables}) as process:
        _pump(process, show, check)
        return int(process.wait())


def _pump(process: Process, show: Callable[[bytes], None], check: Callable[[], None]) -> None:
    """Show output until the program has ended; what holds its output open in the background is not waited for."""
    while True:
        check()
        try:
            text = process.read(timeout=_LOOK_SECONDS)
        except TimeoutError:
            if process.poll() is not None:
                return
            continue
        if not text:
            break
        show(text.encode(errors="surrogateescape"))
    while process.poll() is None:
        check()
        time.sleep(_LOOK_SECONDS)
