"""`gyre serve`: recorded model access as a service of its own."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import GyreError, SettingsError
from gyre_sdk.harness.proxy.lanes.loading import load_classifier
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server.app import ProxyServer
from gyre_sdk.harness.proxy.server.budgets import Prices
from gyre_sdk.harness.proxy.server.children import Child, supervise
from gyre_sdk.harness.proxy.server.connections import listen
from gyre_sdk.harness.proxy.server.metrics import loopback
from gyre_sdk.harness.proxy.server.process import serve_process
from gyre_sdk.harness.proxy.server.settings import HistoryPolicy, ProxySettings, SamplingPolicy, new_key
from gyre_sdk.harness.proxy.server.specs import Models, read_specs
from gyre_sdk.harness.proxy.server.workers import Workers
from gyre_sdk.journal import Journal, store_file
from gyre_sdk.settings import REPLICA_TOKEN, SERVICE_KEY

KEY_FILE = "service-key"
READY = "ready "
"""Begins the line that tells the address."""
_ENGINE_READY = "gyre-engine ready on "


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    options = _parser().parse_args(argv)
    try:
        models = read_specs(options.model, options.replica, options.tokenizer)
        settings = _settings(options, models)
        with closing(listen(settings.host, settings.port)) as listening:
            key = _service_key(options.service_key_file, settings.store)
            settings = msgspec.structs.replace(settings, service_key=key)
            serve_process(_run(settings, models, options.workers, listening))
    except GyreError as error:
        _say(str(error))
        return 1
    return 0


async def _run(settings: ProxySettings, models: Models, workers: int, listening: socket.socket) -> None:
    """Run the embedded engine where one is asked for, and the proxy or its workers, until a signal."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    if not loopback(settings.host):
        _say(f"listening on {settings.host}: whoever reaches this port can try keys; traffic is not encrypted")
    if not models.local:
        await _serve(settings, workers, listening, stop)
        return
    engine = Child("engine", lambda port: _engine(models.folder, port), _ENGINE_READY)
    try:
        url = await _unless(stop, engine.start())
        if url is None:
            return
        settings = msgspec.structs.replace(settings, replicas=(*settings.replicas, ReplicaSpec(url)))
        serving = asyncio.create_task(_serve(settings, workers, listening, stop))
        watching = asyncio.create_task(supervise([engine], stop))
        try:
            await asyncio.wait([serving, watching], return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stop.set()
            results = await asyncio.gather(serving, watching, return_exceptions=True)
        for problem in results:
            if isinstance(problem, BaseException):
                raise problem
    finally:
        await engine.stop()


async def _serve(settings: ProxySettings, workers: int, listening: socket.socket, stop: asyncio.Event) -> None:
    server = ProxyServer(settings) if workers == 1 else Workers(settings, workers)
    serving = asyncio.create_task(server.serve(_announce, listening))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        await serving
    finally:
        stopping.cancel()


async def _unless(stop: asyncio.Event, work: Any) -> Any:
    """Return what `work` gives; None when `stop` is set before."""
    working, stopping = asyncio.ensure_future(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()


def _engine(folder: Path | None, port: int) -> list[str]:
    leash = ["-m", "gyre_sdk.trainer.leash", "gyre_sdk.trainer.engines.embedded"]
    return [*leash, "--model", str(folder), "--port", str(port), "--served-model-name", "policy"]


def _announce(url: str) -> None:
    sys.stdout.write(f"{READY}{url}\n")
    sys.stdout.flush()


def _say(message: str) -> None:
    sys.stderr.write(f"gyre serve: {message}\n")
    sys.stderr.flush()


def _settings(options: argparse.Namespace, models: Models) -> ProxySettings:
    if options.workers < 1:
        raise SettingsError(f"--workers is {options.workers}; it must be at least 1")
    if options.classifier:
        load_classifier(options.classifier)
    histories = read_histories(options.history)
    return ProxySettings(
        store=store_file(options.store),
        model=models.folder,
        hosted=models.hosted,
        renderer=options.renderer,
        sampling=SamplingPolicy(options.sampling),
        renderer_options=dict(_option(text) for text in options.renderer_option),
        history=histories.pop("", HistoryPolicy.BRIDGE),
        histories=histories,
        host=options.host,
        port=options.port,
        public_url=options.public_url,
        replicas=tuple(ReplicaSpec(url) for url in models.replicas),
        replica_token=os.environ.get(REPLICA_TOKEN),
        max_tokens=options.max_tokens,
        context=options.context,
        patience=options.patience,
        prices=Prices(options.price_prompt, options.price_sampled),
        classifier=options.classifier,
    )


def _service_key(file: Path | None, store: Path) -> str:
    """Return the service key: from the file that is named, else the environment, else one kept beside the store."""
    if file is None and os.environ.get(SERVICE_KEY):
        return os.environ[SERVICE_KEY]
    path = store.parent / KEY_FILE if file is None else file
    try:
        if file is None:
            Journal(store).close()  # one that cannot be opened gets no key
            _make_key(path)
            _say(f"the service key is in {path}")
        key = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"the service key file {path} cannot be read: {error}") from error
    if not key:
        raise SettingsError(f"the service key file {path} is empty; give another, or set {SERVICE_KEY}")
    return key


def _make_key(path: Path) -> None:
    """Write a fresh key that only its owner can read, unless there is one."""
    if path.exists():
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600, exist_ok=False)
    fresh.write_text(new_key() + "\n")
    try:
        os.link(fresh, path)  # whole or not at all, and never over another's
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def read_histories(texts: Sequence[str]) -> dict[str, HistoryPolicy]:
    """Return the history policies that `--history` gives, by role; the one of all other roles under an empty name.

    Raises:
        SettingsError: one is unknown.
    """
    found = {}
    for text in texts:
        role, _, policy = text.rpartition("=")
        try:
            found[role] = HistoryPolicy(policy)
        except ValueError:
            known = " or ".join(HistoryPolicy)
            raise SettingsError(f"--history {text!r} must be {known}, for one role ROLE={policy or 'POLICY'}") from None
    return found


