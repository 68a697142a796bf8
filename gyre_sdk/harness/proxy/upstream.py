"""The wire to a replica: `/inference/v1/generate` of vLLM, always streamed, and the little around it.

Only the paths named here are ever asked for, so a replica's other endpoints cannot be reached through the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec

from gyre_sdk.errors import ReplicaError
from gyre_sdk.harness.proxy.sse import SseDecoder, SseEvent
from gyre_sdk.harness.proxy.wire import Reply, Wire
from gyre_sdk.records import Sampling, VersionSpan

MISSING_LOGPROB = -9998.0
"""Engines clamp a log-prob that is not a number to -9999: anything this low is missing."""

ABORT_PREFIX = "generate-tokens-"
"""What vLLM puts before the request id that it was given."""

_REFUSALS = (400, 404, 413, 422)
"""Statuses, also of errors in a stream, that no other replica would answer otherwise."""
_LARGE = 1 << 20
"""Prompts of more bytes of JSON are put into their request in a thread."""


class _Logprob(msgspec.Struct, gc=False):
    logprob: float | None = None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Logprob] | None = None


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class _Place(msgspec.Struct):
    top_logprobs: list[_Candidate] = []


class _Places(msgspec.Struct):
    content: list[_Place] | None = None


class _CandidateChoice(msgspec.Struct):
    logprobs: _Places | None = None


class _CandidateChunk(msgspec.Struct):
    choices: list[_CandidateChoice] = []


class _Span(msgspec.Struct, gc=False):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_versions: list[_Span] | None = None


class _Paused(msgspec.Struct):
    is_paused: bool = False


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None
    usage: _Usage | None = None


_USAGE_SECONDS = 1.0
"""How long an engine may take from an answer's last token to its usage, which comes at once where it comes."""
_GATHER_SECONDS = 0.02
"""How long events of an answer that nobody watches may wait for each other."""
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_candidates = msgspec.json.Decoder(_CandidateChunk).decode
_decode_paused = msgspec.json.Decoder(_Paused).decode
_encode = msgspec.json.Encoder().encode


Candidates = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place of an answer and their log-probs in nats, the likeliest first."""
_MOST_CANDIDATES = 20
"""vLLM's default for `--max-logprobs`."""


class Piece(msgspec.Struct, frozen=True):
    """What one network read brought."""

    ids: list[int]
    logprobs: list[float | None]
    finish: str | None = None
    """The engine's finish reason, `abort` included; None while it samples."""
    stop_reason: str | int | None = None
    spans: tuple[VersionSpan, ...] = ()
    candidates: tuple[Candidates, ...] = ()
    """Of every token in `ids`, where they were asked for."""
    cached: int | None = None
    """With `finish`: tokens of the prompt that the engine had not to compute; None where it does not tell."""


class Probe(StrEnum):
    """What came of asking a replica for its health."""

    LIVE = "live"
    PAUSED = "paused"
    """It answers, but queues requests until it is resumed."""
    SILENT = "silent"
    """Nothing came in time."""
    DEAD = "dead"
    """It refused the connection, or said that it is not well."""


