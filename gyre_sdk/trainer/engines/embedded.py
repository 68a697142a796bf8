"""`gyre-engine`: a process that serves a Hugging Face causal LM on CPU or GPU as vLLM would, for gyre.

    python -m gyre_sdk.trainer.engines.embedded --model DIR --port 0

prints `gyre-engine ready on http://HOST:PORT version=N` when it serves. SIGTERM and SIGINT end running requests with
finish reason `abort` and all their tokens, then the process. It keeps nothing on disk but the request log.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from gyre_sdk.errors import EngineError
from gyre_sdk.trainer.loading import load

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the engine until a signal; return the exit code."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        sys.stderr.write("gyre-engine: it computes with torch and transformers; run: pip install 'gyre-sdk[train]'\n")
        return 2
    logging.basicConfig(
        level=options.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    try:
        asyncio.run(_serve(options))
    except EngineError as err:
        sys.stderr.write(f"gyre-engine: {err}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gyre-engine", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face model folder")
    add("--served-model-name", help="name in /v1/models and in requests; default: --model as given")
    add("--host", default="127.0.0.1", help="the weight and pause routes carry no authentication: keep it private")
    add("--port", type=int, default=8000, help="0 picks a free one")
    add("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--threads", type=int, default=1, help="torch threads; more than one pays only for larger models")
    add("--max-batch", type=int, default=64, help="most requests in one step")
    add("--max-model-len", type=int, help="prompt and sampled tokens of a request; default: the model's context length")
    add("--step-tokens", type=int, default=4096, help="most prompt tokens that one step computes")
    add(
        "--kv-gib", type=float, default=2.0, help="most memory of the KV cache, GiB; on CPU it is taken as it is needed"
    )
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    add("--version", default="0", help="label of the weights in --model")
    add("--seed", type=int, help="seed of the engine's generator; default: from the operating system")
    add("--request-log", type=Path, help="append a JSON line per finished request to this file")
    add("--log-level", default="warning", choices=("debug", "info", "warning", "error"))
    return parser


async def _serve(options: argparse.Namespace) -> None:
    load("gyre_sdk.trainer.engines.server")
    import torch
    from aiohttp import web

    from gyre_sdk.trainer.engines.batching import Batcher, Deliveries
    from gyre_sdk.trainer.engines.ledger import RequestLog
    from gyre_sdk.trainer.engines.runner import ModelRunner
    from gyre_sdk.trainer.engines.sampling import Sampler
    from gyre_sdk.trainer.engines.server import EngineServer
    from gyre_sdk.trainer.engines.weights import WeightSession

    for name in ("threads", "max_batch", "step_tokens"):
        if getattr(options, name) < (2 if name == "step_tokens" else 1):
            raise EngineError(f"--{name.replace('_', '-')} is {getattr(options, name)}, too small")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise EngineError("--device cuda: torch sees no GPU; use --device cpu")
    sys.setswitchinterval(0.0005)  # the model thread comes back from every torch call through the interpreter lock
    torch.set_num_threads(options.threads)
    listener = _listen(options.host, options.port)
    runner = ModelRunner(
        Path(options.model),
        device=options.device,
        dtype=options.dtype,
        max_batch=options.max_batch,
        max_model_len=options.max_model_len,
        kv_gib=options.kv_gib,
    )
    loop = asyncio.get_running_loop()

    def push_all(deliveries: Deliveries) -> None:
        for push, delta in deliveries:
            push(delta)

    def deliver(deliveries: Deliveries) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(push_all, deliveries)

    request_log = RequestLog(options.request_log)
    batcher = Batcher(
        runner,
        Sampler(options.seed, runner.device),
        version=options.version,
        max_batch=options.max_batch,
        step_tokens=options.step_tokens,
        prefix_cache=not options.no_prefix_cache,
        deliver=deliver,
        request_log=request_log,
    )
    server = EngineServer(
        batcher,
        runner.limits,
        lambda: WeightSession(runner.model),
        model_name=options.served_model_name or options.model,
        detokenizer=_detokenizer(Path(options.model)),
    )
    web_runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
    await web_runner.setup()
    await web.SockSite(web_runner, listener, backlog=1024).start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    batcher.start()
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"gyre-engine ready on http://{host}:{port} version={options.version}\n")
    sys.stdout.flush()
    await stop.wait()
    await asyncio.to_thread(batcher.stop)
    await web_runner.cleanup()
    request_log.close()


def _listen(host: str, port: int) -> socket.socket:
    """Bind before loading, so that a taken port fails in the first second."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024
        )
    except OSError as err:
        raise EngineError(f"cannot listen on {host}:{port}: {err.strerror or err}; pass another --port, or 0") from err


def _detokenizer(folder: Path) -> Callable[[bool], Callable[[int], str | None]] | None:
    """Return a maker of incremental decoders when the folder has a tokenizer, for stop strings."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    tokenizer = Tokenizer.from_file(str(path))

    def make(skip_special: bool) -> Callable[[int], str | None]:
        stream = DecodeStream(skip_special_tokens=skip_special)
        return lambda token: stream.step(tokenizer, token)

    return make


if __name__ == "__main__":
    sys.exit(main())
