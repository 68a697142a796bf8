"""`gyre serve`: the proxy as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import GyreError, SettingsError
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server.app import ProxyServer
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy, ProxySettings

KEY_VARIABLE = "GYRE_SERVICE_KEY"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        server = ProxyServer(_settings(options))
        asyncio.run(_serve(server))
    except GyreError as error:
        sys.stderr.write(f"gyre serve: {error}\n")
        return 1
    return 0


async def _serve(server: ProxyServer) -> None:
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, server.stop)

    def announce(url: str) -> None:
        sys.stdout.write(f"gyre-proxy ready on {url} store={server.settings.store}\n")
        sys.stdout.flush()

    await server.serve(announce)


def _settings(options: argparse.Namespace) -> ProxySettings:
    key = os.environ.get(KEY_VARIABLE, "")
    if options.service_key_file is not None:
        try:
            key = options.service_key_file.read_text().strip()
        except OSError as error:
            raise SettingsError(f"--service-key-file {options.service_key_file} cannot be read: {error}") from error
    if not key:
        raise SettingsError(f"no service key: give --service-key-file FILE or set {KEY_VARIABLE}")
    return ProxySettings(
        store=options.store,
        model=options.model,
        renderer=options.renderer,
        renderer_options=dict(_option(text) for text in options.renderer_option),
        history=HistoryPolicy(options.history),
        host=options.host,
        port=options.port,
        public_url=options.public_url,
        replicas=tuple(ReplicaSpec(url) for url in options.replica),
        replica_token=os.environ.get("GYRE_REPLICA_TOKEN"),
        service_key=key,
        max_tokens=options.max_tokens,
        context=options.context,
        patience=options.patience,
    )


def _option(text: str) -> tuple[str, Any]:
    name, mark, value = text.partition("=")
    if not mark:
        raise SettingsError(f"--renderer-option {text!r} must be name=value")
    try:
        return name, msgspec.json.decode(value.encode())
    except msgspec.DecodeError:
        return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre serve", description="Serve recorded model access to agents.")
    parser.add_argument("--store", type=Path, required=True, help="SQLite file; made when missing")
    parser.add_argument("--model", type=Path, required=True, help="model folder with tokenizer.json")
    parser.add_argument("--renderer", default="auto", help="family in the `renderers` package, `template`, or `auto`")
    parser.add_argument("--renderer-option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--history", choices=[policy.value for policy in HistoryPolicy], default="bridge")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--public-url", help="address that agents are given")
    parser.add_argument("--replica", action="append", default=[], metavar="URL")
    parser.add_argument("--service-key-file", type=Path, help=f"file with the service key; else {KEY_VARIABLE}")
    parser.add_argument("--max-tokens", type=int, default=1024, help="for requests that give no limit")
    parser.add_argument("--context", type=int, help="longest prompt + answer; else the model's own")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds to wait for a replica that serves")
    return parser