class Refused(ReplicaError):
    """The engine refused a request for good (HTTP 4xx): another replica would too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Upstream:
    """A client for replicas. `versions` maps labels that are not numbers, such as vLLM's `default`."""

    def __init__(self, *, versions: dict[str, int], token: str | None = None) -> None:
        self._versions = versions
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._wire = Wire(self._headers)
        self._silent: set[str] = set()
        """Replicas whose usage tells nothing of cached tokens: they are asked for none again."""

    async def open(self) -> None:
        """Make the connection pool; its idle connections close before vLLM closes them (5 s)."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=1 << 18, trust_env=False
        )

    async def close(self) -> None:
        """Close the connections."""
        self._wire.close()
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        url: str,
        *,
        request_id: str,
        prompt: bytes,
        sampled: Sequence[int] = (),
        sampling: Sampling,
        stop_ids: Sequence[int],
        max_tokens: int,
        salt: str,
        version: int,
        model: str | None = None,
        interval: int = 1,
        candidates: int = 0,
    ) -> AsyncGenerator[Piece, None]:
        """Sample; yield what comes as it comes. A piece with `finish` is the last.

        Args:
            url: the replica.
            request_id: unique for this attempt.
            prompt: ids of the prompt as JSON, without brackets.
            sampled: what the call has sampled already.
            sampling: of the call.
            stop_ids: tokens that end a turn.
            max_tokens: left for this attempt.
            salt: keeps cached keys and values of one version to that version.
            version: stands for a label that cannot be read.
            model: what the request names, where the replica serves adapters; None: nothing.
            interval: tokens per chunk that the engine may gather when nobody watches.
            candidates: likeliest tokens to tell at each place.

        Raises:
            Refused: the request itself is wrong for the engine.
            ReplicaError: the stream broke off; what was yielded before stays true.
        """
        wire = {
            "request_id": request_id,
            "token_ids": msgspec.Raw(b"".join((b"[", prompt, b"," if sampled else b"", _encode(sampled)[1:]))),
            "sampling_params": _sampling_params(sampling, stop_ids, max_tokens, interval, candidates),
            "stream": True,
            "cache_salt": salt,
        }
        told = url not in self._silent
        if told:
            wire["stream_options"] = {"include_usage": True}
        if model is not None:
            wire["model"] = model
        if "structured_outputs" in sampling.extra:
            wire["reasoning_ended"] = True  # the grammar holds from the first token on: it has the thinking in it
        body = await asyncio.to_thread(_encode, wire) if len(prompt) > _LARGE else _encode(wire)
        decoder = SseDecoder()
        try:
            reply, finished = await self._wire.post(url, "/inference/v1/generate", body, request_id), False
            try:
                if reply.status != 200:
                    raise _refusal(url, reply.status, await reply.read())
                while chunk := await reply.read_any(_GATHER_SECONDS if interval > 1 else 0.0):
                    piece = self._piece(url, decoder, chunk, version, candidates > 0)
                    if piece is not None:
                        finished = piece.finish is not None
                        if finished and told:
                            piece = await self._with_usage(url, reply, decoder, piece)
                        yield piece
                        if finished:
                            return
            finally:
                reply.close(nearly_over=finished)
        except (TimeoutError, OSError) as error:
            raise ReplicaError(f"replica {url} broke off: {type(error).__name__}: {error}") from error
        raise ReplicaError(f"replica {url} ended the stream without a finish reason")

    async def abort(self, url: str, request_id: str) -> None:
        """Ask a replica to stop a request; failures do not matter, the answer would be thrown away."""
        try:
            async with asyncio.timeout(5.0):
                async with self._open_session.post(
                    f"{url}/inference/v1/abort_requests", json={"request_ids": [f"{ABORT_PREFIX}{request_id}"]}
                ) as response:
                    await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return

    async def probe(self, url: str, timeout: float) -> Probe:
        """Ask a replica for its health, and whether it is paused where it can tell (vLLM in dev mode)."""
        try:
            async with asyncio.timeout(timeout):
                async with self._open_session.get(f"{url}/health") as response:
                    if response.status != 200:
                        return Probe.DEAD
                async with self._open_session.get(f"{url}/is_paused") as response:
                    if response.status != 200:
                        return Probe.LIVE
                    paused = _decode_paused(await response.read()).is_paused
                    return Probe.PAUSED if paused else Probe.LIVE
        except msgspec.DecodeError:
            return Probe.LIVE
        except TimeoutError:
            return Probe.SILENT
        except (aiohttp.ClientError, OSError):
            return Probe.DEAD

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ReplicaError("the upstream client is not open")
        return self._session

    async def _with_usage(self, url: str, reply: Reply, decoder: SseDecoder, last: Piece) -> Piece:
        """Return an answer's last piece with what the usage behind it says of cached tokens."""
        cached = last.cached
        try:
            async with asyncio.timeout(_USAGE_SECONDS):
                while cached is None and (data := await reply.read_any()):
                    cached = _cached(decoder.feed(data))
        except OSError as error:
            if not isinstance(error, TimeoutError):
                return last  # it is whole
        if cached is None:
            self._silent.add(url)
            return last
        return msgspec.structs.replace(last, cached=cached)

    def _piece(self, url: str, decoder: SseDecoder, data: bytes, version: int, with_candidates: bool) -> Piece | None:
        ids: list[int] = []
        logprobs: list[float | None] = []
        candidates: list[Candidates] = []
        events = iter(decoder.feed(data))
        for event in events:
            if event.data == b"[DONE]":
                continue
            try:
                chunk = _decode_chunk(event.data)
            except msgspec.DecodeError as error:
                raise ReplicaError(f"replica {url} sent an event that cannot be read: {error}") from error
            if chunk.error is not None:
                if ids:
                    return Piece(ids, logprobs, candidates=tuple(candidates))
                reason = _reason(msgspec.json.encode(chunk.error).decode())
                if isinstance(chunk.error, dict) and chunk.error.get("code") in _REFUSALS:
                    raise Refused(f"the engine refused the request: {reason}", 400)
                raise ReplicaError(f"replica {url} reported an error: {reason}")
            if with_candidates:
                candidates += _candidates(event.data, sum(len(choice.token_ids or ()) for choice in chunk.choices))
            for choice in chunk.choices:
                fresh = choice.token_ids or []
                ids += fresh
                logprobs += _logprobs(choice.logprobs, len(fresh))
                if choice.finish_reason is not None:
                    spans = tuple(
                        VersionSpan(self._version(span.version, version), span.start, span.end)
                        for span in choice.weight_versions or ()
                    )
                    end = choice.finish_reason, choice.stop_reason, spans, tuple(candidates)
                    return Piece(ids, logprobs, *end, _cached(events))
        return Piece(ids, logprobs, candidates=tuple(candidates)) if ids else None

    def _version(self, label: str | int, known: int) -> int:
        text = str(label)
        return int(text) if text.isdigit() else self._versions.get(text, known)


