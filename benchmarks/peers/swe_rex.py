"""SWE-ReX: its server in a container, its client here: `swe_rex.py IMAGE execute|session`.

The image has Python; the packages of this environment are mounted into it, so that nothing is installed at a start. The container
has the host's network, which spares it the engine's port forwarding.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Coroutine
from typing import Any

import timing
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest
from swerex.runtime.config import RemoteRuntimeConfig
from swerex.runtime.remote import RemoteRuntime

_INSIDE = "/opt/swe-rex"


class Runtime:
    """A server in a container, and its client with a loop of its own: its waiting blocks others of the same loop."""

    def __init__(self, image: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mounted = f"{sysconfig.get_paths()['purelib']}:{_INSIDE}:ro"
        server = ["python3", "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", "t"]
        run = ["docker", "run", "-d", "--init", "--network", "host", "-v", mounted, "-e", f"PYTHONPATH={_INSIDE}"]
        started = subprocess.run([*run, image, *server], check=True, capture_output=True, text=True)
        self.container = started.stdout.strip()
        self.client = RemoteRuntime.from_config(RemoteRuntimeConfig(auth_token="t", port=port, timeout=60))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.wait(self.client.wait_until_alive(timeout=100))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(100)

    def close(self) -> None:
        """Remove the container."""
        subprocess.run(["docker", "rm", "-f", self.container], check=True, capture_output=True)
        self._loop.call_soon_threadsafe(self._loop.stop)


class Rex:
    """Runtimes of the image."""

    def __init__(self, image: str, how: str) -> None:
        self._image, self._session = image, how == "session"

    def open(self) -> Runtime:
        """Start a container and wait for the server in it."""
        runtime = Runtime(self._image)
        if self._session:
            runtime.wait(runtime.client.create_session(CreateBashSessionRequest()))
        return runtime

    def run(self, workspace: Runtime, command: str) -> str:
        """Run a command."""
        if self._session:
            action = BashAction(command=command, timeout=60)
            return str(workspace.wait(workspace.client.run_in_session(action)).output)
        done = workspace.wait(workspace.client.execute(Command(command=command, shell=True, timeout=60)))
        assert done.exit_code == 0, done
        return str(done.stdout)

    def close(self, workspace: Runtime) -> None:
        """Remove a container."""
        workspace.close()


if __name__ == "__main__":
    timing.serve(Rex(sys.argv[1], sys.argv[2]))
