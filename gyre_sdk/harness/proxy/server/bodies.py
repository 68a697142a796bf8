"""Request bodies: read within bounds of size and time, decompressed within bounds of size."""

from __future__ import annotations

import asyncio
import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import brotli
import msgspec
from aiohttp import web

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.dialects.fields import refuse_huge

T = TypeVar("T")

_STEP = 1 << 20
_OFF_LOOP = 16 << 10
"""Compressed bodies larger than this many bytes are decompressed in a thread, so that streams go on."""
_FEED = 1 << 16
_MOST_CODINGS = 4
_MOST_MEMBERS = 1000


@dataclass(frozen=True, slots=True)
class BodyPatience:
    """How long a body may take, in seconds."""

    silence: float = 30.0
    """Without a byte."""
    whole: float = 300.0
    """From its first byte to its last."""


PATIENCE = web.AppKey("gyre_body_patience", BodyPatience)


async def read_body(request: web.Request, limit: int) -> bytes:
    """Return a request's body as the agent wrote it, decompressed.

    Raises:
        ProtocolError: 413 when it is larger than `limit` bytes, 408 when it comes too slowly, 415 for an unknown
            coding, 400 for a corrupt one.
    """
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    body = await _received(request, limit)
    header = ",".join(request.headers.getall("Content-Encoding", ()))
    codings = [name.strip().lower() for name in header.split(",") if name.strip()]
    if len(codings) > _MOST_CODINGS:
        raise _unsupported(f"content-encoding names {len(codings)} codings; {_MOST_CODINGS} are the most")
    for coding in reversed(codings):
        if len(body) > _OFF_LOOP:
            body = await asyncio.to_thread(_decoded, body, coding, limit)
        else:
            body = _decoded(body, coding, limit)
    return body


async def read_struct(request: web.Request, kind: type[T], limit: int) -> T:
    """Return a request's body as a struct; an empty body is an empty object.

    Raises:
        ProtocolError: as `read_body`; 400 when the body is something else.
    """
    body = await read_body(request, limit)
    try:
        value = msgspec.json.decode(body or b"{}")
        refuse_huge(value, (1 << 63) - 1)
        return msgspec.convert(value, kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"the body of {request.path} is wrong: {error}") from error


async def _received(request: web.Request, limit: int) -> bytes:
    content, patience = request.content, request.app.get(PATIENCE, BodyPatience())
    pieces, size = [], 0
    deadline = asyncio.get_running_loop().time() + patience.whole
    try:
        while not content.at_eof():
            if content.is_eof():
                piece = await content.readany()
            else:
                left = deadline - asyncio.get_running_loop().time()
                async with asyncio.timeout(min(patience.silence, left)):
                    piece = await content.readany()
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
    except TimeoutError:
        raise ProtocolError(
            f"the body stopped at byte {size}: send it within {patience.whole:g} s, with no pause of"
            f" {patience.silence:g} s",
            status=408,
            code="body_timeout",
            retryable=True,
        ) from None
    except web.RequestPayloadError as error:
        raise ProtocolError("the body's transfer encoding is broken", code="corrupt_body") from error
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _decoded(body: bytes, coding: str, limit: int) -> bytes:
    if coding == "identity":
        return body
    decode = _DECODERS.get(coding)
    if decode is None:
        known = ", ".join(["identity", *_DECODERS])
        raise _unsupported(f"content-encoding {coding!r} is not understood; use {known}")
    pieces, size = [], 0
    try:
        for piece in decode(body, limit):
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
    except ProtocolError:
        raise
    except Exception as error:  # boundary: each decompressor has errors of its own
        raise ProtocolError(f"the {coding} body is corrupt: {error}", code="corrupt_body") from error
    return b"".join(pieces)


def _inflated(window: int) -> Callable[[bytes, int], Iterator[bytes]]:
    """Return a decoder of gzip (window 31) or zlib (15)."""
    return lambda body, limit: _members(body, lambda: _Inflate(window))


def _zstd(body: bytes, limit: int) -> Iterator[bytes]:
    zstd = _zstd_module()
    window = {zstd.DecompressionParameter.window_log_max: min(max(limit, 1 << 23).bit_length(), 27)}
    return _members(body, lambda: zstd.ZstdDecompressor(options=window))


class _Inflate:
    """zlib with the interface of zstd's decompressor."""

    def __init__(self, window: int) -> None:
        self._engine = zlib.decompressobj(window)

    @property
    def eof(self) -> bool:
        return self._engine.eof

    @property
    def unused_data(self) -> bytes:
        return self._engine.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._engine.unconsumed_tail

    def decompress(self, data: bytes, most: int) -> bytes:
        return self._engine.decompress(self._engine.unconsumed_tail + data, most)


def _members(body: bytes, make: Callable[[], Any]) -> Iterator[bytes]:
    """Yield what a body holds; several compressed members may follow each other."""
    engine, members, view = make(), 1, memoryview(body)
    for start in range(0, len(view), _FEED):
        data = bytes(view[start : start + _FEED])
        while True:
            if engine.eof:
                if not data:
                    break
                engine, members = make(), members + 1
                if members > _MOST_MEMBERS:
                    raise ValueError(f"it has more than {_MOST_MEMBERS} members")
            piece = engine.decompress(data, _STEP)
            yield piece
            data = engine.unused_data if engine.eof else b""
            if not engine.eof and engine.needs_input and len(piece) < _STEP:
                break
    if not engine.eof:
        raise EOFError("it ends early")


def _brotli(body: bytes, limit: int) -> Iterator[bytes]:
    engine, rest = brotli.Decompressor(), body
    while not engine.is_finished():
        piece = engine.process(rest, output_buffer_limit=_STEP)
        yield piece
        rest = b""
        if not piece and not engine.is_finished() and engine.can_accept_more_data():
            raise EOFError("it ends early")


def _zstd_module() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise _unsupported("content-encoding 'zstd' needs Python 3.14 or the package backports.zstd; use gzip")


_DECODERS: dict[str, Callable[[bytes, int], Iterator[bytes]]] = {
    "gzip": _inflated(31),
    "x-gzip": _inflated(31),
    "deflate": _inflated(15),
    "zstd": _zstd,
    "br": _brotli,
}


def _too_large(limit: int) -> ProtocolError:
    return ProtocolError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")


def _unsupported(message: str) -> ProtocolError:
    return ProtocolError(message, status=415, code="unsupported_encoding")
