"""How the processes of a training are started: agents, the proxy, each cell's replica, each satellite's worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import msgspec

from gyre_sdk.errors import PublishError
from gyre_sdk.journal import store_file
from gyre_sdk.trainer.agents.wire import READY
from gyre_sdk.trainer.cells.launch import cluster
from gyre_sdk.trainer.cells.settings import CellsConfig
from gyre_sdk.trainer.config import TrainerConfig
from gyre_sdk.trainer.engines import kv, vllm
from gyre_sdk.trainer.lingering import Linger
from gyre_sdk.trainer.processes import ChildSpec, answers_within
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Replica, Unready
from gyre_sdk.trainer.weights import PolicyFiles

Called = Callable[[str], None]


def cell_name(number: int) -> str:
    """Return what a cell is called; number 0 is the core."""
    return f"cell-{number}"


def cell_names(cells: CellsConfig) -> list[str]:
    """Return what the cells are called, the core first."""
    return [cell_name(number) for number in range(cells.count)]


def standalone_names(cells: CellsConfig) -> list[str]:
    """Return what the replicas beside the cells are called."""
    return [f"standalone-{number}" for number in range(cells.standalone)]


def process_names(config: TrainerConfig) -> set[str]:
    """Return what the processes are called that a training starts on this machine by itself."""
    names = {"agents", "proxy"}
    if config.cells is None:
        return names if config.engine.url is not None else names | {"engine"}
    if config.cells.launcher == "ray":
        return names | {cluster.NAME} if config.cells.ray_address is None else names
    cells = cell_names(config.cells)
    replicas = {f"{name}-replica" for name in [*cells, *standalone_names(config.cells)]}
    return names | replicas | {f"{cell}-worker" for cell in cells[1:]}


def engine_options(config: TrainerConfig) -> list[str]:
    """Return the arguments that an engine is started with beside those of gyre's own.

    On GPUs vLLM can sleep where it shares them with a cell's training worker, unless the user says otherwise
    (`--no-enable-sleep-mode`): its memory would stay taken while that trains.
    """
    options, cells = config.engine.options, config.cells
    said = any(word in ("--enable-sleep-mode", "--no-enable-sleep-mode") for word in options)
    if config.engine.kind != "vllm" or cells is None or said or not _on_gpus(cells):
        return options
    return [*options, "--enable-sleep-mode"]


def _on_gpus(cells: CellsConfig) -> bool:
    if cells.launcher == "ray":
        return cells.resources.get("GPU", 0.0) > 0
    import torch

    return torch.cuda.is_available()


def replica_spec(
    config: TrainerConfig,
    publisher: Publisher,
    transport: str,
    linger: Linger,
    *,
    name: str = "engine",
    port: int = 0,
    shared: Path | None = None,
) -> ChildSpec:
    """Return how a replica is started.

    It starts from the policy's own folder, which is always there, and is brought to the current version before calls go
    to it; where nothing is published, from what is served. With NCCL it ends with the trainer: it may wait for ever for one
    that died.

    Args:
        transport: how weights will reach it.
        name: of the process, and of its log file.
        shared: folder of this training's keys and values, for `[engine.kv]`.
    """
    engine = msgspec.structs.replace(config.engine, options=engine_options(config))
    base = PolicyFiles(0, config.policy.model, "")

    def files() -> PolicyFiles:
        return base if engine.publish else publisher.current

    lost: Called = publisher.lost if engine.publish else _nothing
    returned: Called = publisher.returned if engine.publish else _nothing
    spec = partial(
        ChildSpec,
        name,
        log=config.output.dir / "logs" / f"{name}.log",
        port=port,
        on_ready=returned,
        on_death=lost,
        linger=linger,
        lingers=transport != "nccl",
        about=_state_of(*config.policy.model.iterdir()),
        fit=_tells_its_version,
        answers=answers_within,
    )
    if engine.kind == "vllm":
        rank = config.policy.lora.r if config.policy.lora else 0
        return spec(
            lambda port: vllm.command(engine, files(), port, transport=transport, rank=rank, shared=shared),
            "/health",
            python=engine.python,
            environment={**vllm.ENVIRONMENT, **kv.environment(engine.kv)},
            patience=vllm.PATIENCE,
        )
    requests = engine.request_log
    if requests is not None and name != "engine":
        requests = requests.with_name(f"{requests.stem}-{name}{requests.suffix}")

    def command(port: int) -> list[str]:
        start = files()
        arguments = ["gyre_sdk.trainer.engines.embedded", "--model", str(start.folder)]
        arguments += ["--version", str(start.version), "--port", str(port)]
        arguments += ["--max-batch", str(engine.max_batch), "--served-model-name", "policy"]
        arguments += ["--threads", str(engine.threads)] if engine.threads else []
        arguments += ["--request-log", str(requests)] if requests else []
        return [*arguments, *engine.options]

    return spec(command, "gyre-engine ready on")


def proxy_spec(config: TrainerConfig, key_file: Path, linger: Linger, on_ready: Called) -> ChildSpec:
    """Return how the proxy is started."""

    def command(port: int) -> list[str]:
        arguments = ["gyre_sdk.cli", "serve", "--store", str(config.store.path), "--model", str(config.policy.model)]
        arguments += ["--port", str(port), "--service-key-file", str(key_file)]
        arguments += ["--sampling", config.proxy.sampling]
        if config.proxy.renderer != "auto":
            arguments += ["--renderer", config.proxy.renderer]
        for name, value in config.proxy.renderer_options.items():
            arguments += ["--renderer-option", f"{name}={json.dumps(value)}"]
        return [*arguments, *config.proxy.options]

    def knows_the_key(url: str) -> bool:
        key = key_file.read_text().strip()
        try:
            answer = httpx.get(
                f"{url}/gyre/v1/status", headers={"authorization": f"Bearer {key}"}, timeout=10.0, trust_env=False
            )
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    file = store_file(config.store.path)
    store = file.stat() if file.exists() else None
    return ChildSpec(
        "proxy",
        command,
        "ready",
        config.output.dir / "logs" / "proxy.log",
        config.proxy.port,
        on_ready=on_ready,
        linger=linger,
        # it holds the store open, so that a new one is another file
        about=f"{_state_of(*config.policy.model.iterdir())} {store and (store.st_dev, store.st_ino)}",
        fit=knows_the_key,
        answers=answers_within,
    )


def agents_spec(config: TrainerConfig, base: Path, about: str = "", linger: Linger | None = None) -> ChildSpec:
    """Return how the agents' process is started; its key is in the output folder.

    Args:
        base: folder of the config file, where the user's modules lie: it has loaded them.
        about: digest of what its runs depend on.
    """
    arguments = ["gyre_sdk.trainer.agents.host", "--folder", str(config.output.dir)]
    names = {name.partition(":")[0].partition(".")[0] for name in (config.agent.function, config.tasks.loader or "")}
    modules = [path for name in names - {""} for path in (base / f"{name}.py", *(base / name).rglob("*.py"))]
    return ChildSpec(
        "agents",
        lambda port: [*arguments, "--port", str(port)],
        READY,
        config.output.dir / "logs" / "agents.log",
        linger=linger,
        about=f"{about} {_state_of(*modules)}",
    )


def worker_spec(
    config: TrainerConfig,
    saved: Path,
    core: tuple[str, int],
    key_file: Path,
    cell: str,
    linger: Linger,
    waiting: Callable[[], set[str]],
) -> ChildSpec:
    """Return how a satellite's training worker is started.

    Args:
        saved: the settings, as `save_config` wrote them.
        core: where the core listens.
        waiting: the cells whose workers have dialled in: one that has holds no device any more for an earlier core.
    """
    host, port = core
    arguments = ["gyre_sdk.trainer.sharing.worker", "--config", str(saved), "--core", f"{host}:{port}"]
    arguments += ["--key-file", str(key_file), "--cell", cell]
    log = config.output.dir / "logs" / f"{cell}-worker.log"
    settings = hashlib.blake2b(saved.read_bytes() + key_file.read_bytes(), digest_size=16).hexdigest()
    return ChildSpec(
        f"{cell}-worker",
        lambda port: arguments,
        "gyre-worker ready on",
        log,
        linger=linger,
        about=f"{_state_of(*config.policy.model.iterdir())} {settings}",
        fit=lambda url: cell in waiting(),
    )


def _state_of(*paths: Path) -> str:
    """Return what changes when files do."""
    found = sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file())
    return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()


def _tells_its_version(url: str) -> bool:
    try:
        with Replica(url, 0) as replica:
            replica.version()
    except (httpx.HTTPError, Unready, PublishError):
        return False
    return True


def _nothing(url: str) -> None:
    return None
