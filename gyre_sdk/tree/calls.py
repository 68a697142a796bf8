"""A call as the tree takes it, and what makes its sampled tokens unfit as targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallRecord, CallStatus, ForkReason, VersionSpan
from gyre_sdk.tree.radix import Ids, Routes

_EXPERTS = 1 << 16
"""Expert ids fit 16 bits."""


class Untrained(StrEnum):
    """Why the sampled tokens of a call are no targets."""

    FAILED = "failed"
    ABORTED = "aborted"
    ORPHAN = "orphan"
    """Its end never reached the agent, and no other call continues it."""
    REJECTED = "rejected"
    """An attempt at a compaction that was not taken up (PrimeIntellect-ai/prime-rl#3478): the caller says so, or another
    attempt at the same compaction came into a later prompt and this one did not."""
    NO_LOGPROBS = "no_logprobs"
    """A behaviour log-prob is missing or not finite."""
    NO_VERSION = "no_version"
    """A sampled token does not know the policy version that sampled it."""
    HOSTED = "hosted"
    """A hosted model answered: there are no token ids."""
    EXCLUDED = "excluded"
    """The caller left it out."""


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call as the tree takes it."""

    call: CallId
    prompt_ids: Ids
    """Ids sent to the engine. Not kept: what is new in them is copied into the tree."""
    sampled_ids: Ids
    """Ids sampled by the engine."""
    logprobs: Sequence[float | None]
    """Behaviour log-prob (nats) per sampled id."""
    versions: Sequence[VersionSpan]
    """Cover `sampled_ids` without gaps."""
    role: str = "main"
    lane: str = ""
    status: CallStatus = CallStatus.DELIVERED
    parent: CallId | None = None
    """The parent that was recorded. A hint: it decides only between calls whose tokens fit equally well."""
    fork_reason: ForkReason | None = None
    """Why the prompt leaves the recorded parent's path, as recorded; None where it does not."""
    shared: int = 0
    """Tokens shared with the recorded parent's prompt + sampled ids, as recorded."""
    excluded: bool = False
    """True when the call must never be a target, whatever its status."""
    rejected: bool = False
    """True when the call is known to be an attempt at a compaction that was not taken up."""
    routes: NDArray[np.integer] | None = None
    """Experts that the engine chose per token of prompt + sampled ids, (tokens, layers * top_k) or (tokens, layers, top_k);
    the last token's may be missing, since no engine has computed it yet. None where they are not recorded.

    vLLM's `/inference/v1/generate` gives them as `routed_experts` of a choice, if it was started with
    `--enable-return-routed-experts`: base64 of a `.npy` file, (tokens - 1, layers, top_k), uint8, uint16 or int32. A request
    with `routed_experts_prompt_start` gets none for the tokens before it: whoever records it puts the rows of the call
    that it continues in front.

    A prompt that repeats recorded tokens on other routes does not continue them: to replay the routes in training, both
    have to be computed. Calls with and without routes are kept apart likewise, so that every path can be replayed whole
    or not at all, and no call without routes can join two that contradict each other."""

    @classmethod
    def from_record(cls, record: CallRecord, *, excluded: bool = False, rejected: bool = False) -> Self:
        """Take a recorded call."""
        return cls(
            call=record.call,
            prompt_ids=_as_ids(record.prompt_ids, record.call),
            sampled_ids=_as_ids(record.sampled_ids, record.call),
            logprobs=record.logprobs,
            versions=record.versions,
            role=record.role,
            lane=record.lane,
            status=record.status,
            parent=record.parent,
            fork_reason=record.fork_reason,
            shared=record.shared,
            excluded=excluded,
            rejected=rejected,
        )

    def checked_logprobs(self) -> NDArray[np.float32] | NDArray[np.float64]:
        """Return the log-probs as floats, None as NaN; in 32 bits each where that is exact, as it is for stored ones.

        Raises:
            TreeError: they are not numbers, or more than the sampled ids.
        """
        try:
            values = np.asarray(self.logprobs, dtype=np.float64)
        except (ValueError, TypeError) as error:
            raise TreeError(f"call {self.call} has log-probs that are not numbers: {error}") from None
        if len(values) > len(self.sampled_ids):
            raise TreeError(f"call {self.call} has {len(values)} log-probs for {len(self.sampled_ids)} sampled ids")
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        return narrow if np.array_equal(narrow, values, equal_nan=True) else values

    def checked_routes(self) -> Routes | None:
        """Return the expert ids, one row per token, in the narrowest type.

        Raises:
            TreeError: there are not as many rows as tokens, or they are not expert ids.
        """
        if self.routes is None:
            return None
        tokens, rows = len(self.prompt_ids) + len(self.sampled_ids), self.routes
        if rows.ndim == 3:
            rows = rows.reshape(len(rows), rows.shape[1] * rows.shape[2])
        if rows.ndim != 2 or len(rows) not in (tokens - 1, tokens) or not rows.shape[1]:
            raise TreeError(
                f"call {self.call} has routes of shape {self.routes.shape} for {tokens} tokens; give one row per token, "
                "the last one's may be missing"
            )
        largest = int(rows.max(initial=0))
        if not np.issubdtype(rows.dtype, np.integer) or rows.min(initial=0) < 0 or largest >= _EXPERTS:
            raise TreeError(f"call {self.call} has routes that are not expert ids from 0 to {_EXPERTS - 1}")
        return rows.astype(np.uint8 if largest < 256 else np.uint16, copy=False)

    def flaw(self) -> Untrained | None:
        """Return why the call is no target, whatever became of it and whatever the other calls are."""
        if self.excluded:
            return Untrained.EXCLUDED
        if self.rejected:
            return Untrained.REJECTED
        if not len(self.prompt_ids) and not len(self.sampled_ids):
            return Untrained.HOSTED
        size, logprobs = len(self.sampled_ids), self.checked_logprobs()
        if len(logprobs) < size or not np.isfinite(logprobs).all():
            return Untrained.NO_LOGPROBS
        covered = 0
        for span in sorted(self.versions, key=lambda span: span.start):
            if span.start > covered or span.version < 0:
                return Untrained.NO_VERSION
            covered = max(covered, span.end)
        return Untrained.NO_VERSION if covered < size else None


def _as_ids(ids: Sequence[int], call: CallId) -> Ids:
    try:
        return np.asarray(ids, dtype=np.int32)
    except (OverflowError, ValueError, TypeError) as error:
        raise TreeError(f"call {call} has ids that are not 32-bit integers: {error}") from None
