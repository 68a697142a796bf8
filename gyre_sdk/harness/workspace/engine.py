"""Find a Docker engine that answers, or start a private one."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException
from docker.transport import UnixHTTPAdapter

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import reaper
from gyre_sdk.harness.workspace.patience import PatientClient
from gyre_sdk.harness.workspace.sweeping import sweep

DEFAULT_URL = "unix:///var/run/docker.sock"
POOL_SIZE = 256
"""Connections that a client may hold: every supervisor keeps one."""
API_TIMEOUT = 120
"""Seconds of silence after which most requests to the engine are given up; see `patience`."""

_shared: dict[tuple[int, str], docker.DockerClient] = {}
_sharing = threading.Lock()

NO_ENGINE = (
    "no Docker engine answers at {url} ({why}); install one (apt-get install docker.io) and start it, set DOCKER_HOST,"
    " or use the local workspace (workspace='local'; --workspace local)"
)


def engine_url(url: str | None = None) -> str:
    """Return where the engine is: `url`, else $DOCKER_HOST, else the default socket."""
    return url or docker.utils.kwargs_from_env().get("base_url") or DEFAULT_URL


def connect(url: str | None = None) -> docker.DockerClient:
    """Return a client of the engine at `url`, else of $DOCKER_HOST, else of the default socket.

    Raises:
        WorkspaceError: it does not answer.
    """
    url = engine_url(url)
    try:
        client = PatientClient(base_url=url, max_pool_size=POOL_SIZE, timeout=API_TIMEOUT)
        if url.startswith("unix://"):
            client.api.mount("http+docker://", _OnePool(f"http+{url}", API_TIMEOUT, max_pool_size=POOL_SIZE))
            client.api.trust_env = False  # a socket has no proxy and no password: not looked for with every request
        client.ping()
    except DockerException as error:
        raise WorkspaceError(NO_ENGINE.format(url=url, why=_cause(error))) from None
    reaper.remember(url)
    return client


def _cause(error: BaseException) -> str:
    """Return in a few words what the system said, below what the client's layers made of it."""
    below: BaseException | None = error
    said = ""
    while below is not None:
        said = below.strerror or said if isinstance(below, OSError) else said
        below = below.__cause__ or below.__context__
    return said or str(error)[:200]


class _OnePool(UnixHTTPAdapter):  # type: ignore[misc]
    """Connections to the engine that all requests share: docker-py's own adapter makes new ones for every address."""

    def get_connection(self, url: str, proxies: object = None) -> object:
        return super().get_connection("http+docker://localhost", proxies)


def shared_client(url: str | None = None) -> docker.DockerClient:
    """Return this process's client of an engine, connected once; what dead processes left there is swept at that moment.

    Raises:
        WorkspaceError: no engine answers.
    """
    url = engine_url(url)
    key = (os.getpid(), url)
    with _sharing:
        if key not in _shared:
            client = connect(url)
            sweep(client)
            _shared[key] = client
        return _shared[key]


def answers(url: str | None = None) -> bool:
    """Tell whether an engine answers."""
    try:
        connect(url).close()
    except WorkspaceError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PrivateEngine:
    """A dockerd of our own."""

    url: str
    """What to set DOCKER_HOST to."""
    stop: Callable[[], None]
    """End it, and wait until it has ended. Idempotent."""


def can_start_private_engine() -> str | None:
    """Return None when `start_private_engine` can work here, else what is missing."""
    if os.geteuid() != 0:
        return "starting dockerd needs root"
    if _dockerd() is None:
        return "dockerd is not installed; apt-get install docker.io"
    return None


def start_private_engine(folder: str | Path, *, timeout: float = 60.0) -> PrivateEngine:
    """Start a dockerd that keeps everything below `folder`, without bridge or iptables, in a process group of its own.

    Raises:
        WorkspaceError: it cannot be started, or does not answer within `timeout` seconds.
    """
    missing = can_start_private_engine()
    if missing is not None:
        raise WorkspaceError(f"cannot start a Docker engine: {missing}")
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    url = f"unix://{folder}/docker.sock"
    if len(url) > 107:
        raise WorkspaceError(f"the socket path {url} is longer than a socket address may be; use a shorter folder")
    (folder / "docker.pid").unlink(missing_ok=True)
    log = (folder / "dockerd.log").open("ab")
    process = subprocess.Popen(
        [
            *(str(_dockerd()), "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
            *("--pidfile", str(folder / "docker.pid"), "-H", url),
            *("--bridge=none", "--iptables=false", "--ip-masq=false"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    log.close()

    def stop() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    deadline = time.monotonic() + timeout
    while not answers(url):
        if process.poll() is not None or time.monotonic() > deadline:
            stop()
            tail = (folder / "dockerd.log").read_text(errors="replace")[-600:]
            raise WorkspaceError(f"dockerd did not start (log {folder / 'dockerd.log'}): {tail}")
        time.sleep(0.05)
    return PrivateEngine(url, stop)


def _dockerd() -> str | None:
    return shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
