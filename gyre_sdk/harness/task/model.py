"""Tasks: an instruction, an environment and a scorer. Reading them from files is `harbor`, `rows` and `sets`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.task.parts import NETWORKS, Artifact, Files, Healthcheck, Network, Service, Step, normalize_host
from gyre_sdk.records import Score

Scorer = Callable[[Workspace], "float | Score | Mapping[str, float] | None"]
"""Evaluates a workspace after the agent is done; None means that there is no reward (which is not 0)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./ -]*")
_ABOVE_ZERO = ("agent_timeout_s", "verifier_timeout_s", "build_timeout_s", "cpus", "memory_mb", "pids", "disk_mb")
_CHOICES: Mapping[str, tuple[object, ...]] = {
    "network": NETWORKS,
    "verifier_network": NETWORKS,
    "verifier_mode": ("separate", "shared"),
    "profile": ("default", "root"),
    "runtime": (None, "runsc"),
    "step_reward": ("mean", "final"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is to do, where, and how it is scored.

    Raises:
        TaskError: values contradict each other or are out of range.
    """

    instruction: str
    """What the agent is told. Of a task with steps: what it is about."""
    name: str = "task"
    image: str | None = None
    """Image of the workspace. None with no `dockerfile` means `gyre/base`."""
    dockerfile: Path | None = None
    """Folder with a Dockerfile to build the image from."""
    entrypoint: bool = False
    """Whether the image's entry point is run at the start, with a command that does nothing as its arguments."""
    services: tuple[Service, ...] = ()
    """Containers beside the workspace, started before the agent, in this order; gone when it is closed or evaluated apart."""
    workdir: str | None = "/workspace"
    """Where commands run. None: the image's own working directory."""
    files: Files = field(default_factory=dict)
    """Path (below `workdir`, or absolute) -> content, placed at the start; content that starts with `#!` is executable."""
    tests: Path | Files | None = None
    """Folder (or path -> content) uploaded to `/tests` once the agent is done."""
    test_command: str | None = None
    """What evaluates the workspace. None: `bash /tests/test.sh`, or `sh` where there is no bash."""
    scorer: Scorer | None = None
    """Evaluates instead of `tests`."""
    solution: Path | Files | None = None
    """Folder (or path -> content) with `solve.sh`, which does the task: for `gyre task check`, never shown to an agent."""
    solution_env: Mapping[str, str] = field(default_factory=dict)
    """Environment of the solution."""
    steps: tuple[Step, ...] = ()
    """Done one after the other in one workspace, each with an instruction and tests of its own."""
    step_reward: Literal["mean", "final"] = "mean"
    """Reward of a task with steps: the mean over the steps, or that of the last step done."""
    healthcheck: Healthcheck | None = None
    """Must pass after the start before the agent begins."""
    artifacts: tuple[Artifact, ...] = ()
    """What the run leaves behind that matters; empty: the working directory."""
    protected: tuple[str, ...] = ()
    """Paths that are hashed at the start; a change is reported with the score."""

    agent_timeout_s: float | None = None
    """Wall time of the agent, over all steps; None is no limit."""
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    cpus: float = 1.0
    memory_mb: int = 2048
    """Memory limit, swap included, MiB."""
    pids: int = 256
    """Processes and threads at a time."""
    disk_mb: int | None = None
    """Limit on the working directory, MiB; it is then kept in memory (and counts as such). None: no limit."""
    network: Network = "none"
    """What the agent's commands reach besides the recording proxy."""
    allowed_hosts: tuple[str, ...] = ()
    """With network `allowlist`: host names, `*.` and one, addresses, CIDR ranges."""
    profile: Literal["default", "root"] = "default"
    """Capabilities inside: none, or the few that installing packages as root needs."""
    runtime: Literal["runsc"] | None = None
    """`runsc`: under gVisor, where the engine has it. None: the engine's own."""
    read_only: bool = False
    """The root file system is read-only; the working directory, `/tmp`, `/logs` and `/tests` are in memory."""
    user: str | None = "1000:1000"
    """User that commands run as. None: the image's (its label `gyre.user`, its USER, or root)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every command."""

    verifier_mode: Literal["separate", "shared"] = "separate"
    """Where the evaluation runs: a fresh workspace made from what the agent left, or the agent's own."""
    verifier_image: str | None = None
    """Image of the verifier's own, which then sees only the artifacts. None: what the agent left."""
    verifier_dockerfile: Path | None = None
    """Folder with a Dockerfile of the verifier's own image, in place of `verifier_image`."""
    verifier_user: str | None = None
    """User that the evaluation runs as. None: chosen by the scoring, never the agent where the image allows."""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    """Added for the evaluation only."""
    verifier_network: Network = "none"
    """What the evaluation reaches."""
    verifier_allowed_hosts: tuple[str, ...] = ()

    mcp_servers: tuple[Mapping[str, Any], ...] = ()
    """MCP servers for the agent: `name`, `transport` (`stdio`, `sse`, `streamable-http`), `command` and `args`, or `url`."""
    skills: str | None = None
    """Folder inside the workspace with the agent's skills, one folder with a SKILL.md each."""
    tags: tuple[str, ...] = ()
    """Words to select tasks by."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free; `[metadata]` of a loaded task."""

    def __post_init__(self) -> None:
        problem = next(iter(_problems(self)), None)
        if problem is not None:
            what, value, next_step = problem
            raise TaskError(f"task {self.name!r}: {what} = {value!r}; {next_step}")
        for name in ("allowed_hosts", "verifier_allowed_hosts"):
            try:
                object.__setattr__(self, name, tuple(normalize_host(host) for host in getattr(self, name)))
            except TaskError as error:
                raise TaskError(f"task {self.name!r}: {name}: {error}") from None

    @classmethod
    def load(cls, folder: str | Path, *, variables: Mapping[str, str] | None = None) -> Task:
        """Read a Harbor task folder.

        Args:
            variables: values for `${NAME}` in it; the host's environment is never read.

        Raises:
            TaskError: something is missing, malformed or not supported; names the file, the value and what to do.
        """
        from gyre_sdk.harness.task.harbor import (
            load_folder,
        )  # the loader builds tasks: importing it above would be a circle

        return load_folder(Path(folder), variables)

    @property
    def scorable(self) -> bool:
        """Whether it says how to score a run: by tests, a scorer, or steps with theirs."""
        return self.scorer is not None or self.tests is not None or bool(self.steps)

    def test_files(self) -> dict[str, bytes]:
        """Return the tests as relative path -> content; empty when a scorer evaluates."""
        return contents(self.tests)

    def start_files(self) -> dict[str, bytes]:
        """Return the files to place at the start, as bytes."""
        return contents(self.files)

    def solution_files(self) -> dict[str, bytes]:
        """Return the solution as relative path -> content; empty when there is none."""
        return contents(self.solution)

    def at_step(self, number: int) -> Task:
        """Return one step as a task of its own: its instruction, tests over the task's, limits, solution.

        It has no files and no health check: `prepare.begin_step` brings the step's into the workspace of the task.

        Args:
            number: index of the step, from 0.

        Raises:
            TaskError: there is no such step.
        """
        if not 0 <= number < len(self.steps):
            raise TaskError(f"task {self.name!r} has no step {number}; it has {len(self.steps)}, counted from 0")
        step = self.steps[number]
        return replace(
            self,
            instruction=step.instruction,
            steps=(),
            files={},
            tests=self.test_files() | contents(step.tests) if self.scorer is None else None,
            solution=step.solution,
            healthcheck=None,
            artifacts=self.artifacts + step.artifacts,
            agent_timeout_s=step.agent_timeout_s or self.agent_timeout_s,
            verifier_timeout_s=step.verifier_timeout_s or self.verifier_timeout_s,
            verifier_env={**self.verifier_env, **step.verifier_env},
        )


def _problems(task: Task) -> list[tuple[str, object, str]]:
    """Return (what, value, next step) of everything that is wrong."""
    found: list[tuple[str, object, str]] = []

    def refuse(when: bool, what: str, next_step: str) -> None:
        if when:
            found.append((what, getattr(task, what), next_step))

    refuse(not task.instruction.strip(), "instruction", "say what the agent is to do")
    refuse(not _NAME.fullmatch(task.name), "name", "use letters, digits, and _ . / - inside")
    both = task.image is not None and task.dockerfile is not None
    refuse(both, "image", "give an image or a dockerfile folder, not both")
    both = task.verifier_image is not None and task.verifier_dockerfile is not None
    refuse(both, "verifier_image", "give an image or a dockerfile folder, not both")
    own = task.verifier_image is not None or task.verifier_dockerfile is not None
    refuse(
        own and task.verifier_mode == "shared", "verifier_mode", 'use "separate" with an image of the verifier\'s own'
    )
    refuse(task.tests is not None and task.scorer is not None, "scorer", "give tests or a scorer, not both")
    refuse(task.workdir is not None and not task.workdir.startswith("/"), "workdir", "give an absolute path")
    for name, choices in _CHOICES.items():
        refuse(getattr(task, name) not in choices, name, f"use one of {', '.join(repr(choice) for choice in choices)}")
    for network, hosts in (("network", "allowed_hosts"), ("verifier_network", "verifier_allowed_hosts")):
        listed = getattr(task, network) == "allowlist"
        refuse(listed and not getattr(task, hosts), hosts, f'name the hosts, or use {network} = "none"')
        refuse(bool(getattr(task, hosts)) and not listed, hosts, f'only {network} = "allowlist" takes hosts')
    for name in _ABOVE_ZERO:
        value = getattr(task, name)
        refuse(value is not None and not 0 < value < math.inf, name, "give a number above 0")
    refuse(task.memory_mb < 6, "memory_mb", "a container needs at least 6")
    refuse(not all(isinstance(item, Artifact) for item in task.artifacts), "artifacts", "give Artifact(path) for each")
    refuse(any(not path.strip() for path in task.protected), "protected", "give paths of the workspace")
    for name in ("steps", "services"):
        names = [part.name for part in getattr(task, name)]
        refuse(len(set(names)) < len(names), name, "give each its own name")
    return found


def contents(files: Path | Files | None) -> dict[str, bytes]:
    """Return relative path -> content of a folder or a mapping; empty for None.

    Raises:
        TaskError: the folder cannot be read.
    """
    if files is None:
        return {}
    if isinstance(files, Path):
        return read_folder(files)
    return {path: content.encode() if isinstance(content, str) else content for path, content in files.items()}


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return relative path -> content of every regular file below a folder."""
    try:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
    except OSError as error:
        raise TaskError(f"{folder} cannot be read: {error}; make its files readable") from error
