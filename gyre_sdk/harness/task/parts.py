"""What a task is made of besides its own values: network modes, health checks, artifacts, steps. Pure."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from gyre_sdk.errors import TaskError

Network = Literal["none", "proxy-only", "allowlist", "full"]
"""What a workspace reaches: nothing but the recording proxy's listener inside it (`none`, `proxy-only`: the same listener, on a
network of the engine), the named hosts through an egress proxy, everything."""
NETWORKS: tuple[Network, ...] = ("none", "proxy-only", "allowlist", "full")

Files = Mapping[str, bytes | str]
"""Relative path -> content."""

_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that says when a workspace is ready, with the rules of Docker's HEALTHCHECK.

    Raises:
        TaskError: a value is out of range.
    """

    command: str
    """Shell command; exit status 0 means ready."""
    interval_s: float = 5.0
    """Seconds between two checks."""
    timeout_s: float = 30.0
    """Limit of one check, seconds."""
    start_period_s: float = 0.0
    """Seconds at the start in which failures do not count."""
    start_interval_s: float = 5.0
    """Seconds between two checks in the start period."""
    retries: int = 3
    """Failures in a row that make the workspace unhealthy."""

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise TaskError(f"healthcheck.command = {self.command!r}; give the command that says when it is ready")
        for name in ("interval_s", "timeout_s", "start_interval_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise TaskError(f"healthcheck.{name} = {getattr(self, name)!r}; give a number above 0")
        if not 0 <= self.start_period_s < math.inf:
            raise TaskError(f"healthcheck.start_period_s = {self.start_period_s!r}; give 0 or more")
        if self.retries < 1:
            raise TaskError(f"healthcheck.retries = {self.retries!r}; give 1 or more")


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a run leaves behind that matters: collected when it ends, and all that a verifier's own image gets to see.

    Raises:
        TaskError: the source leaves its folder.
    """

    source: str
    """File or folder of the workspace; relative paths are below the task's `workdir`."""
    destination: str | None = None
    """Relative path it is kept under. None: the name of the source."""
    exclude: tuple[str, ...] = ()
    """Patterns (`fnmatch`) of paths below a folder that are left out."""

    def __post_init__(self) -> None:
        if not self.source.strip() or ".." in PurePosixPath(self.source).parts:
            raise TaskError(f"artifact source = {self.source!r}; give a path of the workspace without '..'")
        if self.destination is not None:
            path = PurePosixPath(self.destination)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise TaskError(f"artifact destination = {self.destination!r}; give a relative path without '..'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A container beside the agent's, reached under its name at the workspace's own loopback address.

    Raises:
        TaskError: the name is no host name, or there is not one of image and dockerfile.
    """

    name: str
    image: str | None = None
    dockerfile: Path | None = None
    """Folder with a Dockerfile to build the image from, in place of `image`."""
    command: tuple[str, ...] | None = None
    """Arguments of the entry point. None: the image's."""
    entrypoint: tuple[str, ...] | None = None
    """None: the image's."""
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """None: the image's."""
    workdir: str | None = None
    """None: the image's."""
    healthcheck: Healthcheck | None = None
    """Must pass before the services that depend on it, and the agent, start."""
    depends_on: tuple[str, ...] = ()
    """Services that start before."""

    def __post_init__(self) -> None:
        if not _LABEL.fullmatch(self.name) or self.name == "localhost":
            raise TaskError(f"service name = {self.name!r}; use lower-case letters, digits and - inside")
        if (self.image is None) == (self.dockerfile is None):
            raise TaskError(f"service {self.name!r}: image = {self.image!r}; give an image or a dockerfile folder")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a task with several: its own instruction and evaluation, in the workspace the step before left.

    Raises:
        TaskError: values are out of range.
    """

    name: str
    instruction: str
    """What the agent is told in this step."""
    tests: Path | Files | None = None
    """Folder (or path -> content) placed into `/tests` over the task's own tests. None: the task's tests alone."""
    files: Path | Files = field(default_factory=dict)
    """Placed into the working directory before the step; its `setup.sh`, when it has one, is then run there."""
    min_reward: float | Mapping[str, float] | None = None
    """The later steps are left out when the step's reward (or one of these parts of it) is below. None: never."""
    agent_timeout_s: float | None = None
    """Wall time of the agent in this step; None is that of the task. `gyre run` ends the program then."""
    verifier_timeout_s: float | None = None
    """None is the task's."""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    """Added to the task's `verifier_env`."""
    artifacts: tuple[Artifact, ...] = ()
    """Added to the task's."""
    healthcheck: Healthcheck | None = None
    """Must pass before the agent gets the step."""
    solution: Path | Files | None = None
    """Folder with `solve.sh`, for `gyre task check`."""

    def __post_init__(self) -> None:
        if not _STEP_NAME.fullmatch(self.name):
            raise TaskError(f"step name = {self.name!r}; use letters, digits, and _ . - inside")
        if not self.instruction.strip():
            raise TaskError(f"step {self.name!r}: instruction = {self.instruction!r}; say what the agent is to do")
        for name in ("agent_timeout_s", "verifier_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise TaskError(f"step {self.name!r}: {name} = {value!r}; give a number above 0")
        for value in self.thresholds().values():
            if not math.isfinite(value):
                raise TaskError(f"step {self.name!r}: min_reward = {self.min_reward!r}; give finite numbers")

    def thresholds(self) -> dict[str, float]:
        """Return the least value of each gated part; the key `reward` is the reward itself."""
        if self.min_reward is None:
            return {}
        if isinstance(self.min_reward, Mapping):
            return dict(self.min_reward)
        return {"reward": self.min_reward}


def normalize_host(host: str) -> str:
    """Return an entry of an allow list in lower case: a host name, `*.` and one, an address or a CIDR range.

    Raises:
        TaskError: it is something else, a URL for example.
    """
    entry = host.strip().lower().rstrip(".")
    wrong = TaskError(
        f"allowed host {host!r}; give a host name, '*.' before one, an address or a CIDR range: no URL, port or path"
    )
    try:
        return ipaddress.ip_network(entry).compressed if "/" in entry else ipaddress.ip_address(entry).compressed
    except ValueError:
        pass
    if "/" in entry or ":" in entry or not entry:
        raise wrong
    labels = entry.removeprefix("*.").split(".")
    if not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise wrong
    return entry
