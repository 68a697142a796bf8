"""Harbor task folders (schema 1.x): https://www.harborframework.com/docs/tasks.

Parts of the format that gyre cannot honour are refused by name rather than ignored. One extension:
`[metadata.gyre] files = "environment/files"` names a folder whose contents are placed into the workspace at the start, so
that many tasks can share one image.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task.model import Task, read_folder


def load_folder(folder: Path) -> Task:
    """Read a Harbor task folder.

    Raises:
        TaskError: something is missing, malformed or not supported; names the file, the value and what to do.
    """
    if not folder.is_dir():
        raise TaskError(f"{folder} is not a folder; give the path of a task folder (with task.toml, instruction.md)")
    config = _Table(folder / "task.toml", "", _parse(folder / "task.toml"))
    _refuse_unsupported(folder, config)
    environment, agent, verifier = config.table("environment"), config.table("agent"), config.table("verifier")
    gyre = config.table("metadata").table("gyre")
    gyre.only("files", "user", "pids", "disk_mb", "workdir", "test_command")
    tests = folder / "tests"
    if not (tests / "test.sh").is_file() and gyre.text("test_command") is None:
        raise TaskError(f"{tests / 'test.sh'} is missing; write the script that leaves a reward in /logs/verifier")
    image, context = _environment(folder, environment)
    return Task(
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
