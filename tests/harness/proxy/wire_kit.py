"""Raw HTTP: bytes out, the answer in, with a deadline."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

DEADLINE = 60.0
"""Seconds after which a request counts as hung."""


@dataclass
class Reply:
    """What came back until the server closed, or one whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def request(
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str | bytes] | None = None,
    *,
    close: bool = True,
) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: gyre"]
    if close:
        lines.append(b"Connection: close")
    if body is not None:
        lines.append(b"Content-Length: %d" % len(body))
    for name, value in (headers or {}).items():
        lines.append(
            name.encode() + b": " + (value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass"))
        )
    return b"\r\n".join(lines) + b"\r\n\r\n" + (body or b"")


def exchange(url: str, *pieces: bytes, pause: float = 0.0) -> Reply | None:
    """Send pieces and read until the server closes; None where it closes without a word.

    Raises:
        AssertionError: the server neither answered in full nor closed in time.
    """
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=DEADLINE) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause) if pause else None
        except OSError:
            pass  # refused while we were sending: the answer may be there
        raw, end = b"", time.monotonic() + DEADLINE
        while time.monotonic() < end:
            connection.settimeout(max(end - time.monotonic(), 0.01))
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                break
            except ConnectionError:
                return _parsed(raw)
            if not data:
                return _parsed(raw)
            raw += data
    raise AssertionError(f"no end within {DEADLINE} s; so far {raw[:500]!r}")


def _parsed(raw: bytes) -> Reply | None:
    if not raw:
        return None
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunked(body)
    elif "content-length" in headers:
        body = body[: int(headers["content-length"])]
    return Reply(int(first.split(" ")[1]), headers, body, raw)


def _unchunked(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size or b"0", 16)
        if not count:
            break
        out, data = out + data[:count], data[count + 2 :]
    return out
