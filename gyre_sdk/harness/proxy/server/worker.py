"""One worker of a service with several: a proxy that reads its settings from stdin and stops when stdin ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import GyreError
from gyre_sdk.harness.proxy.server.app import ProxyServer
from gyre_sdk.harness.proxy.server.process import serve_process
from gyre_sdk.harness.proxy.server.settings import ProxySettings

READY = "worker ready "


def encode_settings(settings: ProxySettings) -> bytes:
    """Return settings as one line. It holds keys: for a pipe, not for a file or a command line."""
    return msgspec.json.encode(settings, enc_hook=str) + b"\n"


def decode_settings(line: bytes) -> ProxySettings:
    """Return the settings of a line."""
    return msgspec.json.decode(line, type=ProxySettings, dec_hook=_path)


def main() -> int:
    """Serve until SIGTERM, or until the process that started this one is gone."""
    try:
        server = ProxyServer(decode_settings(sys.stdin.buffer.readline()))
        serve_process(_serve(server))
    except GyreError as error:
        sys.stderr.write(f"gyre serve: {error}\n")
        return 1
    return 0


async def _serve(server: ProxyServer) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_signal_handler(signal.SIGINT, server.stop)

    def leash() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not through the buffer: its lock would be held when this process ends
            pass
        server.stop()

    def announce(url: str) -> None:
        threading.Thread(target=leash, name="leash", daemon=True).start()
        sys.stdout.write(f"{READY}{url}\n")
        sys.stdout.flush()

    await server.serve(announce)


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError
