"""The HTTP face of the embedded engine: vLLM's routes, bodies and errors, as far as gyre uses them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gyre_sdk.errors import ProtocolError, PublishError
from gyre_sdk.steering import HEADER, Steering
from gyre_sdk.trainer.engines.batching import Batcher, PauseMode, State
from gyre_sdk.trainer.engines.ledger import prometheus
from gyre_sdk.trainer.engines.runner import ModelLimits
from gyre_sdk.trainer.engines.sequence import Delta, Sequence
from gyre_sdk.trainer.engines.updates import WeightUpdates, read_json
from gyre_sdk.trainer.engines.weights import WeightSession
from gyre_sdk.trainer.engines.wire import (
    REQUEST_ID_PREFIX,
    Choice,
    FullUsage,
    GenerateChunk,
    GenerateRequest,
    GenerateResponse,
    LogProbs,
    PromptDetails,
    Usage,
    check_request,
    decode_request,
    encode,
    error_body,
    strings,
)

__all__ = ["EngineServer"]

log = logging.getLogger(__name__)
_MAX_BODY = 64 * 2**20
_DONE = b"data: [DONE]\n\n"


class Outbox:
    """Deltas on their way from the model thread to one response; those that wait together are sent together."""

    def __init__(self, *, every: bool) -> None:
        self._every = every
        self._deltas: list[Delta] = []
        self._ready = asyncio.Event()

    def push(self, delta: Delta) -> None:
        """Add a delta; a response that is not streamed wakes up only for the last."""
        self._deltas.append(delta)
        if self._every or delta.finish_reason is not None:
            self._ready.set()

    async def take(self) -> Delta:
        """Wait, then return everything so far as one delta."""
        await self._ready.wait()
        self._ready.clear()
        deltas, self._deltas = self._deltas, []
        if len(deltas) == 1:
            return deltas[0]
        ids = tuple(token for delta in deltas for token in delta.token_ids)
        contents = tuple(content for delta in deltas for content in delta.logprobs)
        return deltas[-1]._replace(token_ids=ids, logprobs=contents)


class EngineServer:
    """Routes and request handling; the batcher does the work."""

    def __init__(
        self,
        batcher: Batcher,
        limits: ModelLimits,
        session: Callable[[], WeightSession],
        *,
        model_name: str,
        detokenizer: Callable[[bool], Callable[[int], str | None]] | None,
    ) -> None:
        """`session` opens a weight update; `detokenizer(skip_special)` makes an incremental decoder, None without one."""
        self._batcher = batcher
        self._limits = limits
        self._updates = WeightUpdates(batcher, session)
        self._model_name = model_name
        self._detokenizer = detokenizer

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors, _steered(Steering())])
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort_by_ids),
                web.post("/abort_requests", self._abort_some_or_all),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                *self._updates.routes(),
                web.get("/health", self._health),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
            ]
        )
        return app

    # -- generation ----------------------------------------------------------------------------------------------

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = decode_request(await http.read())
        if request.model not in (None, self._model_name):
            raise ProtocolError(
                f"The model `{request.model}` does not exist. This engine serves `{self._model_name}`.",
                status=404,
                code="NotFoundError",
                param="model",
            )
        check_request(
            request,
            vocab=self._limits.vocab,
            max_model_len=self._limits.max_model_len,
            has_tokenizer=self._detokenizer is not None,
        )
        if not self._batcher.alive:
            raise ProtocolError("the model thread has ended; restart the engine", status=503, code="EngineDeadError")
        outbox = Outbox(every=bool(request.stream))
        sequence = self._sequence(request, http, outbox)
        self._batcher.submit(sequence)
        try:
            if request.stream:
                return await self._stream(http, request, sequence, outbox)
            return await self._answer(request, sequence, outbox)
        finally:
            if not sequence.finished:
                self._batcher.abandon(sequence)

    def _sequence(self, request: GenerateRequest, http: web.Request, outbox: Outbox) -> Sequence:
        params = request.sampling_params
        room = self._limits.max_model_len - len(request.token_ids)
        own_id = http.headers.get("X-Request-Id") or request.request_id or uuid.uuid4().hex[:16]
        eos, *more = self._limits.eos_ids or (None,)
        if not params.ignore_eos and more:  # as vLLM: the further EOS ids are stop ids, reported as the stop reason
            params = msgspec.structs.replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *more])
        decode = None
        if params.stop_strings and self._detokenizer is not None:
            decode = self._detokenizer(params.skip_special_tokens)
        return Sequence(
            request_id=REQUEST_ID_PREFIX + own_id,
            prompt_ids=request.token_ids,
            params=params,
            cache_salt=request.cache_salt,
            max_new=min(room, params.max_tokens or room),
            push=outbox.push,
            eos_ids=frozenset() if params.ignore_eos or eos is None else frozenset((eos,)),
            decode=decode,
        )

    async def _stream(
        self, http: web.Request, request: GenerateRequest, sequence: Sequence, outbox: Outbox
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        options = request.stream_options
        sent, finished = 0, False
        echo: list[int] | msgspec.UnsetType = request.token_ids if request.return_token_ids else msgspec.UNSET
        while not finished:
            delta = await outbox.take()
            finished = delta.finish_reason is not None
            if delta.error is not None:
                await response.write(b"data: " + _internal_error(delta.error) + b"\n\n" + _DONE)
                break
            sent += len(delta.token_ids)
            usage = _usage(sequence, sent) if options and options.continuous_usage_stats else None
            chunk = GenerateChunk(sequence.request_id, usage, echo, "tokens", [_choice(sequence, delta)])
            echo = msgspec.UNSET
            data = b"data: " + encode(chunk) + b"\n\n"
            if finished:
                if options and options.include_usage:
                    last = GenerateChunk(sequence.request_id, _usage(sequence, sent), msgspec.UNSET, "tokens", [])
                    data += b"data: " + encode(last) + b"\n\n"
                data += _DONE
            await response.write(data)
        await response.write_eof()
        return response

    async def _answer(self, request: GenerateRequest, sequence: Sequence, outbox: Outbox) -> web.Response:
        delta = await outbox.take()
        if delta.error is not None:
            return web.Response(status=500, body=_internal_error(delta.error), content_type="application/json")
        prompt, count = len(sequence.prompt_ids), len(delta.token_ids)
        body = GenerateResponse(
            request_id=sequence.request_id,
            model=self._model_name,
            created=int(time.time()),
            usage=FullUsage(prompt, prompt + count, count, PromptDetails(sequence.cached_tokens)),
            prompt_logprobs=None,
            prompt_token_id_logprobs=None,
            prompt_token_ids=request.token_ids if request.return_token_ids else None,
            mm_placeholders=None,
            metrics=None,
            kv_transfer_params=None,
            ec_transfer_params=None,
            output_mode="tokens",
            choices=[_choice(sequence, delta)],
        )
        return web.Response(body=encode(body), content_type="application/json")

    async def _abort_by_ids(self, http: web.Request) -> web.Response:
        ids = (await read_json(http)).get("request_ids")
        if ids is None:
            raise ProtocolError("Missing 'request_ids' in request body", code="Bad Request")
        self._batcher.abort(strings(ids))
        return web.Response()

    async def _abort_some_or_all(self, http: web.Request) -> web.Response:
        ids = (await read_json(http)).get("request_ids") or None
        count = len(ids) if ids else sum(self._batcher.counts)
        await asyncio.wrap_future(self._batcher.abort(strings(ids) if ids else None))
        return web.json_response({"status": "aborted", "aborted": count})

    async def _pause(self, http: web.Request) -> web.Response:
        text = http.query.get("mode", PauseMode.ABORT)
        if text not in list(PauseMode):
            raise ProtocolError(
                f"mode should be 'abort', 'wait' or 'keep', got {text!r}", code="Bad Request", param="query.mode"
            )
        await asyncio.wrap_future(self._batcher.pause(PauseMode(text)))
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await asyncio.wrap_future(self._batcher.resume())
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._batcher.state is not State.RUNNING})

    # -- facts ---------------------------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._batcher.alive else 503)

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response({"server_load": sum(self._batcher.counts)})

    async def _metrics(self, _: web.Request) -> web.Response:
        running, waiting = self._batcher.counts
        text = prometheus(self._batcher.tally, running=running, waiting=waiting, model=self._model_name)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "gyre-embedded"})

    async def _models(self, _: web.Request) -> web.Response:
        model: dict[str, Any] = {
            "id": self._model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "gyre",
            "root": self._model_name,
            "parent": None,
            "max_model_len": self._limits.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})


def _choice(sequence: Sequence, delta: Delta) -> Choice:
    wanted = sequence.params.logprobs is not None
    return Choice(
        index=0,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=list(delta.token_ids),
        routed_experts=None,
        sampling_mask=None,
        weight_versions=None if delta.finish_reason is None else sequence.spans,
        logprobs=LogProbs(list(delta.logprobs)) if wanted else None,
    )


def _usage(sequence: Sequence, sampled: int) -> Usage:
    prompt = len(sequence.prompt_ids)
    return Usage(prompt, prompt + sampled, sampled, PromptDetails(sequence.cached_tokens))


def _internal_error(message: str) -> bytes:
    return error_body(message, kind="InternalServerError", code=500)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into vLLM's bodies."""
    try:
        return await handler(request)
    except ProtocolError as err:
        return _refusal(err.status, error_body(str(err), kind=err.code, code=err.status, param=err.param))
    except PublishError as err:
        return _refusal(400, error_body(str(err), kind="BadRequestError", code=400))
    except web.HTTPRequestEntityTooLarge:
        message = f"the request body is larger than {_MAX_BODY} bytes"
        return _refusal(413, error_body(message, kind="BadRequestError", code=413))
    except web.HTTPException as err:
        return web.json_response({"detail": err.reason}, status=err.status)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as err:  # boundary: of a request; logged and answered
        log.exception("%s %s failed", request.method, request.path)
        return _refusal(500, _internal_error(f"{type(err).__name__}: {err}"))


def _steered(steering: Steering) -> Middleware:
    """Refuse the requests of a trainer that has a successor."""

    @web.middleware
    async def steered(request: web.Request, handler: Handler) -> web.StreamResponse:
        steering.check(request.headers.get(HEADER))
        return await handler(request)

    return steered


def _refusal(status: int, body: bytes) -> web.Response:
    return web.Response(status=status, body=body, content_type="application/json")
