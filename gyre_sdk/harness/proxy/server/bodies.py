"""Request bodies: read, decompress within bounds."""

from __future__ import annotations

import importlib
import zlib
from typing import Any

from aiohttp import web

from gyre_sdk.errors import ProtocolError

_STEP = 1 << 20
_CODINGS = ("identity", "gzip", "x-gzip", "deflate", "zstd")


async def read_body(request: web.Request, limit: int) -> bytes:
    """Return a request's body as the agent wrote it, decompressed.

    Raises:
        ProtocolError: 413 when it is larger than `limit` bytes, 415 for an unknown coding, 400 for a corrupt one.
    """
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    header = request.headers.get("Content-Encoding", "")
    for coding in reversed([name.strip().lower() for name in header.split(",") if name.strip()]):
        body = _decoded(body, coding, limit)
    return body


def _decoded(body: bytes, coding: str, limit: int) -> bytes:
    if coding == "identity":
        return body
    if coding not in _CODINGS:
        raise ProtocolError(
            f"content-encoding {coding!r} is not understood; use {', '.join(_CODINGS)}",
            status=415,
            code="unsupported_encoding",
        )
    engine: Any = _zstd() if coding == "zstd" else zlib.decompressobj(31 if "gzip" in coding else 15)
    out, size, rest = [], 0, body
    try:
        while True:
            piece = engine.decompress(rest, _STEP)
            out.append(piece)
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            if engine.eof:
                break
            rest = b"" if coding == "zstd" else engine.unconsumed_tail
            if not piece and (not rest if coding != "zstd" else engine.needs_input):
                raise ProtocolError(f"the {coding} body ends early", code="corrupt_body")
    except ProtocolError:
        raise
    except Exception as error:  # boundary: each decompressor has errors of its own
        raise ProtocolError(f"the {coding} body is corrupt: {error}", code="corrupt_body") from error
    return b"".join(out)


def _zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name).ZstdDecompressor()
        except ImportError:
            continue
    raise ProtocolError(
        "content-encoding 'zstd' needs Python 3.14 or the package backports.zstd; use gzip or no compression",
        status=415,
        code="unsupported_encoding",
    )


def _too_large(limit: int) -> ProtocolError:
    return ProtocolError(f"the body is larger than {limit} bytes", status=413, code="body_too_large")
