"""Errors as answers, in the format of the protocol that is spoken at the request's path."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import web

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.server.protocols import speaking

_RETRY_AFTER = "5"
_UNREAD = (408, 413)
"""Statuses that leave a body unread: the connection cannot be used again."""
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 417: "expectation_failed"}


_INSTEAD = {
    "/v1/responses/compact": "ask the model for a summary with /v1/responses, and start the next request from it",
    "/v1/conversations": "conversations are not kept here; use previous_response_id, or send the whole input",
    "/v1/files": "the model reads text only; put what a file says into a message",
    "/v1/images": "the model writes text only",
    "/v1/embeddings": "the model writes text only",
    "/v1/batches": "send the requests one by one; as many at a time as you like",
}
"""What to do in place of asking for paths that other services have, by what they begin with."""


def refusal(path: str, headers: Iterable[str], error: ProtocolError) -> web.Response:
    """Return the answer that tells of an error.

    Args:
        path: of the request.
        headers: names of the request's headers.
        error: what to tell.
    """
    given = {"Content-Type": "application/json", "x-should-retry": "true" if error.retryable else "false"}
    if error.status == 503:
        given["Retry-After"] = _RETRY_AFTER
    if path.startswith("/v1/"):
        dialect = speaking(path, {name.lower(): "" for name in headers})
        response = web.Response(status=dialect.status(error), body=dialect.error(error), headers=given)
    else:
        body = msgspec.json.encode({"error": {"message": str(error), "code": error.code, "param": error.param}})
        response = web.Response(status=error.status, body=body, headers=given)
    if error.status in _UNREAD:
        response.force_close()
    return response


def of_status(what: str, status: int, reason: str) -> ProtocolError:
    """Return the error of a request that no handler took.

    Args:
        what: method and path.
        status: HTTP status.
        reason: in words.
    """
    path = what.partition(" ")[2]
    instead = next((text for known, text in _INSTEAD.items() if path == known or path.startswith(f"{known}/")), "")
    if instead and status in (404, 405):
        return ProtocolError(f"{what} is not offered: {instead}", status=status, code=_CODES[status])
    return ProtocolError(f"{what}: {reason.lower()}", status=status, code=_CODES.get(status, "http_error"))
