"""What a cell is doing, and what it may do next: one table.

A cell is devices with one replica and one training worker; only one of the two runs at a time. The way to training is
`serving -> draining -> switching -> training`, the way back `training -> loading -> serving`. A cell may fail anywhere; a
failed or stopped one comes back by loading weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from gyre_sdk.errors import TrainerError


class CellState(StrEnum):
    """What a cell is doing."""

    SERVING = "serving"
    """Its replica takes requests."""
    DRAINING = "draining"
    """It takes no new request; those in flight end or are carried to other cells."""
    SWITCHING = "switching"
    """Its replica goes to sleep, its worker gets memory and the weights to train."""
    TRAINING = "training"
    """Its worker takes units."""
    LOADING = "loading"
    """Its replica wakes up and gets the newest weights."""
    FAILED = "failed"
    """It does not answer, or a phase of a switch failed."""
    STOPPED = "stopped"
    """It was told to end."""


class CellEvent(StrEnum):
    """What happens to a cell."""

    LEAVE = "leave"
    """The plan wants it to train: taken out of routing."""
    DRAINED = "drained"
    """No request is left on it."""
    READY = "ready"
    """Its worker holds the weights of the open batch."""
    RETURN = "return"
    """The plan wants it to serve: its contribution was offered or given back."""
    LOADED = "loaded"
    """Its replica serves the newest version: back in routing."""
    STAY = "stay"
    """The plan took a leave back before the replica slept."""
    FAIL = "fail"
    """It died, or did not answer in time."""
    START = "start"
    """It dials in, for the first time or again."""
    STOP = "stop"
    """It was told to end."""


_S, _E = CellState, CellEvent
_ANYWHERE = {_E.FAIL: _S.FAILED, _E.STOP: _S.STOPPED}
TRANSITIONS: Mapping[CellState, Mapping[CellEvent, CellState]] = MappingProxyType(
    {
        _S.SERVING: {_E.LEAVE: _S.DRAINING, **_ANYWHERE},
        _S.DRAINING: {_E.DRAINED: _S.SWITCHING, _E.STAY: _S.SERVING, **_ANYWHERE},
        _S.SWITCHING: {_E.READY: _S.TRAINING, _E.RETURN: _S.LOADING, **_ANYWHERE},
        _S.TRAINING: {_E.RETURN: _S.LOADING, **_ANYWHERE},
        _S.LOADING: {_E.LOADED: _S.SERVING, **_ANYWHERE},
        _S.FAILED: {_E.START: _S.LOADING, _E.STOP: _S.STOPPED},
        _S.STOPPED: {_E.START: _S.LOADING},
    }
)
"""State -> event -> next state. What is not in it is illegal."""


def after(state: CellState, event: CellEvent) -> CellState:
    """Return what a cell becomes.

    Raises:
        TrainerError: the event cannot happen in that state.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        legal = ", ".join(TRANSITIONS[state])
        raise TrainerError(f"a cell that is {state} cannot {event}; it can: {legal}") from None
