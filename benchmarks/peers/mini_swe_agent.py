"""mini-swe-agent's `DockerEnvironment`: `mini_swe_agent.py IMAGE`."""

from __future__ import annotations

import subprocess
import sys

import timing
from minisweagent.environments.docker import DockerEnvironment


class Mini:
    """Environments of the image."""

    def __init__(self, image: str) -> None:
        self._image = image

    def open(self) -> DockerEnvironment:
        """Start an environment."""
        return DockerEnvironment(image=self._image, run_args=["--rm", "--network", "none"])

    def run(self, workspace: DockerEnvironment, command: str) -> str:
        """Run a command."""
        done = workspace.execute({"command": command})
        assert done["returncode"] == 0, done
        return str(done["output"])

    def close(self, workspace: DockerEnvironment) -> None:
        """Remove an environment at once: its own `cleanup` does so in the background."""
        subprocess.run(["docker", "rm", "-f", str(workspace.container_id)], check=True, capture_output=True)
        workspace.container_id = None


if __name__ == "__main__":
    timing.serve(Mini(sys.argv[1]))
