"""The events that tell what cells did, and what a store keeps of them: one entry of the stream `cells` per event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from gyre_sdk.events import (
    CellMoved,
    CellsSeen,
    Event,
    StepTaken,
    SwitchFailed,
    SwitchMeasured,
    UnitsCommitted,
    VersionPublished,
)

STREAM = "cells"
RECORDED = (CellMoved, CellsSeen, SwitchFailed, SwitchMeasured, UnitsCommitted, VersionPublished, StepTaken)
"""What is recorded of all events."""
_LATEST = 1e11
"""Seconds since the epoch; what claims to be later, or before it, is no event."""


class RecordingStarted(Event, frozen=True, tag=True):
    """A training began to record; what an earlier one left open ended with its last event."""


class EventsMissed(Event, frozen=True, tag=True):
    """Events were not recorded: the disk did not keep up, or refused them."""

    count: int


_Item = (
    CellMoved
    | CellsSeen
    | SwitchFailed
    | SwitchMeasured
    | UnitsCommitted
    | VersionPublished
    | StepTaken
    | RecordingStarted
    | EventsMissed
)
_decode = msgspec.msgpack.Decoder(_Item).decode  # type: ignore[var-annotated]


class Read(NamedTuple):
    """What entries say."""

    events: list[Event]
    unknown: int
    """Entries that this version of gyre cannot read."""


def read(bodies: Iterable[bytes]) -> Read:
    """Return the events of entries' bodies, in order; those of a newer version, or cut short, are only counted."""
    events: list[Event] = []
    unknown = 0
    for body in bodies:
        try:
            event: Event = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            unknown += 1
            continue
        if 0 <= event.at <= _LATEST:
            events.append(event)
        else:
            unknown += 1
    return Read(events, unknown)
