"""What came of a run that was asked for: all that the trainer learns of it beside the record."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gyre_sdk import errors
from gyre_sdk.errors import GyreError, ServiceError, TrainerError
from gyre_sdk.records import RunResult


class OutcomeKind(StrEnum):
    """How a run came to its end."""

    ENDED = "ended"
    """The agent came to an end, or a budget did. It is on record."""
    RAISED = "raised"
    """The agent raised something. It is on record."""
    FAILED = "failed"
    """Something of gyre's did, such as its workspace. It is on record, unless it could not even begin."""
    SERVICE = "service"
    """The recording service could not be reached: it may be on record, or not."""
    LOST = "lost"
    """The agents' process died under it, again and again. Each time it was recorded as cancelled."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of one run."""

    kind: OutcomeKind
    error: str = ""
    """What was raised, in words."""
    name: str = ""
    """Class of what was raised."""
    result: RunResult | None = None
    """Where it ended."""

    def checked(self) -> RunResult:
        """Return the result of a run that ended.

        Raises:
            GyreError: of the class that was raised in the agents' process, where a message is all that it holds.
            RuntimeError: the agent raised something; its class is in the message.
        """
        if self.kind is OutcomeKind.ENDED and self.result is not None:
            return self.result
        if self.kind is OutcomeKind.SERVICE:
            raise ServiceError(self.error)
        if self.kind is OutcomeKind.RAISED:
            raise RuntimeError(str(self))
        raise error_of(self.name, self.error)

    def __str__(self) -> str:
        return f"{self.name}: {self.error}" if self.name else self.error


_PLAIN = ("SettingsError", "TaskError", "WorkspaceError", "ImageMissing", "WorkspaceUnavailable", "ScoringError")
"""Errors of gyre's that a message makes."""


def error_of(name: str, text: str) -> GyreError:
    """Return an error as another process raised it: a `TrainerError` where its class holds more than a message."""
    if name in _PLAIN:
        found: GyreError = getattr(errors, name)(text)
        return found
    return TrainerError(f"{name}: {text}" if name else text)
