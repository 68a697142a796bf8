"""A container beside a workspace's that accepts connections there and carries them here, over the engine's API alone.

It needs no right but the use of the engine, which may be on another machine. It runs busybox only: `nc` accepts, every
connection gets two named pipes, and an exec of this process carries their bytes. That costs an exec per connection
(about 60 ms), not per request. Its input is this process: when that ends, so does the container.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound
from docker.types import LogConfig

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace import owner, reaper
from gyre_sdk.harness.workspace.channel import SocketChannel
from gyre_sdk.harness.workspace.images import DEFAULT_IMAGE, image_missing
from gyre_sdk.harness.workspace.network.serving import CONNECTIONS, Serving

_FOLDER = "/relay"
_COPY = "dd bs=65536"
"""Hands on every piece as it comes; busybox `cat` tries sendfile, which may hold the last piece back until the end."""
_BACKLOG = "l" * 64  # busybox nc: one letter more is one waiting connection more
_START_S = 30.0
_DRAIN_S = 10.0
"""Seconds that the last bytes of an answer may take to be read inside."""
_PIECE = 65536

_MAIN = f"""
cd {_FOLDER}
cat >take <<'END'
n=$1.$$
rm -f $n.up $n.down; mkfifo $n.up $n.down && echo $n >events
{{ {_COPY} <$n.down; kill -9 $$; }} 2>/dev/null &
exec {_COPY} >$n.up 2>/dev/null
END
mkfifo events; exec 3<>events
{_COPY} <&3 2>/dev/null &
while read -r port; do
  netstat -ltn | grep -q ":$port " && {{ echo taken.$port >events; continue; }}
  while :; do nc -{_BACKLOG} -p $port -e /bin/sh {_FOLDER}/take $port; sleep 0.2; done 2>/dev/null &
  until netstat -ltn | grep -q ":$port "; do usleep 20000; done
  echo up.$port >events
done
"""
"""Reads ports to listen on; writes `up.PORT` or `taken.PORT`, then `PORT.NUMBER` for every connection."""
_CARRY = f"""
cd {_FOLDER}; exec 3<&0
read -r go
{_COPY} <&3 >$1.down 2>/dev/null & w=$!
{_COPY} <$1.up 2>/dev/null
kill $w 2>/dev/null; rm -f $1.up $1.down
"""
"""Carries one connection once it reads a line: bytes that come with the engine's answer to the exec are lost in docker-py."""