def _option(text: str) -> tuple[str, Any]:
    name, mark, value = text.partition("=")
    if not mark:
        raise SettingsError(f"--renderer-option {text!r} must be name=value")
    try:
        return name, msgspec.json.decode(value.encode())
    except msgspec.DecodeError:
        return name, value


_EXAMPLES = """\
SPEC, repeatable:
  local:PATH               the model folder PATH, on the embedded engine (needs gyre-sdk[train])
  http://HOST:PORT         a replica that runs already; repeat it for more
  litellm:PROVIDER/MODEL   a hosted model: recorded and replayed, never trained (needs gyre-sdk[providers])
  FOLDER                   a model folder whose replicas --replica names, or the control API later

examples:
  gyre serve --model local:./qwen3-0.6b --store ./runs
  gyre serve --model http://127.0.0.1:8000 --model http://127.0.0.1:8001 --tokenizer ./qwen3 --store ./runs --port 8700
  OPENAI_API_KEY=... gyre serve --model litellm:openai/gpt-4o-mini --store ./runs

Prints `ready http://HOST:PORT` when it serves. SIGTERM lets calls in flight end, then stops.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gyre serve",
        description="Serve recorded model access to agents.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Callable[..., Any] = parser.add_argument_group("what to serve").add_argument
    add("--model", action="append", required=True, metavar="SPEC", help="see below; repeatable")
    add("--replica", action="append", default=[], metavar="URL", help="a replica of a --model FOLDER; repeatable")
    add("--tokenizer", type=Path, metavar="FOLDER", help="the policy's tokenizer, where replicas do not tell it")
    add("--renderer", default="auto", help="family in the `renderers` package, `template`, or `auto` (default)")
    add("--renderer-option", action="append", default=[], metavar="NAME=VALUE", help="of the renderer; repeatable")
    does = "what a recorded turn becomes in the next prompt: bridge (default) or as_template; repeatable"
    add("--history", action="append", default=[], metavar="[ROLE=]POLICY", help=does)
    policies = [policy.value for policy in SamplingPolicy]
    add("--sampling", choices=policies, default="untrained", help="calls of groups that a trainer cannot reproduce")
    add("--max-tokens", type=int, default=1024, help="for requests that give no limit (1024)")
    add("--context", type=int, help="longest prompt + answer; else the model's own")
    add("--classifier", default="", help="for agents with one key for everything: a preset, or module:attribute")
    add("--price-prompt", type=float, default=0.0, metavar="USD", help="per million prompt tokens, for cost budgets")
    add("--price-sampled", type=float, default=0.0, metavar="USD", help="per million sampled tokens")
    add = parser.add_argument_group("where").add_argument
    add("--store", type=Path, required=True, help="folder, or SQLite file; made when missing")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=0, help="0, the default, takes a free one; workers take those after it")
    add("--public-url", help="address that agents are given, where it is not the one listened on")
    add("--workers", type=int, default=1, help="processes; each has its own runs (1)")
    add("--service-key-file", type=Path, metavar="FILE", help=f"else {SERVICE_KEY}, else `{KEY_FILE}` by the store")
    add("--patience", type=float, default=120.0, metavar="S", help="seconds to wait for a replica that serves (120)")
    return parser
