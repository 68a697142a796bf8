"""Harbor task folders (schema 1.x): https://www.harborframework.com/docs/tasks.

Parts of the format that gyre cannot honour are refused by name rather than ignored. Three differences are deliberate: a
folder that says nothing of the network gets none (the format's default is `public`), one that says nothing of its verifier's
mode is evaluated in a fresh workspace made from what the agent left (the format's default is the agent's own), and `${VAR}` is
a value that the caller gives: nothing of the host's environment enters a workspace.

One extension, `[metadata.gyre]`: `files = "environment/files"` names a folder whose contents are placed into the workspace at
the start, so that many tasks can share one image; `user, pids, disk_mb, workdir, test_command, network, verifier_network,
profile, runtime, read_only, protected` are the fields of `Task` that the format has no word for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task.model import Task, contents, read_folder
from gyre_sdk.harness.task.parts import Artifact, Files, Healthcheck, Network, Service, Step
from gyre_sdk.harness.task.table import Table

COMPOSE_NAMES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_NETWORKS: Mapping[str, Network] = {"public": "full", "no-network": "none", "allowlist": "allowlist"}
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_GYRE_KEYS = (
    "files",
    "user",
    "pids",
    "disk_mb",
    "workdir",
    "test_command",
    "network",
    "verifier_network",
    "profile",
    "runtime",
    "read_only",
    "history",
    "protected",
)


def load_folder(folder: Path, variables: Mapping[str, str] | None = None) -> Task:
    """Read a Harbor task folder.

    Raises:
        TaskError: something is missing, malformed or not supported; names the file, the value and what to do.
    """
    if not folder.is_dir():
        raise TaskError(f"{folder} is not a folder; give the path of a task folder (with task.toml, instruction.md)")
    config = Table.read(folder / "task.toml", variables)
    environment, agent, verifier = config.table("environment"), config.table("agent"), config.table("verifier")
    metadata, about = config.table("metadata"), config.table("task")
    gyre = metadata.table("gyre")
    gyre.only(*_GYRE_KEYS)
    _refuse_unsupported(folder, config)
    agent_timeout_s = agent.number("timeout_sec", 600.0)
    steps = tuple(_step(folder, step, gyre, agent_timeout_s) for step in config.tables("steps"))
    image, context = _image(folder, environment)
    verifier_image, verifier_context = _verifier_image(folder, verifier)
    mode = verifier.choice("environment_mode", "shared", "separate")
    network, hosts = _network(agent, _network(environment, ("none", ())))
    verifier_network, verifier_hosts = _network(verifier, _network(environment, ("none", ())))
    if gyre.text("network"):
        network, hosts = cast(Network, gyre.text("network")), environment.texts("allowed_hosts")
    if gyre.text("verifier_network"):
        verifier_network, verifier_hosts = cast(Network, gyre.text("verifier_network")), verifier.texts("allowed_hosts")
    services, main_env = _services(folder, variables or {})
    try:
        return Task(
            name=about.text("name") or metadata.text("name") or folder.resolve().name,
            instruction=_instruction(folder / "instruction.md") if not steps else _summary(folder, about, steps),
            image=image,
            dockerfile=context,
            entrypoint=True,
            services=services,
            workdir=gyre.text("workdir") or environment.text("workdir") or None,
            files=_files(folder, gyre.text("files")),
            tests=_tests(folder, gyre, steps),
            test_command=gyre.text("test_command"),
            solution=folder / "solution" if (folder / "solution" / "solve.sh").is_file() else None,
            solution_env=config.table("solution").strings("env"),
            steps=steps,
            step_reward=cast(Any, config.choice("multi_step_reward_strategy", "mean", "final") or "mean"),
            healthcheck=_healthcheck(environment),
            artifacts=_artifacts(config),
            protected=gyre.texts("protected"),
            agent_timeout_s=sum(step.agent_timeout_s or 0.0 for step in steps) or agent_timeout_s,
            verifier_timeout_s=verifier.number("timeout_sec", 600.0),
            build_timeout_s=environment.number("build_timeout_sec", 600.0),
            cpus=environment.number("cpus", 1.0),
            memory_mb=_memory(environment),
            pids=int(gyre.number("pids", 256)),
            disk_mb=int(gyre.number("disk_mb", 0)) or None,
            network=network,
            allowed_hosts=hosts,
            profile=cast(Any, gyre.text("profile") or "default"),
            runtime=cast(Any, gyre.text("runtime")),
            read_only=gyre.flag("read_only") or False,
            user=gyre.user("user") or agent.user("user"),
            env={**main_env, **environment.strings("env")},
            verifier_mode=cast(Any, mode or "separate"),
            verifier_image=verifier_image if mode != "shared" else None,
            verifier_dockerfile=verifier_context if mode != "shared" else None,
            verifier_user=verifier.user("user"),
            verifier_env=verifier.strings("env"),
            verifier_network=verifier_network,
            verifier_allowed_hosts=verifier_hosts,
            mcp_servers=tuple(_mcp_server(server) for server in environment.tables("mcp_servers")),
            skills=environment.text("skills_dir"),
            tags=_tags(metadata, about),
            metadata=metadata.values,
        )
    except TaskError as error:
        raise error if str(folder) in str(error) else TaskError(f"{folder / 'task.toml'}: {error}") from None


def _instruction(file: Path) -> str:
    """Return what the agent is told, without the marks at its top that keep a benchmark out of training corpora."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError:
        raise TaskError(f"{file} is missing; write there what the agent is told") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file} cannot be read: {error}; make it a readable UTF-8 file") from error
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
        while lines and not lines[0].strip():
            lines.pop(0)
    text = "\n".join(lines)
    if not text.strip():
        raise TaskError(f"{file} is empty; write there what the agent is told")
    return text


