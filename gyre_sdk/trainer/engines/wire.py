"""The JSON that the embedded engine reads and writes: the part of vLLM 0.32's HTTP surface that gyre uses.

Field names, their order and their nulls are vLLM's (`vllm/entrypoints/scale_out/token_in_token_out/protocol.py`), so
that one client drives both. Pure: no torch, no I/O.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from gyre_sdk.errors import ProtocolError

__all__ = [
    "REQUEST_ID_PREFIX",
    "Choice",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResponse",
    "LogProb",
    "LogProbContent",
    "LogProbs",
    "PromptDetails",
    "RequestLogLine",
    "SamplingParams",
    "StreamOptions",
    "Usage",
    "VersionSpan",
    "check_request",
    "decode_request",
    "encode",
    "error_body",
]

REQUEST_ID_PREFIX = "generate-tokens-"
"""vLLM prefixes the caller's id; aborts need the prefixed one."""

MAX_LOGPROBS = 20
"""vLLM's default for `--max-logprobs`."""

_encoder = msgspec.json.Encoder()
encode = _encoder.encode


class SamplingParams(msgspec.Struct, frozen=True):
    """How to sample; defaults are vLLM's. Unknown keys are ignored, known ones that cannot be honoured are refused."""

    n: int = 1
    temperature: float = 1.0
    """0 (or below 1e-5) is greedy: the log-prob is then that of temperature 1 without top-k, top-p and min-p."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Counts the prompt too; the other two penalties count sampled tokens only."""
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    """None or -1: the engine's own generator."""
    max_tokens: int | None = None
    """None: up to the context length."""
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether stop strings are looked for in text without special tokens."""
    logprobs: int | None = None
    """None: no log-probs. k: the sampled token's, plus the k most likely ones."""
    # Known to vLLM, changing what is sampled or returned, and not supported here.
    structured_outputs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    trace_decode_token_ids: Any = None
    logprob_token_ids: Any = None
    prompt_logprobs: Any = None
    prompt_logprob_token_ids: Any = None
    watermarking: Any = None

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerateRequest(msgspec.Struct, frozen=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str | None = None
    """The `X-Request-Id` header wins; None: the engine makes one."""
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    priority: int = 0
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `[start, end)` were sampled by the weights called `version`."""

    version: str
    start: int
    end: int


class LogProb(msgspec.Struct, frozen=True):
    """One candidate at one position, in nats, under the distribution that was sampled from."""

    token_id: int
    logprob: float
    rank: int | None


class LogProbContent(msgspec.Struct, frozen=True):
    """The sampled token at one position; `top_logprobs` starts with it, as in vLLM."""

    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[LogProb]


class LogProbs(msgspec.Struct, frozen=True):
    """One entry per token in `token_ids` of the same choice."""

    content: list[LogProbContent]


class Choice(msgspec.Struct, frozen=True):
    """Sampled tokens. In a stream only the tokens since the previous chunk."""

    index: int
    finish_reason: str | None
    """`stop`, `length`, `abort`; None while the stream goes on."""
    stop_reason: int | str | None
    """The stop string or stop token id that matched; None for EOS, length and abort."""
    token_ids: list[int]
    routed_experts: None
    sampling_mask: None
    weight_versions: list[VersionSpan] | None
    """Over the whole output, on the final chunk only; empty when nothing was sampled."""
    logprobs: LogProbs | None


class PromptDetails(msgspec.Struct, frozen=True):
    """What is known of a prompt's tokens, as vLLM tells it with `--enable-prompt-tokens-details`."""

    cached_tokens: int
    """Those that a cached prefix supplied."""


class Usage(msgspec.Struct, frozen=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptDetails


class FullUsage(Usage, frozen=True):
    """Token counts of a non-streamed answer, with vLLM's null field."""

    completion_tokens_details: None = None


class GenerateChunk(msgspec.Struct, frozen=True):
    """One `data:` line of a stream."""

    request_id: str
    usage: Usage | None
    prompt_token_ids: list[int] | msgspec.UnsetType
    """On the first chunk when `return_token_ids` was asked for."""
    output_mode: str
    choices: list[Choice]


class GenerateResponse(msgspec.Struct, frozen=True):
    """The body of a non-streamed answer."""

    request_id: str
    model: str
    created: int
    usage: FullUsage
    prompt_logprobs: None
    prompt_token_id_logprobs: None
    prompt_token_ids: list[int] | None
    mm_placeholders: None
    metrics: None
    kv_transfer_params: None
    ec_transfer_params: None
    output_mode: str
    choices: list[Choice]


class RequestLogLine(msgspec.Struct, frozen=True):
    """The engine's own account of one finished request: what it was sent and what it sampled."""

    request_id: str
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Always recorded, whether or not the client asked for them."""
    versions: list[VersionSpan]
    finish_reason: str
    """`stop`, `length`, `abort` or `error`."""


class _ErrorInfo(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


def error_body(message: str, *, kind: str, code: int, param: str | None = None) -> bytes:
    """Encode an error as vLLM does."""
    return encode({"error": _ErrorInfo(message, kind, param, code)})


_decoder = msgspec.json.Decoder(GenerateRequest)


def decode_request(body: bytes) -> GenerateRequest:
    """Parse a generate request.

    Raises:
        ProtocolError: 400, naming the field.
    """
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as err:
        message, _, path = str(err).partition(" - at `$")
        where = "body" + path.rstrip("`")
        raise ProtocolError(f"{message} (at {where})", code="Bad Request", param=where) from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ProtocolError(f"JSON decode error: {err}", code="Bad Request", param="body") from err


def check_request(request: GenerateRequest, *, vocab: int, max_model_len: int, has_tokenizer: bool) -> None:
    """Refuse what cannot be honoured exactly.

    Raises:
        ProtocolError: 400 with a message that names the field, its value and the limit.
    """
    p = request.sampling_params
    ids = request.token_ids
    if not ids:
        raise ProtocolError("token_ids must have at least 1 item, got 0", code="Bad Request", param="body.token_ids")
    if min(ids) < 0:
        raise ProtocolError(
            f"token_ids must not contain negative values, got {min(ids)}", code="Bad Request", param="body.token_ids"
        )
    if (top := max(ids)) >= vocab:
        raise _bad(f"Token id {top} is out of vocabulary (size {vocab})", None)
    if len(ids) > max_model_len:
        raise _bad(
            f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of {max_model_len}.", None
        )
    if len(ids) == max_model_len:
        raise _bad(
            f"The decoder prompt (length {len(ids)}) plus the number of requested output tokens (at least 1) "
            f"is longer than the maximum model length of {max_model_len}.",
            None,
        )
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 1024:
        raise _bad("Parameter 'cache_salt' must be a string of 1 to 1024 characters if provided.", "cache_salt")
    if request.output_mode != "tokens":
        raise _bad(
            f"output_mode={request.output_mode!r} is not supported by the embedded engine; use 'tokens'", "output_mode"
        )
    if request.priority:
        raise _bad(
            f"priority must be 0, got {request.priority}: the embedded engine serves in order of arrival", "priority"
        )
    for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params"):
        if getattr(request, name):
            raise _bad(f"{name} is not supported by the embedded engine", name)
    _check_sampling(p, vocab=vocab, has_tokenizer=has_tokenizer)


_UNSUPPORTED = (
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
    "logprob_token_ids",
    "prompt_logprobs",
    "prompt_logprob_token_ids",
    "watermarking",
)


def _check_sampling(p: SamplingParams, *, vocab: int, has_tokenizer: bool) -> None:
    for name in _UNSUPPORTED:
        value = getattr(p, name)
        if value is not None and value is not False and value != []:
            raise _bad(f"sampling_params.{name} is not supported by the embedded engine; use vLLM for it", name)
    inf = math.inf
    limits: tuple[tuple[str, float | None, float, float, str], ...] = (
        ("n", p.n, 1, 1, "1 (send the request several times for several samples)"),
        ("temperature", p.temperature, 0.0, 2.0, "in [0, 2]"),
        ("top_k", p.top_k, -1, inf, "0 or -1 (disable), or at least 1"),
        ("min_p", p.min_p, 0.0, 1.0, "in [0, 1]"),
        ("presence_penalty", p.presence_penalty, -2.0, 2.0, "in [-2, 2]"),
        ("frequency_penalty", p.frequency_penalty, -2.0, 2.0, "in [-2, 2]"),
        ("max_tokens", p.max_tokens, 1, inf, "at least 1"),
        (
            "min_tokens",
            p.min_tokens,
            0,
            inf if p.max_tokens is None else p.max_tokens,
            "at least 0 and at most max_tokens",
        ),
        ("logprobs", p.logprobs, 0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]"),
        ("seed", p.seed, -1, 2**63 - 1, "-1 (none) or a non-negative 63-bit integer"),
    )
    for name, value, low, high, text in limits:
        if value is not None and not low <= value <= high:
            raise _bad(f"{name} must be {text}, got {value}. (parameter={name}, value={value})", name)
    if not 0.0 < p.top_p <= 1.0:
        raise _bad(f"top_p must be in (0, 1], got {p.top_p}. (parameter=top_p, value={p.top_p})", "top_p")
    if not (math.isfinite(p.repetition_penalty) and p.repetition_penalty > 0):
        raise _bad(
            f"repetition_penalty must be a finite number greater than zero, got {p.repetition_penalty}.",
            "repetition_penalty",
        )
    for token in p.stop_token_ids or ():
        if not 0 <= token < vocab:
            raise _bad(f"stop_token_ids contains {token}, which is out of vocabulary (size {vocab})", "stop_token_ids")
    for token, bias in (p.logit_bias or {}).items():
        if not 0 <= token < vocab or not math.isfinite(bias):
            raise _bad(
                f"logit_bias has {token}: {bias}; keys must be token ids below {vocab}, values finite", "logit_bias"
            )
    if any(not s for s in p.stop_strings):
        raise _bad("stop cannot contain an empty string.", "stop")
    if p.stop_strings and not has_tokenizer:
        raise _bad("stop strings need a tokenizer.json in the model folder; use stop_token_ids", "stop")


def _bad(message: str, param: str | None) -> ProtocolError:
    return ProtocolError(message, code="BadRequestError", param=param)


def strings(ids: Any) -> list[str]:
    """Return `request_ids` of an abort request; ProtocolError when it is not a list of strings."""
    if not isinstance(ids, list) or not all(isinstance(item, str) for item in ids):
        raise ProtocolError("request_ids must be a list of strings", code="Bad Request", param="body.request_ids")
    return ids
