"""What a listener itself answers, in the form of the protocol that is spoken at the request's path: agents understand no other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

_KINDS = {404: "not_found_error"}
_BUSY = 503


def refusal(
    path: str, headers: Mapping[str, str], status: int, code: str, message: str, *, retryable: bool = False
) -> web.Response:
    """Return an error answer.

    Args:
        path: of the request.
        headers: of the request.
        status: HTTP status; 503 becomes 529 in the messages protocol.
        code: machine-readable reason.
        retryable: whether the same request can succeed later: the official SDKs obey it.
    """
    given = {"x-should-retry": "true" if retryable else "false"}
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "")
    if status == _BUSY:
        given["Retry-After"] = "5"
    if _speaks_messages(path, headers):
        kind = "overloaded_error" if status == _BUSY else kind or "api_error"
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}
        status = 529 if status == _BUSY else status
    else:
        body = {"error": {"message": message, "type": kind or "server_error", "param": None, "code": code}}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=given)


def _speaks_messages(path: str, headers: Mapping[str, str]) -> bool:
    if path.startswith("/v1/messages"):
        return True
    others = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    return "anthropic-version" in headers and not path.startswith(others)