def _summary(folder: Path, about: Table, steps: tuple[Step, ...]) -> str:
    """Return what a task of several steps is about: it needs no instruction of its own."""
    if (folder / "instruction.md").is_file():
        return _instruction(folder / "instruction.md")
    return about.text("description") or f"{len(steps)} steps: {', '.join(step.name for step in steps)}"


def _step(folder: Path, step: Table, gyre: Table, agent_timeout_s: float) -> Step:
    name = step.text("name")
    if not name or "/" in name or not (folder / "steps" / name).is_dir():
        raise step.wrong("name", f"the name of a folder in {folder / 'steps'}")
    place, agent, verifier = folder / "steps" / name, step.table("agent"), step.table("verifier")
    for table, keys in ((agent, ("user", "network_mode", "allowed_hosts")), (verifier, _STEP_VERIFIER)):
        for key in keys:
            if table.values.get(key):
                raise table.refused(key, "a step shares the task's; set it there, or make the step a task of its own")
    if (place / "tests" / "Dockerfile").exists():
        raise TaskError(
            f"{place / 'tests' / 'Dockerfile'}: a step's own verifier image is not supported; use the task's"
        )
    tested = (place / "tests" / "test.sh").is_file() or (folder / "tests" / "test.sh").is_file()
    if not tested and gyre.text("test_command") is None:
        raise TaskError(f"{place / 'tests' / 'test.sh'} is missing; write the script that leaves a reward")
    return Step(
        name=name,
        instruction=_instruction(place / "instruction.md"),
        tests=place / "tests" if (place / "tests").is_dir() else None,
        files=place / "workdir" if (place / "workdir").is_dir() else {},
        min_reward=_min_reward(step),
        agent_timeout_s=agent.number("timeout_sec", agent_timeout_s),
        verifier_timeout_s=verifier.optional("timeout_sec"),
        verifier_env=verifier.strings("env"),
        artifacts=_artifacts(step),
        healthcheck=_healthcheck(step),
        solution=place / "solution" if (place / "solution" / "solve.sh").is_file() else None,
    )


_STEP_VERIFIER = ("user", "network_mode", "allowed_hosts", "environment_mode", "environment", "collect")


def _min_reward(step: Table) -> float | Mapping[str, float] | None:
    value = step.values.get("min_reward")
    each = value.values() if isinstance(value, dict) else [] if value is None else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in each):
        raise step.wrong("min_reward", "a number, or a table of numbers by name")
    return value


def _image(folder: Path, environment: Table) -> tuple[str | None, Path | None]:
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


def _verifier_image(folder: Path, verifier: Table) -> tuple[str | None, Path | None]:
    """Return the verifier's own (image, None) or (None, folder of the Dockerfile), or neither."""
    own = verifier.table("environment")
    own.only("docker_image", "build_timeout_sec", "os")  # its limits are the task's
    if own.values and verifier.text("environment_mode") == "shared":
        raise verifier.wrong("environment_mode", '"separate" with [verifier.environment], or no such table')
    if own.text("docker_image"):
        return own.text("docker_image"), None
    return None, folder / "tests" if (folder / "tests" / "Dockerfile").is_file() else None


def _tests(folder: Path, gyre: Table, steps: tuple[Step, ...]) -> Path | Files:
    tests = folder / "tests"
    if steps:
        return tests if tests.is_dir() else {}
    if not (tests / "test.sh").is_file() and gyre.text("test_command") is None:
        raise TaskError(f"{tests / 'test.sh'} is missing; write the script that leaves a reward in /logs/verifier")
    return tests


