"""Connections of clients whose lane's working time is limited: a call beyond it is refused as the service would.

The SDKs of providers come with httpx or with its successor; a transport is made from whichever the SDK's client is of.
"""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any

from gyre_sdk.errors import LimitExceeded, SettingsError
from gyre_sdk.harness.agent.meter import Meter
from gyre_sdk.harness.limits import LIMIT_CODE

_LIBRARIES = ("httpx", "httpx2")


def gated(client: type[Any], meter: Meter, lane: str) -> Any:
    """Return an SDK's HTTP client that asks a meter before each call.

    Args:
        client: the SDK's class, `DefaultHttpxClient` or `DefaultAsyncHttpxClient`.

    Raises:
        SettingsError: it is of a library that is not known.
    """
    library = _library(client)

    class Gate(library.HTTPTransport):  # type: ignore[name-defined,misc]
        def handle_request(self, request: Any) -> Any:
            refused = _refused(library, meter, lane, request)
            return super().handle_request(request) if refused is None else refused

    class AsyncGate(library.AsyncHTTPTransport):  # type: ignore[name-defined,misc]
        async def handle_async_request(self, request: Any) -> Any:
            refused = await asyncio.to_thread(_refused, library, meter, lane, request)
            return await super().handle_async_request(request) if refused is None else refused

    return client(transport=AsyncGate() if issubclass(client, library.AsyncClient) else Gate())


def _library(client: type[Any]) -> ModuleType:
    for base in client.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _LIBRARIES:
            return sys.modules[root]
    raise SettingsError(
        f"{client.__module__}.{client.__qualname__} is of neither {' nor '.join(_LIBRARIES)}: the limits of its lane"
        " cannot be kept; install a version of the SDK that gyre names in its dependencies"
    )


def _refused(library: ModuleType, meter: Meter, lane: str, request: Any) -> Any:
    """Return the answer to a call beyond a budget, in a form that the SDKs of OpenAI and Anthropic read."""
    try:
        meter.check(lane)
    except LimitExceeded as error:
        said = {"type": "permission_error", "message": str(error), "code": LIMIT_CODE, "param": None}
        headers = {"x-should-retry": "false"}
        return library.Response(403, json={"type": "error", "error": said}, headers=headers, request=request)
    return None
