"""One request inside the engine: its tokens, what sampled them, and when it stops. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gyre_sdk.trainer.engines.wire import LogProbContent, SamplingParams, VersionSpan

__all__ = ["Delta", "Sequence", "append_version", "find_stop"]


def append_version(spans: list[VersionSpan], version: str) -> None:
    """Extend `spans` by one token sampled under `version`. Spans stay contiguous, non-empty and start at 0."""
    end = spans[-1].end if spans else 0
    if spans and spans[-1].version == version:
        spans[-1] = VersionSpan(version, spans[-1].start, end + 1)
    else:
        spans.append(VersionSpan(version, end, end + 1))


def find_stop(text: str, fresh: int, stops: Iterable[str]) -> str | None:
    """Return the stop string that ends within the last `fresh` characters of `text`, the earliest one if several."""
    found = ((text.find(stop, max(0, len(text) - fresh - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in found if at >= 0), default=(0, None))[1]


class Delta(NamedTuple):
    """What one step adds to one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[LogProbContent, ...]
    """As long as `token_ids`, or empty when the request wants none."""
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    """Set exactly when `finish_reason` is `error`."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from submission to its end. Only the model thread changes it after submission."""

    request_id: str
    """With vLLM's prefix. Not unique: two requests with one id are aborted together."""
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str | None
    max_new: int
    """Most tokens to sample; prompt and sampled tokens together fit the context."""
    eos_ids: frozenset[int]
    """Empty with `ignore_eos`."""
    push: Callable[[Delta], None]
    """Called in the event loop with each delta, in order, the finishing one last."""
    decode: Callable[[int], str | None] | None = None
    """Incremental detokenizer, present when stop strings are asked for."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    text: str = ""
    slot: int = -1
    """Row of the KV cache, -1 while waiting."""
    generator: object | None = None
    """torch.Generator of a seeded request; survives recomputation, so its draws do not repeat."""
    finished: bool = False
    cached_tokens: int = 0
    """Tokens of the prompt that a cached prefix supplied when the request was admitted."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.sampled)

    @property
    def never_yet(self) -> list[int]:
        """Return ids that may not be sampled now because `min_tokens` is not reached."""
        if len(self.sampled) >= self.params.min_tokens:
            return []
        return sorted(self.eos_ids.union(self.params.stop_token_ids or ()))

    def append(self, token: int, logprob: float, version: str) -> tuple[str | None, int | str | None]:
        """Record a sampled token; return `(finish_reason, stop_reason)` in vLLM's order of precedence."""
        self.sampled.append(token)
        self.logprobs.append(logprob)
        append_version(self.spans, version)
        stop_string = None
        if self.decode is not None and (piece := self.decode(token)):
            self.text += piece
            if len(self.sampled) >= self.params.min_tokens:
                stop_string = find_stop(self.text, len(piece), self.params.stop_strings)
        if token in self.eos_ids:
            return "stop", None
        if token in (self.params.stop_token_ids or ()):
            return "stop", token
        if stop_string is not None:
            return "stop", stop_string
        if len(self.sampled) >= self.max_new:
            return "length", None
        return None, None
