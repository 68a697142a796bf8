"""Compose files of task folders: the services beside the agent's container (`main`), as far as gyre can run them.

Services run in containers of their own that share the network of the workspace, as in a pod: each is reached under its name at
the workspace's own loopback address, there is no network between them and no way out. So two services cannot listen on
one port. What does not fit that, or gives a service more rights than a workspace has, is refused by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import yaml

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task.parts import Healthcheck, Service
from gyre_sdk.harness.task.table import Table

MAIN = "main"
"""The service that the agent's container is."""
_IGNORED = (
    "expose",
    "restart",
    "init",
    "container_name",
    "hostname",
    "stop_grace_period",
    "stop_signal",
    "pull_policy",
)
"""Keys without a meaning here: every port is reachable, a service that ends stays ended."""
_KNOWN = (
    "build",
    "image",
    "command",
    "entrypoint",
    "environment",
    "healthcheck",
    "depends_on",
    "user",
    "working_dir",
    *_IGNORED,
)
_MAIN_KNOWN = ("environment", "depends_on", *_IGNORED)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")


def read_compose(file: Path, variables: Mapping[str, str]) -> tuple[tuple[Service, ...], dict[str, str]]:
    """Return the services in the order they start in, and what the file adds to the environment of `main`.

    Args:
        variables: values for `${NAME}`; the host's environment is never read.

    Raises:
        TaskError: the file is malformed or wants what gyre has not; names the key, the value and what to do.
    """
    try:
        found = yaml.safe_load(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TaskError(f"{file} cannot be read: {' '.join(str(error).split())}; correct it") from error
    if not isinstance(found, dict):
        raise TaskError(f"{file} has no services; write them, or remove it")
    root = Table(file, "", found, variables)
    for key in root.values:
        if key not in ("services", "version", "name") and not str(key).startswith("x-"):
            raise root.refused(key, "services share nothing but the workspace's network; remove it")
    tables = {name: root.table("services").table(name) for name in root.table("services").values}
    services = {name: _service(name, table) for name, table in tables.items() if name != MAIN}
    main = tables.get(MAIN, Table(file, f"services.{MAIN}.", {}, variables))
    _only(main, _MAIN_KNOWN, "the agent's container is the task's: set it in task.toml")
    return tuple(_ordered(file, services)), _environment(main)


def _service(name: str, table: Table) -> Service:
    _only(table, _KNOWN, "a service has an image, a command, an environment and a health check; remove it")
    context, image = _build(table), table.text("image")
    if (context is None) == (image is None):
        raise table.wrong("build" if context else "image", "an image or a build, one of them")
    user = table.values.get("user")
    return Service(
        name=name,
        image=image,
        dockerfile=context,
        command=_words(table, "command"),
        entrypoint=_words(table, "entrypoint"),
        env=_environment(table),
        user=None if user is None else str(user),
        workdir=table.text("working_dir"),
        healthcheck=_healthcheck(table),
        depends_on=tuple(_depends_on(table)),
    )


def _only(table: Table, known: tuple[str, ...], instead: str) -> None:
    for key in table.values:
        if key not in known and not key.startswith("x-"):
            raise table.refused(key, instead)


def _build(table: Table) -> Path | None:
    value = table.values.get("build")
    if value is None:
        return None
    if isinstance(value, dict):
        build = table.table("build")
        for key in build.values:
            if key not in ("context", "dockerfile"):
                raise build.refused(key, "write it into the Dockerfile")
        if (build.text("dockerfile") or "Dockerfile") != "Dockerfile":
            raise build.refused("dockerfile", "name the file Dockerfile")
        value = build.text("context")
    if not isinstance(value, str):
        raise table.wrong("build", "a folder with a Dockerfile")
    folder = table.file.parent
    place = (folder / value).resolve()
    if not place.is_relative_to(folder.resolve()) or not (place / "Dockerfile").is_file():
        raise table.wrong("build", f"a folder below {folder} with a Dockerfile")
    return place


def _words(table: Table, key: str) -> tuple[str, ...] | None:
    value = table.values.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        return tuple(shlex.split(table.resolved(key, value)))
    if not isinstance(value, list) or not all(isinstance(item, str | int | float) for item in value):
        raise table.wrong(key, "a string, or a list of strings")
    return tuple(table.resolved(key, str(item)) for item in value)


def _environment(table: Table) -> dict[str, str]:
    value = table.values.get("environment") or {}
    if isinstance(value, list):
        pairs = [str(item).partition("=") for item in value]
        if any(not sign for _, sign, _ in pairs):
            raise table.wrong("environment", "NAME=VALUE for each: variables of the host are not passed on")
        value = {name: text for name, _, text in pairs}
    if not isinstance(value, dict) or any(item is None or isinstance(item, dict | list) for item in value.values()):
        raise table.wrong("environment", "NAME: VALUE for each: variables of the host are not passed on")
    inner = Table(table.file, f"{table.prefix}environment.", value, table.variables)
    return {str(name): inner.resolved(str(name), _spelled(item)) for name, item in value.items()}


def _healthcheck(table: Table) -> Healthcheck | None:
    if not table.values.get("healthcheck"):
        return None
    check = table.table("healthcheck")
    for key in check.values:
        if key not in ("test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"):
            raise check.wrong(key, "a key of a health check")
    test = check.values.get("test")
    if check.flag("disable") or test in (["NONE"], "NONE", None):
        return None
    if isinstance(test, list) and test[:1] == ["CMD"] and len(test) > 1:
        command = shlex.join(map(str, test[1:]))
    elif isinstance(test, list) and test[:1] == ["CMD-SHELL"] and len(test) == 2:
        command = str(test[1])
    elif isinstance(test, str):
        command = test
    else:
        raise check.wrong("test", 'a command, ["CMD", ...] or ["CMD-SHELL", "..."]')
    return Healthcheck(
        command=command,
        interval_s=_seconds(check, "interval", 30.0),
        timeout_s=_seconds(check, "timeout", 30.0),
        start_period_s=_seconds(check, "start_period", 0.0),
        start_interval_s=_seconds(check, "start_interval", 1.0),
        retries=int(check.number("retries", 3)),
    )


def _seconds(table: Table, key: str, default: float) -> float:
    value = table.values.get(key)
    if value is None:
        return default
    match = _DURATION.fullmatch(str(value))
    if match is None or not any(match.groups()):
        raise table.wrong(key, 'a duration such as "1m30s" or "500ms"')
    hours, minutes, seconds, milliseconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds + milliseconds / 1000


def _depends_on(table: Table) -> list[str]:
    value = table.values.get("depends_on") or []
    if not isinstance(value, list | dict):
        raise table.wrong("depends_on", "names of services")
    return [str(name) for name in value]


def _ordered(file: Path, services: Mapping[str, Service]) -> list[Service]:
    """Return the services so that each comes after those it depends on."""
    done: dict[str, Service] = {}
    left = dict(services)
    while left:
        ready = [name for name, service in left.items() if all(other in done for other in service.depends_on)]
        if not ready:
            name, service = next(iter(left.items()))
            raise TaskError(f"{file}: services.{name}.depends_on = {list(service.depends_on)}: not there, or a circle")
        for name in ready:
            done[name] = left.pop(name)
    return list(done.values())


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
