"""A call as the tree takes it, and what makes its sampled tokens unfit as targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import TreeError
from gyre_sdk.records import CallId, CallRecord, CallStatus, VersionSpan
from gyre_sdk.tree.radix import Ids


class Untrained(StrEnum):
    """Why the sampled tokens of a call are no targets."""

    FAILED = "failed"
    ABORTED = "aborted"
    ORPHAN = "orphan"
    """Its end never reached the agent, and no other call continues it."""
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
    excluded: bool = False
    """True when the call must never be a target, whatever its status."""

    @classmethod
    def from_record(cls, record: CallRecord, *, excluded: bool = False) -> Self:
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
            excluded=excluded,
        )

    def checked_logprobs(self) -> NDArray[np.float64]:
        """Return the log-probs as floats, None as NaN.

        Raises:
            TreeError: they are not numbers, or more than the sampled ids.
        """
        try:
            values = np.asarray(self.logprobs, dtype=np.float64)
        except (ValueError, TypeError) as error:
            raise TreeError(f"call {self.call} has log-probs that are not numbers: {error}") from None
        if len(values) > len(self.sampled_ids):
            raise TreeError(f"call {self.call} has {len(values)} log-probs for {len(self.sampled_ids)} sampled ids")
        return values

    def defect(self) -> Untrained | None:
        """Return why the call is no target by itself, whatever the other calls are."""
        if self.status is CallStatus.FAILED:
            return Untrained.FAILED
        if self.status is CallStatus.ABORTED:
            return Untrained.ABORTED
        if self.excluded:
            return Untrained.EXCLUDED
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
