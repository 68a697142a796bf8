"""The embedded engine's routes for weights: vLLM's, with a fence and fingerprints as gyre's plugin gives vLLM."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre_sdk.errors import ProtocolError, PublishError
from gyre_sdk.trainer.engines.batching import Batcher
from gyre_sdk.trainer.engines.fence import Fence
from gyre_sdk.trainer.engines.weights import WeightSession
from gyre_sdk.trainer.weights import file_digest

__all__ = ["WeightUpdates", "read_json"]

log = logging.getLogger(__name__)


class WeightUpdates:
    """Takes weight updates and tells what is served."""

    def __init__(self, batcher: Batcher, session: Callable[[], WeightSession]) -> None:
        """`session` opens a weight update."""
        self._batcher = batcher
        self._open_session = session
        self._session: WeightSession | None = None
        self._fence = Fence(int(batcher.version) if batcher.version.isdigit() else None)
        self._lock = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.post("/init_weight_transfer_engine", self._claim),
            web.post("/shutdown_weight_transfer_engine", self._release),
            web.post("/start_weight_update", self._start),
            web.post("/update_weights", self._update),
            web.post("/finish_weight_update", self._finish),
            web.post("/update_weight_version", self._rename),
            web.post("/collective_rpc", self._call),
            web.get("/weight_info", self._info),
        ]

    async def _claim(self, http: web.Request) -> web.Response:
        info = (await read_json(http)).get("init_info")
        owner = info.get("owner") if isinstance(info, dict) else None
        self._fence.claim(owner if isinstance(owner, str) else "")
        return web.json_response({"message": "Weight transfer initialized"})

    async def _release(self, _: web.Request) -> web.Response:
        self._fence.release()
        return web.json_response({"message": "Weight transfer shut down"})

    async def _start(self, _: web.Request) -> web.Response:
        async with self._lock:
            if self._session is not None:
                raise PublishError(
                    "start_weight_update called while a weight update is already active. Call "
                    "finish_weight_update first."
                )
            self._session = self._open_session()
        return web.json_response({"message": "Weight update started"})

    async def _update(self, http: web.Request) -> web.Response:
        info = (await read_json(http)).get("update_info")
        path = info.get("path") if isinstance(info, dict) else None
        if not isinstance(info, dict) or not isinstance(path, str) or not path:
            raise ProtocolError(
                'update_info must be {"path": "FILE.safetensors"}', code="Bad Request", param="body.update_info"
            )
        async with self._lock:
            session, self._session = (
                self._need_session("update_weights"),
                None,
            )  # a bad file ends the update, as in vLLM
            version = info.get("version")
            self._fence.check(str(info.get("owner") or ""), version if isinstance(version, int) else None)
            await asyncio.to_thread(_read, session, Path(path), str(info.get("digest") or ""))
            self._session = session
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, http: web.Request) -> web.Response:
        version = _label(await read_json(http), "weight_version")
        async with self._lock:
            session, self._session = self._need_session("finish_weight_update"), None
            await asyncio.wrap_future(self._batcher.switch(version, session.finish()))
            self._fence.passed(int(version) if version.isdigit() else None)
        log.info("serving weights %s", version)
        return web.json_response({"message": "Weight update finished"})

    def _need_session(self, route: str) -> WeightSession:
        if self._session is None:
            raise PublishError(f"start_weight_update must be called before {route}.")
        return self._session

    async def _rename(self, http: web.Request) -> web.Response:
        version = _label(await read_json(http), "new_version")
        async with self._lock:
            await asyncio.wrap_future(self._batcher.switch(version, None))
        return web.json_response({"success": True, "new_version": version})

    async def _call(self, http: web.Request) -> web.Response:
        method = (await read_json(http)).get("method")
        if method != "gyre_fingerprints":
            raise ProtocolError(f"method must be 'gyre_fingerprints', got {method!r}", code="Bad Request")
        return web.json_response({"results": [await asyncio.wrap_future(self._batcher.fingerprints())]})

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._batcher.version})


def _read(session: WeightSession, path: Path, digest: str) -> None:
    session.add(path)
    if digest and (found := file_digest(path)) != digest:
        raise PublishError(f"{path} has digest {found}, announced was {digest}: it was written again since")


async def read_json(http: web.Request) -> dict[str, Any]:
    """Return a request's body; ProtocolError when it is not a JSON object."""
    try:
        body = json.loads(await http.read())
    except ValueError as err:
        raise ProtocolError(f"JSON decode error: {err}", code="Bad Request") from err
    if not isinstance(body, dict):
        raise ProtocolError("Request body must be a JSON object", code="Bad Request")
    return body


def _label(body: dict[str, Any], name: str) -> str:
    """Return a version label. vLLM lets `weight_version` be absent; here every published set needs one."""
    label = body.get(name)
    if not isinstance(label, str) or not label:
        raise ProtocolError(
            f"{name} must be a non-empty string, got {label!r}", code="Bad Request", param=f"body.{name}"
        )
    return label
