"""Tasks: an instruction, an environment and a scorer; built in code or loaded from a Harbor folder.

Format: https://www.harborframework.com/docs/tasks (schema 1.x). Parts of it that gyre cannot honour are refused by name
rather than ignored. One extension: `[metadata.gyre] files = "environment/files"` names a folder whose contents are placed
into the workspace at the start, so that many tasks can share one image.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.records import Score

Scorer = Callable[[Workspace], "float | Score | Mapping[str, float] | None"]
"""Evaluates a workspace after the agent is done; None means that there is no reward (which is not 0)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./ -]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a run is to do, where, and how it is scored.

    Raises:
        TaskError: values contradict each other or are out of range.
    """

    instruction: str
    """What the agent is told."""
    name: str = "task"
    image: str | None = None
    """Image of the workspace. None with no `dockerfile` means `gyre/base`."""
    dockerfile: Path | None = None
    """Folder with a Dockerfile to build the image from."""
    workdir: str | None = "/workspace"
    """Where commands run. None: the image's own working directory."""
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    """Path (below `workdir`, or absolute) -> content, placed at the start; content that starts with `#!` is executable."""
    tests: Path | Mapping[str, bytes | str] | None = None
    """Folder (or path -> content) uploaded to `/tests` once the agent is done."""
    test_command: str | None = None
    """What evaluates the workspace. None: `bash /tests/test.sh`, or `sh` where there is no bash."""
    scorer: Scorer | None = None
    """Evaluates instead of `tests`."""
    agent_timeout_s: float | None = None
    """Wall time of the agent; None is no limit."""
    verifier_timeout_s: float = 600.0
    build_timeout_s: float = 600.0
    cpus: float = 1.0
    memory_mb: int = 2048
    """Memory limit, swap included, MiB."""
    pids: int = 256
    """Processes and threads at a time."""
    disk_mb: int | None = None
    """Limit on the working directory, MiB; it is then kept in memory (and counts as such). None: no limit."""
    network: Literal["none"] = "none"
    user: str | None = "1000:1000"
    """User that commands run as. None: the image's (its label `gyre.user`, its USER, or root)."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every command."""
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    """Added for the evaluation only."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Free; `[metadata]` of a loaded task."""

    def __post_init__(self) -> None:
        def refuse(what: str, value: object, next_step: str) -> None:
            raise TaskError(f"task {self.name!r}: {what} = {value!r}; {next_step}")

        if not self.instruction.strip():
            refuse("instruction", self.instruction, "say what the agent is to do")
        if not _NAME.fullmatch(self.name):
            refuse("name", self.name, "use letters, digits, and _ . / - inside")
        if self.image is not None and self.dockerfile is not None:
            refuse("image", self.image, "give an image or a dockerfile folder, not both")
        if self.tests is not None and self.scorer is not None:
            refuse("scorer", self.scorer, "give tests or a scorer, not both")
        if self.workdir is not None and not self.workdir.startswith("/"):
            refuse("workdir", self.workdir, "give an absolute path")
        if self.network != "none":
            refuse("network", self.network, "only 'none' is supported: model calls go through the recording proxy")
        for name in (
            "agent_timeout_s",
            "verifier_timeout_s",
            "build_timeout_s",
            "cpus",
            "memory_mb",
            "pids",
            "disk_mb",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                refuse(name, value, "give a number above 0")
        if self.memory_mb < 6:
            refuse("memory_mb", self.memory_mb, "a container needs at least 6")

    @classmethod
    def load(cls, folder: str | Path) -> Task:
        """Read a Harbor task folder.

        Raises:
            TaskError: something is missing, malformed or not supported; names the file, the value and what to do.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise TaskError(
                f"{folder} is not a folder; give the path of a task folder (with task.toml, instruction.md)"
            )
        config = _Table(folder / "task.toml", "", _parse(folder / "task.toml"))
        _refuse_unsupported(folder, config)
        environment, agent, verifier = config.table("environment"), config.table("agent"), config.table("verifier")
        gyre = config.table("metadata").table("gyre")
        gyre.only("files", "user", "pids", "disk_mb", "workdir", "test_command")
        tests = folder / "tests"
        if not (tests / "test.sh").is_file() and gyre.text("test_command") is None:
            raise TaskError(f"{tests / 'test.sh'} is missing; write the script that leaves a reward in /logs/verifier")
        image, context = _environment(folder, environment)
        return cls(
            name=config.table("task").text("name") or config.table("metadata").text("name") or folder.resolve().name,
            instruction=_instruction(folder),
            image=image,
            dockerfile=context,
            workdir=gyre.text("workdir") or environment.text("workdir") or None,
            files=_files(folder, gyre.text("files")),
            tests=tests,
            test_command=gyre.text("test_command"),
            agent_timeout_s=agent.number("timeout_sec", 600.0),
            verifier_timeout_s=verifier.number("timeout_sec", 600.0),
            build_timeout_s=environment.number("build_timeout_sec", 600.0),
            cpus=environment.number("cpus", 1.0),
            memory_mb=int(environment.number("memory_mb", 2048)),
            pids=int(gyre.number("pids", 256)),
            disk_mb=int(gyre.number("disk_mb", 0)) or None,
            user=gyre.user("user") or agent.user("user"),
            env=environment.strings("env"),
            verifier_env=verifier.strings("env"),
            metadata=config.table("metadata").values,
        )

    def test_files(self) -> dict[str, bytes]:
        """Return the tests as relative path -> content; empty when a scorer evaluates."""
        if self.tests is None:
            return {}
        if isinstance(self.tests, Path):
            return read_folder(self.tests)
        return {path: _bytes(content) for path, content in self.tests.items()}

    def start_files(self) -> dict[str, bytes]:
        """Return the files to place at the start, as bytes."""
        return {path: _bytes(content) for path, content in self.files.items()}


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return relative path -> content of every regular file below a folder."""
    try:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
        }
    except OSError as error:
        raise TaskError(f"{folder} cannot be read: {error}; make its files readable") from error


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise TaskError(
            f"{file} is missing; a task folder has task.toml, instruction.md, environment/, tests/"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file} is not TOML: {error}; correct that line") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read: {error}; make it a readable UTF-8 file") from error


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of task.toml that names file and key when a value is wrong."""

    file: Path
    prefix: str
    values: Mapping[str, Any]

    def wrong(self, key: str, expected: str) -> TaskError:
        return TaskError(f"{self.file}: {self.prefix}{key} = {self.values[key]!r} is wrong; expected {expected}")

    def table(self, key: str) -> _Table:
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, f"a table [{self.prefix}{key}]")
        return _Table(self.file, f"{self.prefix}{key}.", value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def user(self, key: str) -> str | None:
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.text(key)

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.wrong(key, "a number above 0")
        return float(value)

    def strings(self, key: str) -> dict[str, str]:
        table = self.table(key)
        for name, value in table.values.items():
            if not isinstance(value, str):
                raise table.wrong(name, "a string")
            if "${" in value:
                raise table.wrong(name, "a literal: variables of the host are not passed into workspaces")
        return dict(table.values)

    def only(self, *known: str) -> None:
        for key in self.values:
            if key not in known:
                raise self.wrong(key, f"one of the keys {', '.join(known)}")


def _instruction(folder: Path) -> str:
    file = folder / "instruction.md"
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise TaskError(f"{file} is missing; write there what the agent is told") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read: {error}; make it a readable UTF-8 file") from error
    if not text.strip():
        raise TaskError(f"{file} is empty; write there what the agent is told")
    return text


def _environment(folder: Path, environment: _Table) -> tuple[str | None, Path | None]:
    """Return (image, None) or (None, folder of the Dockerfile)."""
    image = environment.text("docker_image")
    dockerfile = folder / "environment" / "Dockerfile"
    if image is not None:
        if not image.strip():
            raise environment.wrong("docker_image", "the name of an image")
        return image, None
    if not dockerfile.is_file():
        raise TaskError(
            f"{dockerfile} is missing and {environment.file} names no image; write one of them"
            ' ([environment] docker_image = "gyre/base", for example)'
        )
    return None, dockerfile.parent


def _files(folder: Path, name: str | None) -> dict[str, bytes | str]:
    if name is None:
        return {}
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_dir():
        raise TaskError(
            f"{folder / 'task.toml'}: metadata.gyre.files = {name!r} is not a folder of the task; create {folder / name}"
        )
    return dict(read_folder(place))


def _refuse_unsupported(folder: Path, config: _Table) -> None:
    """Name what this version cannot honour: ignoring it would change what the task measures."""
    environment, verifier = config.table("environment"), config.table("verifier")

    def refuse(what: str, where: Path, instead: str) -> None:
        raise TaskError(f"{where}: {what} not supported; {instead}")

    if config.values.get("steps") or (folder / "steps").is_dir():
        refuse("multi-step tasks ([[steps]]) are", config.file, "make each step a task of its own")
    for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml"):
        file = folder / "environment" / name
        if file.exists():
            refuse("compose environments (several containers) are", file, "put all services into one Dockerfile")
    mode = verifier.text("environment_mode") or "shared"
    if mode != "shared" or verifier.values.get("environment"):
        refuse(f"a verifier environment of its own (environment_mode = {mode!r}) is", config.file, 'use "shared"')
    if (folder / "tests" / "Dockerfile").exists():
        refuse(
            "a verifier image of its own is",
            folder / "tests" / "Dockerfile",
            "install what tests need in the task's image",
        )
    network = environment.text("network_mode") or "public"
    if network not in ("public", "no-network"):
        refuse(f"network_mode = {network!r} is", config.file, 'use "no-network": workspaces have no network')
    for key in ("healthcheck", "mcp_servers", "allowed_hosts", "tpus"):
        if environment.values.get(key):
            refuse(f"environment.{key} is", config.file, "remove it")
    if environment.values.get("gpus"):
        refuse(f"environment.gpus = {environment.values['gpus']!r} is", config.file, "set it to 0")
    if verifier.values.get("collect"):
        refuse("verifier.collect is", config.file, "remove it")
    system = environment.text("os") or "linux"
    if system != "linux":
        refuse(f"environment.os = {system!r} is", config.file, 'use "linux"')
