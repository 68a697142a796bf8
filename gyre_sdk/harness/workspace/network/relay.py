"""The recording proxy as seen from inside a workspace: a listener that knows whose it is and adds the key itself.

No key is inside, so none can be read, lost or passed on; who calls is told by where the call arrives. Only what agents ask
goes through: the control paths of the recording service are not reachable from inside with any key.
"""

from __future__ import annotations

import asyncio
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.workspace.network.connections import Connections
from gyre_sdk.harness.workspace.network.forwarding import forward, open_client, passed_on
from gyre_sdk.harness.workspace.network.refusals import refusal
from gyre_sdk.harness.workspace.network.serving import Service

_CREDENTIALS = frozenset(("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization", "host"))


class Relay(Service):
    """Hands the requests of one workspace to the recording proxy, with one lane's key.

    Args:
        base_url: of the lane, as its access says: `http://host:port/v1`.
        api_key: of the lane.

    Raises:
        WorkspaceError: `base_url` is not the address of a recording proxy.
    """

    def __init__(self, base_url: str, api_key: str) -> None:
        url = URL(base_url)
        path = url.path.rstrip("/")
        if url.scheme not in ("http", "https") or not url.host or path.rpartition("/")[2] != "v1" or url.query_string:
            raise WorkspaceError(f"base URL {base_url!r} is not a lane's; give the base_url of its access, .../v1")
        self.access = (base_url, api_key)
        self._root = f"{url.origin()}{path.removesuffix('/v1')}"
        self._key = api_key
        self._client: aiohttp.ClientSession | None = None
        self._server: Connections | None = None

    async def start(self) -> None:
        """See `Service`."""
        self._client = open_client()
        self._server = Connections(self._answer, _broken)

    def connection(self) -> asyncio.Protocol:
        """See `Service`."""
        assert self._server is not None
        return self._server()

    @property
    def connections(self) -> int:
        """See `Service`."""
        return len(self._server.connections) if self._server is not None else 0

    async def stop(self) -> None:
        """See `Service`."""
        if self._server is not None:
            await self._server.shutdown(0.1)
        if self._client is not None:
            await self._client.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = request.raw_path
        if not passes(request.method, asked):
            message = f"{request.method} {asked[:200]}: not found here; agents may ask /v1/..., HEAD / and /health"
            return refusal(asked, request.headers, 404, "not_found", message)
        headers = passed_on(request.headers, _CREDENTIALS)
        headers += [("Authorization", f"Bearer {self._key}"), ("x-api-key", self._key)]
        assert self._client is not None

        def failed(error: Exception) -> web.Response:
            message = f"the recording proxy cannot be reached ({type(error).__name__}); is it still running?"
            return refusal(asked, request.headers, 503, "proxy_unreachable", message, retryable=True)

        return await forward(request, self._client, [URL(self._root + asked, encoded=True)], headers, failed)


def _broken(status: int, reason: str) -> web.Response:
    """Answer in the format that most agents know: no path could be read."""
    code = "bad_http" if status < 500 else "internal_error"
    return refusal("/v1/", {}, status, code, reason, retryable=status >= 500)


def passes(method: str, raw_path: str) -> bool:
    """Tell whether a request may go to the recording proxy: an agent's, written in the plain way.

    A path that some server may read as another one (`/v1/../gyre/v1`, `/v1//..`, `/v1/%2e%2e`) does not pass.
    """
    path = unquote(raw_path.partition("?")[0].partition("#")[0])
    if path == "/":
        return method == "HEAD"
    if path == "/health":
        return method in ("GET", "HEAD")
    parts = path.split("/")
    odd = "\\" in path or any(part in (".", "..") for part in parts) or "" in parts[1:-1]
    return path.startswith("/v1/") and not odd
