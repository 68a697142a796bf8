"""`/inference/v1/generate` of vLLM, always streamed: a request as JSON, and the events of its answer. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import ReplicaError
from gyre_sdk.harness.proxy.sse import SseDecoder, SseEvent
from gyre_sdk.records import Sampling, VersionSpan

MISSING_LOGPROB = -9998.0
"""Engines clamp a log-prob that is not a number to -9999: anything this low is missing."""

_REFUSALS = (400, 404, 413, 422)
"""Statuses, also of errors in a stream, that no other replica would answer otherwise."""


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


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None
    usage: _Usage | None = None


_encode = msgspec.json.Encoder().encode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_candidates = msgspec.json.Decoder(_CandidateChunk).decode

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


class Refused(ReplicaError):
    """The engine refused a request for good (HTTP 4xx): another replica would too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def request_body(
    request_id: str,
    prompt: bytes,
    sampled: Sequence[int],
    sampling: Sampling,
    stop_ids: Sequence[int],
    max_tokens: int,
    salt: str,
    model: str | None,
    interval: int,
    candidates: int,
    usage: bool,
) -> bytes:
    """Return a request. See `Upstream.generate`; `usage` asks for the usage behind the answer."""
    wire = {
        "request_id": request_id,
        "token_ids": msgspec.Raw(b"".join((b"[", prompt, b"," if sampled else b"", _encode(sampled)[1:]))),
        "sampling_params": _sampling_params(sampling, stop_ids, max_tokens, interval, candidates),
        "stream": True,
        "cache_salt": salt,
    }
    if usage:
        wire["stream_options"] = {"include_usage": True}
    if model is not None:
        wire["model"] = model
    if "structured_outputs" in sampling.extra:
        wire["reasoning_ended"] = True  # the grammar holds from the first token on: it has the thinking in it
    return _encode(wire)


class Reading:
    """Reads the events of one answer.

    Args:
        url: of the replica, for messages.
        labels: versions of labels that are not numbers.
        known: version that stands for a label that cannot be read.
        with_candidates: whether the likeliest tokens were asked for.
    """

    def __init__(self, url: str, labels: Mapping[str, int], known: int, with_candidates: bool) -> None:
        self._url = url
        self._labels = labels
        self._known = known
        self._with_candidates = with_candidates
        self._decoder = SseDecoder()

    def take(self, data: bytes) -> Piece | None:
        """Take what one network read brought; return what it says, None for nothing.

        Raises:
            Refused: the request itself is wrong for the engine.
            ReplicaError: the engine reports an error, or cannot be understood.
        """
        ids: list[int] = []
        logprobs: list[float | None] = []
        candidates: list[Candidates] = []
        events = iter(self._decoder.feed(data))
        for event in events:
            if event.data == b"[DONE]":
                continue
            try:
                chunk = _decode_chunk(event.data)
            except msgspec.DecodeError as error:
                raise ReplicaError(f"replica {self._url} sent an event that cannot be read: {error}") from error
            if chunk.error is not None:
                if ids:
                    return Piece(ids, logprobs, candidates=tuple(candidates))
                reason = _reason(msgspec.json.encode(chunk.error).decode())
                if isinstance(chunk.error, dict) and chunk.error.get("code") in _REFUSALS:
                    raise Refused(f"the engine refused the request: {reason}", 400)
                raise ReplicaError(f"replica {self._url} reported an error: {reason}")
            if self._with_candidates:
                candidates += _candidates(event.data, sum(len(choice.token_ids or ()) for choice in chunk.choices))
            for choice in chunk.choices:
                fresh = choice.token_ids or []
                ids += fresh
                logprobs += _logprobs(choice.logprobs, len(fresh))
                if choice.finish_reason is not None:
                    spans = tuple(
                        VersionSpan(self._version(span.version), span.start, span.end)
                        for span in choice.weight_versions or ()
                    )
                    end = choice.finish_reason, choice.stop_reason, spans, tuple(candidates)
                    return Piece(ids, logprobs, *end, _cached(events))
        return Piece(ids, logprobs, candidates=tuple(candidates)) if ids else None

    def cached(self, data: bytes) -> int | None:
        """Return the cached tokens of the prompt that events behind the last piece tell; None for nothing."""
        return _cached(self._decoder.feed(data))

    def _version(self, label: str | int) -> int:
        text = str(label)
        return int(text) if text.isdigit() else self._labels.get(text, self._known)


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


def refusal(url: str, status: int, body: bytes) -> ReplicaError:
    """Return the error of an answer that is no stream."""
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