class Helper:
    """Accepts connections in a network that this process cannot enter.

    Args:
        settings: of the engine: which network it is in.
        networking: addresses on a network of its own, as docker-py makes them.
        run: id of the run, for the labels.
        ttl_s: seconds that it may live.

    Raises:
        ImageMissing: the base sandbox, which it runs, is not on the engine.
        WorkspaceError: it does not start.
    """

    def __init__(
        self,
        client: docker.DockerClient,
        settings: Mapping[str, Any],
        *,
        run: str,
        ttl_s: float,
        networking: Any = None,
    ) -> None:
        self._client = client
        self._serving: dict[str, Serving] = {}
        self._ready: dict[str, queue.SimpleQueue[str]] = {}
        self._streams: set[Stream] = set()
        self._carriers = 0
        self._waiting: deque[tuple[str, Serving]] = deque()
        self._line = b""
        self._lock = threading.Lock()
        self._closed = False
        self.id = ""
        try:
            self.id = start_helper(
                client,
                ["timeout", str(int(ttl_s) + 1), "sh", "-c", _MAIN],
                {**settings, "tmpfs": {_FOLDER: "rw,mode=1777,size=4m"}, "pids_limit": 1024, "mem_limit": "128m"},
                run=run,
                deadline=time.time() + ttl_s,
                networking=networking,
                close=self.close,
                key=id(self),
            )
            attached = client.api.attach_socket(self.id, params={"stdin": 1, "stdout": 1, "stream": 1})
            self._input = Stream(attached)
            self._input.open(self._heard)
            client.api.start(self.id)
        except (DockerException, OSError) as error:
            self.close()
            raise WorkspaceError(f"the relay container does not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def serve(self, port: int, serving: Serving) -> None:
        """Hand every connection to `port` to a service.

        Raises:
            OSError: the port is taken inside (EADDRINUSE), or the container has ended.
        """
        name = str(port)
        self._ready[name] = queue.SimpleQueue()
        self._input.send(f"{name}\n".encode())
        try:
            said = self._ready[name].get(timeout=_START_S)
        except queue.Empty:
            said = "silent"
        if said == "taken":
            raise OSError(errno.EADDRINUSE, f"port {port} is taken inside")
        if said != "up":
            raise OSError(errno.ECONNRESET, f"the relay container does not listen on port {port}: {said}")
        self._serving[name] = serving

    def end_with(self, container: str) -> None:
        """Close when a container ends, which nothing but the engine can tell."""

        def wait() -> None:
            with contextlib.suppress(Exception):  # boundary: whatever ends the wait, there is nothing left to relay
                self._client.api.wait(container, timeout=None)
            self.close()

        threading.Thread(target=wait, name="gyre-relay-end", daemon=True).start()

    def close(self) -> None:
        """Remove the container and end what it carries. Idempotent."""
        with self._lock:
            self._closed = True
            streams, self._streams = self._streams, set()
        reaper.unwatch(id(self))
        for serving in list(self._serving.values()):
            serving.close()
        for stream in streams:
            stream.close()
        if self.id:
            reaper.remove(self._client, self.id)

    def _heard(self, kind: int, data: bytes) -> None:
        if kind == 0:
            for waiting in list(self._ready.values()):
                waiting.put("it has ended")
            self.close()
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            said, _, rest = line.decode(errors="replace").partition(".")
            if said in ("up", "taken"):
                self._ready[rest].put(said)
            elif said in self._serving:
                self._take(f"{said}.{rest}", self._serving[said])

    def _take(self, name: str, serving: Serving) -> None:
        """Carry a connection, now or once there are fewer: what runs inside must not use up our threads."""
        with self._lock:
            if self._carriers >= CONNECTIONS:
                self._waiting.append((name, serving))
                return
            self._carriers += 1
        threading.Thread(target=self._carry_on, args=(name, serving), name="gyre-relay", daemon=True).start()

    def _carry_on(self, name: str, serving: Serving) -> None:
        while True:
            self._carry(name, serving)
            with self._lock:
                if not self._waiting or self._closed:
                    self._carriers -= 1
                    return
                name, serving = self._waiting.popleft()

    def _carry(self, name: str, serving: Serving) -> None:
        """Carry one connection's bytes both ways until both sides have ended."""
        try:
            made = self._client.api.exec_create(self.id, ["sh", "-c", _CARRY, "carry", name], stdin=True)["Id"]
            stream = Stream(self._client.api.exec_start(made, socket=True))
        except (DockerException, OSError):
            return  # the container is going, and the connection with it
        with self._lock:
            if self._closed:
                stream.close()
                return
            self._streams.add(stream)
        ours, theirs = socket.socketpair()
        ended = threading.Event()

        def from_inside(kind: int, data: bytes) -> None:
            with contextlib.suppress(OSError):
                if kind == 1:
                    ours.sendall(data)
                elif kind == 0:
                    ended.set()
                    ours.shutdown(socket.SHUT_RDWR)

        try:
            serving.hand(theirs)
            stream.open(from_inside)
            stream.send(b"go\n")
            while data := ours.recv(_PIECE):
                stream.send(data)
            stream.end_input()
            ended.wait(_DRAIN_S)
        except OSError:
            pass
        finally:
            with self._lock:
                self._streams.discard(stream)
            stream.close()
            ours.close()


def start_helper(
    client: docker.DockerClient,
    command: list[str],
    settings: Mapping[str, Any],
    *,
    run: str,
    deadline: float,
    close: Callable[[], object],
    key: int,
    user: str = "65534:65534",
    networking: Any = None,
) -> str:
    """Create a small hardened container of the base sandbox, to be started, and return its id.

    Raises:
        ImageMissing: the base sandbox is not on the engine.
        DockerException: the engine refused.
    """
    name = owner.container_name()
    config = {
        "init": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "read_only": True,
        "auto_remove": True,
        "log_config": LogConfig(type="none"),
        "pids_limit": 64,
        "mem_limit": "32m",
        **settings,
    }
    reaper.watch(key, close)
    try:
        made: str = client.api.create_container(
            DEFAULT_IMAGE,
            name=name,
            entrypoint=command[:1],
            command=command[1:],
            user=user,
            stdin_open=True,
            host_config=client.api.create_host_config(**config),
            networking_config=networking,
            labels=owner.labels(owner.me(), run=run, deadline=deadline, name=name),
        )["Id"]
    except ImageNotFound as error:
        raise image_missing(DEFAULT_IMAGE) from error
    return made


class Stream(SocketChannel):
    """An attached socket; it keeps the HTTP response that would close it when collected."""

    def __init__(self, found: Any) -> None:
        raw: socket.socket = getattr(found, "_sock", found)
        raw.settimeout(None)
        super().__init__(raw)
        self._response = found

    def end_input(self) -> None:
        """Tell the process that no more comes."""
        self._socket.shutdown(socket.SHUT_WR)