def _network(phase: Table, otherwise: tuple[Network, tuple[str, ...]]) -> tuple[Network, tuple[str, ...]]:
    """Return (network, allowed hosts) that a table says; `otherwise` where it says nothing."""
    mode = phase.choice("network_mode", *_NETWORKS)
    hosts = phase.texts("allowed_hosts")
    if mode is None:
        if hosts:
            raise phase.wrong("allowed_hosts", 'network_mode = "allowlist" beside it')
        internet = phase.flag("allow_internet")
        return otherwise if internet is None else ("full" if internet else "none", ())
    if (mode == "allowlist") != bool(hosts):
        raise phase.wrong("allowed_hosts", 'host names with network_mode = "allowlist", and none without')
    return _NETWORKS[mode], hosts


def _memory(environment: Table) -> int:
    """Return MiB; an old folder writes `memory = "2G"`."""
    old = environment.text("memory")
    if old is None or "memory_mb" in environment.values:
        return int(environment.number("memory_mb", 2048))
    found = re.fullmatch(r"([0-9.]+)([GM])", old.strip().upper())
    if found is None:
        raise environment.wrong("memory", 'a size such as "512M" or "2G"')
    return int(float(found[1]) * (1024 if found[2] == "G" else 1))


def _healthcheck(place: Table) -> Healthcheck | None:
    if not place.values.get("healthcheck"):
        return None
    check = place.table("healthcheck")
    check.only("command", "interval_sec", "timeout_sec", "start_period_sec", "start_interval_sec", "retries")
    command = check.text("command")
    if not command:
        raise check.wrong("command", "the command that says when the workspace is ready")
    return Healthcheck(
        command=command,
        interval_s=check.number("interval_sec", 5.0),
        timeout_s=check.number("timeout_sec", 30.0),
        start_period_s=check.optional("start_period_sec", least=0.0) or 0.0,
        start_interval_s=check.number("start_interval_sec", 5.0),
        retries=int(check.number("retries", 3)),
    )


def _artifacts(place: Table) -> tuple[Artifact, ...]:
    value = place.values.get("artifacts", [])
    if not isinstance(value, list):
        raise place.wrong("artifacts", "an array of paths")
    found = []
    for number, item in enumerate(value):
        if isinstance(item, str):
            found.append(Artifact(item))
            continue
        if not isinstance(item, dict):
            raise place.wrong("artifacts", "paths, or tables with a source")
        entry = Table(place.file, f"{place.prefix}artifacts[{number}].", item)
        entry.only("source", "destination", "exclude", "service")
        if entry.text("service") not in (None, "main"):
            raise entry.refused("service", "only the agent's own container (main) is collected from")
        source = entry.text("source")
        if not source:
            raise entry.wrong("source", "a path of the workspace")
        found.append(Artifact(source, entry.text("destination") or None, entry.texts("exclude")))
    return tuple(found)


def _mcp_server(server: Table) -> dict[str, Any]:
    name = server.text("name")
    transport = server.choice("transport", "stdio", "sse", "streamable-http", "http") or "sse"
    if not name:
        raise server.wrong("name", "a name")
    if transport == "stdio":
        command = server.text("command")
        if not command:
            raise server.wrong("command", "the command that starts the server")
        return {"name": name, "transport": transport, "command": command, "args": list(server.texts("args"))}
    url = server.text("url")
    if not url:
        raise server.wrong("url", "the address of the server")
    transport = "streamable-http" if transport == "http" else transport
    return {"name": name, "transport": transport, "url": url, "headers": server.strings("headers")}


def _tags(metadata: Table, about: Table) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*metadata.texts("tags"), *about.texts("keywords"))))


def _services(folder: Path, variables: Mapping[str, str]) -> tuple[tuple[Service, ...], dict[str, str]]:
    for name in COMPOSE_NAMES:
        file = folder / "environment" / name
        if file.is_file():
            from gyre_sdk.harness.task.compose import read_compose  # YAML loads only where a task needs it

            return read_compose(file, variables)
    return (), {}


def _files(folder: Path, name: str | None) -> Files:
    if name is None:
        return {}
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()) or not place.is_dir():
        raise TaskError(
            f"{folder / 'task.toml'}: metadata.gyre.files = {name!r} is not a folder of the task; create {folder / name}"
        )
    return contents(dict(read_folder(place)))


def _refuse_unsupported(folder: Path, config: Table) -> None:
    """Name what this version cannot honour: ignoring it would change what the task measures."""
    environment, verifier = config.table("environment"), config.table("verifier")
    if (folder / "steps").is_dir() and not config.values.get("steps"):
        raise TaskError(f"{folder / 'steps'} exists but {config.file} has no [[steps]]; name its folders there")
    for key, instead in (("gpus", "set it to 0"), ("tpu", "remove it"), ("tpus", "remove it")):
        if environment.values.get(key):
            raise environment.refused(key, f"workspaces have no accelerators: {instead}")
    if verifier.values.get("collect"):
        raise verifier.refused("collect", "write what it collects in the tests, or remove it")
    system = environment.text("os") or "linux"
    if system.lower() != "linux":
        raise environment.refused("os", 'use "linux"')
