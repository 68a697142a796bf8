"""Defects of a handler: an error of one request, and never one answer within another."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from gyre_sdk.harness.proxy.server import app as served
from gyre_sdk.harness.proxy.server.connections import Runner
from gyre_sdk.harness.proxy.server.metrics import Metrics


async def broken(request: web.Request) -> web.StreamResponse:
    """Fail, at once or in the middle of an answer."""
    if request.query_string == "midway":
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
    raise RuntimeError("a defect")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?midway"])
def test_a_handler_that_fails(path: str) -> None:
    async def asked() -> bytes:
        app = web.Application(middlewares=[served._errors])
        app[served._METRICS] = Metrics()
        app.add_routes([web.get("/v1/messages", broken)])
        runner = Runner(app, 30.0, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nanthropic-version: 1\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
        await runner.cleanup()
        return answer

    answer = asyncio.run(asked())
    assert answer.count(b"HTTP/1.1") == 1
    if path.endswith("midway"):
        assert b"half" in answer and not answer.endswith(b"0\r\n\r\n"), "it does not look whole"
    else:
        assert answer.startswith(b"HTTP/1.1 500") and b'"api_error"' in answer
