"""Connections to replicas: an answer comes as it is sent, connections are kept where that is safe, breaks are told."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gyre_sdk.harness.proxy.wire import Wire

Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b"data: {}\n\ndata: [DONE]\n\n"


def chunks(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])


class Engine:
    """An HTTP server of bytes: `serve` gets each request (head and body) and writes the answer."""

    def __init__(self, serve: Serve) -> None:
        self.requests: list[bytes] = []
        self.connections = self.open = 0
        self._serve = serve
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                request = head + await reader.readexactly(size)
                self.requests.append(request)
                await self._serve(request, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def engine(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[Engine]:
    made = Engine(serve)
    server = await asyncio.start_server(made.connected, "127.0.0.1", 0, ssl=context)
    scheme = "http" if context is None else "https"
    made.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()


def always(answer: bytes) -> Serve:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return serve


def test_an_answer_comes_whole_however_the_network_cuts_it() -> None:
    answer = CHUNKED + chunks(BODY, 5)

    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        cut = len(made.requests)
        for piece in (answer[:cut], answer[cut:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    async def run() -> None:
        nonlocal made
        async with engine(serve) as made:
            wire = Wire({})
            for _ in answer:
                reply = await wire.post(made.url, "/x", b"{}", "r")
                assert (reply.status, await reply.read()) == (200, BODY)
                reply.close()
            assert made.connections == 1, "a connection whose answer was read whole is used again"
            wire.close()

    made: Engine
    asyncio.run(run())


def test_requests_carry_their_path_id_headers_and_body() -> None:
    async def run() -> list[bytes]:
        async with engine(always(OK + b"Content-Length: 2\r\n\r\nhi")) as made:
            wire = Wire({"Authorization": "Bearer secret"})
            reply = await wire.post(f"{made.url}/under", "/inference/v1/generate", b'{"a": 1}', "call-7")
            assert await reply.read() == b"hi"
            reply.close()
            large = b"x" * 3_000_000
            reply = await wire.post(made.url.replace("//", "//user:p%40ss@"), "/x", large, "r")
            assert await reply.read() == b"hi"
            reply.close()
            wire.close()
            return made.requests

    first, second = asyncio.run(run())
    assert first.startswith(b"POST /under/inference/v1/generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"X-Request-Id: call-7\r\n" in first and b"Authorization: Bearer secret\r\n" in first
    assert first.endswith(b'\r\n\r\n{"a": 1}')
    assert b"Authorization: Basic dXNlcjpwQHNz\r\n" in second and second.endswith(b"x" * 3_000_000)


def test_connections_of_replicas_that_are_gone_are_closed() -> None:
    """Those that are idle at once, one that is in use when its answer has been read."""
    held = asyncio.Event()

    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        if b"slow" in request:
            await held.wait()
        writer.write(OK + b"Content-Length: 2\r\n\r\nhi")

    async def run() -> None:
        async with engine(serve) as kept, engine(serve) as gone:
            wire, slow = Wire({}), []
            for made in (kept, gone):
                slow.append(asyncio.create_task(wire.post(made.url, "/x", b"slow", "r")))
                reply = await wire.post(made.url, "/x", b"{}", "r")
                await reply.read()
                reply.close()
            assert wire.connected(kept.url) and wire.connected(gone.url)
            wire.keep({kept.url})
            assert wire.connected(kept.url) and not wire.connected(gone.url)
            held.set()
            for reply in await asyncio.gather(*slow):
                assert await reply.read() == b"hi"
                reply.close()
            async with asyncio.timeout(60):
                while gone.open:  # noqa: ASYNC110  nothing tells of it
                    await asyncio.sleep(0.01)
            assert kept.open == 2
            wire.close()

    asyncio.run(run())


def test_what_came_before_a_break_is_given_before_the_break_is_told() -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await writer.drain()
        writer.transport.abort() if len(request) % 2 else writer.close()

    async def run(body: bytes) -> None:
        async with engine(serve) as made:
            reply = await Wire({}).post(made.url, "/x", body, "r")
            said = b""
            with pytest.raises(OSError):
                while piece := await reply.read_any():
                    said += piece
            assert said in (b"hello", b""), "a reset may take unread bytes along"
            reply.close()

    asyncio.run(run(b"{}"))
    asyncio.run(run(b"{ }"))


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
    ],
)
def test_a_connection_that_the_replica_closes_is_not_used_again(answer: bytes, body: bytes) -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        async with engine(serve) as made:
            wire = Wire({})
            for count in (1, 2):
                reply = await wire.post(made.url, "/x", b"{}", "r")
                assert await reply.read() == body
                reply.close()
                assert made.connections == count

    asyncio.run(run())


def test_what_is_no_http_and_what_refuses_a_connection_are_errors() -> None:
    async def run() -> None:
        async with engine(always(b"SSH-2.0-OpenSSH\r\n")) as made:
            with pytest.raises(OSError, match="not HTTP"):
                await Wire({}).post(made.url, "/x", b"{}", "r")
        with pytest.raises(OSError):
            await Wire({}).post(made.url, "/x", b"{}", "r")

    asyncio.run(run())


def test_an_answer_left_early_ends_its_connection_unless_it_is_nearly_over() -> None:
    async def run() -> None:
        rest = asyncio.Event()

        async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED + b"5\r\nhello\r\n")
            await writer.drain()
            await rest.wait()
            writer.write(b"4\r\ndone\r\n0\r\n\r\n")

        async with engine(serve) as made:
            wire = Wire({})
            reply = await wire.post(made.url, "/x", b"{}", "r")
            assert await reply.read_any() == b"hello"
            reply.close(nearly_over=True)
            other = await wire.post(made.url, "/x", b"{}", "r")
            assert made.connections == 2, "the first one is not free yet"
            rest.set()
            assert await other.read() == b"hellodone"
            other.close()
            rest.clear()
            for _ in range(3):
                reply = await wire.post(made.url, "/x", b"{}", "r")
                await reply.read_any()
                reply.close()
            assert made.connections == 3, "two kept ones serve two, both are given up early; the third needs a new one"
            wire.close()

    asyncio.run(run())


def test_a_reader_that_lags_stops_the_replica() -> None:
    sent = 0

    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"Content-Length: 64000000\r\n\r\n")
        for _ in range(64):
            writer.write(b"x" * 1_000_000)
            sent += 1
            await writer.drain()

    async def run() -> None:
        async with engine(serve) as made:
            reply = await Wire({}).post(made.url, "/x", b"{}", "r")
            before = -1
            while sent != before:  # until the replica cannot write any more
                before = sent
                await asyncio.sleep(0.1)
            assert sent < 32
            assert len(await reply.read()) == 64_000_000

    asyncio.run(run())


def test_tls_is_spoken_and_certificates_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout {key} -out {cert}"
        " -addext subjectAltName=IP:127.0.0.1".split(),
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def run() -> None:
        async with engine(always(OK + b"Content-Length: 2\r\n\r\nhi"), context) as made:
            with pytest.raises(ssl.SSLCertVerificationError):
                await Wire({}).post(made.url, "/x", b"{}", "r")
            monkeypatch.setenv("SSL_CERT_FILE", str(cert))
            reply = await Wire({}).post(made.url, "/x", b"{}", "r")
            assert await reply.read() == b"hi"
            reply.close()

    asyncio.run(run())


def test_a_reader_in_no_hurry_gets_an_answer_in_one_piece_and_a_slow_one_in_several() -> None:
    async def run() -> None:
        go_on = asyncio.Event()

        async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED + b"5\r\nhello\r\n")
            await writer.drain()
            if request.endswith(b"slow"):
                await go_on.wait()
            for _ in range(3):
                await asyncio.sleep(0)
                writer.write(b"4\r\nmore\r\n")
            writer.write(b"0\r\n\r\n")

        async with engine(serve) as made:
            wire = Wire({})
            reply = await wire.post(made.url, "/x", b"fast", "r")
            assert await reply.read_any(60.0) == b"hellomoremoremore", "the end does not wait"
            reply.close()
            reply = await wire.post(made.url, "/x", b"slow", "r")
            assert await reply.read_any(0.05) == b"hello"
            go_on.set()
            assert await reply.read_any(60.0) == b"moremoremore"
            assert await reply.read_any(60.0) == b""
            assert made.connections == 1
            wire.close()

    asyncio.run(run())


def test_a_break_does_not_wait_for_more() -> None:
    async def serve(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    async def run() -> None:
        async with engine(serve) as made:
            reply = await Wire({}).post(made.url, "/x", b"{}", "r")
            assert await reply.read_any(60.0) == b"hello"
            with pytest.raises(OSError, match="closed"):
                await reply.read_any(60.0)

    asyncio.run(run())
