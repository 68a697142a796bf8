"""An agent program inside the workspace: its tools act on what is scored, and it reaches the model alone."""

from __future__ import annotations

import base64
import contextlib
import shlex
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.agent import Agent
from gyre_sdk.records import ExecResult

HOME = "/tmp/.gyre-agent"
"""Home of the program inside: outside of the working directory, so that its settings are no work product."""
_LOOK_SECONDS = 0.2
_CHUNK = 262_144


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
    running = _Running(workspace, shlex.join(given.command), {"HOME": HOME, **given.variables})
    try:
        while running.going(_LOOK_SECONDS):
            check()
            running.stream(show)
        running.stream(show)
        return running.exit_code()
    except BaseException:
        with contextlib.suppress(WorkspaceError):
            workspace.kill_all()
        raise


class _Running:
    """A command in the workspace whose output is read while it runs."""

    def __init__(self, workspace: Any, line: str, variables: Mapping[str, str]) -> None:
        self._workspace = workspace
        self._log = f"{HOME}/output.log"
        self._seen = 0
        self._result: ExecResult | None = None
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, args=(line, variables), name="gyre agent", daemon=True).start()

    def _run(self, line: str, variables: Mapping[str, str]) -> None:
        try:
            self._result = self._workspace.exec(f"exec >{self._log} 2>&1\n{line}", env=variables)
        except BaseException as error:  # boundary: top of a thread; `exit_code` raises it
            self._failure = error
        self._ended.set()

    def going(self, seconds: float) -> bool:
        """Wait a little for its end; tell whether it still runs."""
        return not self._ended.wait(seconds)

    def stream(self, show: Callable[[bytes], None]) -> None:
        """Show what it wrote since the last time."""
        while True:
            command = f"tail -c +{self._seen + 1} {self._log} 2>/dev/null | head -c {_CHUNK} | base64"
            data = base64.b64decode(self._workspace.exec(command, timeout=60.0, cwd="/").stdout)
            if data:
                show(data)
            self._seen += len(data)
            if len(data) < _CHUNK:
                return

    def exit_code(self) -> int:
        """Return its exit code, once it has ended."""
        if self._failure is not None:
            raise self._failure
        assert self._result is not None
        return self._result.exit_code
