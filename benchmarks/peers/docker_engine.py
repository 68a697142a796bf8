"""The engine's own ways to run a command: `docker_engine.py IMAGE py|cli`, with docker-py's `exec_run` or the docker program."""

from __future__ import annotations

import subprocess
import sys

import docker
import timing


class DockerPy:
    """`containers.run` and `exec_run`."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._client = docker.from_env(max_pool_size=64, timeout=120)

    def open(self) -> docker.models.containers.Container:
        """Start a container."""
        return self._client.containers.run(self._image, ["sleep", "3600"], detach=True, network_mode="none", init=True)

    def run(self, workspace: docker.models.containers.Container, command: str) -> str:
        """Run a command."""
        code, output = workspace.exec_run(["sh", "-c", command])
        assert code == 0
        return output.decode()

    def close(self, workspace: docker.models.containers.Container) -> None:
        """Remove a container."""
        workspace.remove(force=True)


class DockerProgram:
    """`docker run`, `docker exec`, `docker rm`."""

    def __init__(self, image: str) -> None:
        self._image = image

    def open(self) -> str:
        """Start a container."""
        return self._docker("run", "-d", "--init", "--network", "none", self._image, "sleep", "3600").strip()

    def run(self, workspace: str, command: str) -> str:
        """Run a command."""
        return self._docker("exec", workspace, "sh", "-c", command)

    def close(self, workspace: str) -> None:
        """Remove a container."""
        self._docker("rm", "-f", workspace)

    def _docker(self, *words: str) -> str:
        return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    timing.serve({"py": DockerPy, "cli": DockerProgram}[sys.argv[2]](sys.argv[1]))