def _cached(events: Iterable[SseEvent]) -> int | None:
    """Return the cached tokens of the prompt that the usage among an answer's last events tells."""
    for event in events:
        if b'"cached_tokens"' in event.data:
            try:
                usage = _decode_chunk(event.data).usage
            except msgspec.DecodeError:
                continue
            if usage is not None and usage.prompt_tokens_details is not None:
                return usage.prompt_tokens_details.cached_tokens
    return None


def _refusal(url: str, status: int, body: bytes) -> ReplicaError:
    text = body[:2000].decode(errors="replace")
    if status in _REFUSALS:
        return Refused(f"the engine refused the request: {_reason(text)}", 400)
    return ReplicaError(f"replica {url} answered HTTP {status}: {_reason(text)}")


def _sampling_params(
    sampling: Sampling, stop_ids: Sequence[int], max_tokens: int, interval: int, candidates: int
) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_tokens,
        "stop_token_ids": list(dict.fromkeys((*stop_ids, *sampling.stop_token_ids))),
        "logprobs": min(candidates + 1, _MOST_CANDIDATES) if candidates else 0,  # one more: the sampled one counts
        **sampling.extra,
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if interval > 1:
        params["stream_interval"] = interval
    return params


def _logprobs(given: _Logprobs | None, count: int) -> list[float | None]:
    content = given.content if given is not None and given.content is not None else []
    values = [
        None if item.logprob is None or item.logprob <= MISSING_LOGPROB else item.logprob for item in content[:count]
    ]
    return values + [None] * (count - len(values))


def _candidates(data: bytes, count: int) -> list[Candidates]:
    """Return the likeliest tokens at each of an event's places, the likeliest first."""
    places: list[Candidates] = []
    for choice in _decode_candidates(data).choices:
        for place in choice.logprobs.content or () if choice.logprobs is not None else ():
            known = [(item.token_id, item.logprob) for item in place.top_logprobs if item.logprob is not None]
            ranked = sorted(known, key=lambda item: -item[1])
            places.append(tuple(item for item in ranked if item[1] > MISSING_LOGPROB))
    return (places + [()] * count)[:count]


def _reason(text: str) -> str:
    try:
        body = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return text[:500]
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:500]
