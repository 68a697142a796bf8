"""Hands an HTTP request on and its answer back, both as they come: nothing is collected, decoded or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web
from yarl import URL

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

Headers = list[tuple[str, str]]
_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "expect")
)
"""Headers of one connection, not of the request (https://www.rfc-editor.org/rfc/rfc9110#section-7.6.1)."""
_OWN = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that the client library would add."""


def open_client(connect_timeout: float = 10.0) -> aiohttp.ClientSession:
    """Return connections that are kept, follow nothing, decode nothing and read no environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=_OWN,
    )


async def forward(
    request: web.BaseRequest,
    client: aiohttp.ClientSession,
    urls: Iterable[URL],
    headers: Headers,
    failed: Callable[[Exception], web.Response],
) -> web.StreamResponse:
    """Ask what the request asks and give the answer.

    Args:
        urls: the same thing at several addresses: the first one that takes a connection is asked.
        headers: to send, see `passed_on`.
        failed: gives the answer when nobody could be asked; once an answer has begun, its failure is the connection's.
    """
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    problem: Exception = ConnectionError("there is no address")
    for url in urls:
        response: web.StreamResponse | None = None
        try:
            async with client.request(
                request.method,
                url,
                headers=headers,
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                await _hand_on(request, answer, response)
                return response
        except aiohttp.ClientConnectorError as error:
            problem = error  # nothing was sent, so nothing of the body is used up
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if response is None:
                return failed(error)
            if request.transport is not None:
                request.transport.abort()  # a cut answer must not look like a whole one
            return response
    return failed(problem)


async def _hand_on(request: web.BaseRequest, answer: aiohttp.ClientResponse, response: web.StreamResponse) -> None:
    for name, value in passed_on(answer.headers):
        response.headers.add(name, value)
    await response.prepare(request)
    async for part in answer.content.iter_any():
        await response.write(part)
    await response.write_eof()


def passed_on(headers: CIMultiDictProxy[str], without: frozenset[str] = frozenset()) -> Headers:
    """Return the headers that go on: not those of the connection, nor those `without` (lower case)."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    left_out = _HOP | without | named
    return [(name, value) for name, value in headers.items() if name.lower() not in left_out]
