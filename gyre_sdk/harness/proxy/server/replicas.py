"""The control API's part about replicas: announce, drain and remove them, and see what they carry."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.routing import Replica, ReplicaSpec
from gyre_sdk.harness.proxy.server.bodies import read_struct
from gyre_sdk.harness.proxy.server.fleet import Drained, Fleet

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY = 1 << 20
"""Largest body in bytes."""


class SetReplicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /gyre/v1/replicas`."""

    replicas: list[ReplicaSpec]


class DrainReplica(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /gyre/v1/replicas/drain`."""

    url: str
    seconds: float = 30.0
    """How long what runs there may go on; then it is moved."""


class ReplicaControl:
    """Handlers under `/gyre/v1/replicas`.

    Args:
        fleet: the replicas.
        guard: makes a handler ask for the service key.
    """

    def __init__(self, fleet: Fleet, guard: Callable[[Handler], Handler]) -> None:
        self._fleet = fleet
        self._guard = guard

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/gyre/v1/replicas", self._guard(self.list)),
            web.put("/gyre/v1/replicas", self._guard(self.set)),
            web.post("/gyre/v1/replicas", self._guard(self.put)),
            web.delete("/gyre/v1/replicas", self._guard(self.remove)),
            web.post("/gyre/v1/replicas/drain", self._guard(self.drain)),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """Tell each replica's state and load."""
        return _json({"replicas": describe(self._fleet)})

    async def set(self, request: web.Request) -> web.Response:
        """Replace the table of replicas."""
        given = await read_struct(request, SetReplicas, MAX_BODY)
        self._fleet.set([_checked(spec) for spec in given.replicas])
        return _json({"version": self._fleet.routes.version})

    async def put(self, request: web.Request) -> web.Response:
        """Add a replica, or tell its new version; one that was draining serves again."""
        spec = _checked(await read_struct(request, ReplicaSpec, MAX_BODY))
        self._fleet.put(spec)
        return _json({"version": self._fleet.routes.version})

    async def drain(self, request: web.Request) -> web.Response:
        """Take a replica out of service; answered when nothing of ours runs there any more."""
        given = await read_struct(request, DrainReplica, MAX_BODY)
        if not 0 <= given.seconds <= 86_400:
            raise ProtocolError(f"seconds is {given.seconds}; it must be between 0 and 86400", param="seconds")
        return _drained(given.url, await self._fleet.drain(given.url, given.seconds))

    async def remove(self, request: web.Request) -> web.Response:
        """Forget a replica; what runs there goes on elsewhere. Drain it first to let that end."""
        url = request.query.get("url", "")
        return _drained(url, await self._fleet.remove(url))


def describe(fleet: Fleet) -> list[dict[str, Any]]:
    """Return the replicas as the control API shows them: `calls` and `tokens` are attempts in flight and their load."""
    return [_shown(replica) for replica in fleet.routes.replicas]


def _shown(item: Replica) -> dict[str, Any]:
    shown = {"url": item.url, "version": item.version, "state": item.state, "calls": item.calls, "tokens": item.tokens}
    return shown if item.model is None else shown | {"model": item.model}


def _checked(spec: ReplicaSpec) -> ReplicaSpec:
    try:
        parts = urlsplit(spec.url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not spec.url.isprintable() or " " in spec.url:
        raise ProtocolError(f"url is {spec.url!r}; a replica has an http:// or https:// address", param="url")
    return spec


def _drained(url: str, drained: Drained | None) -> web.Response:
    if drained is None:
        raise ProtocolError(f"replica {url!r} is not in the table", status=404, code="no_such_replica", param="url")
    return _json({"finished": drained.finished, "moved": drained.moved})


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
