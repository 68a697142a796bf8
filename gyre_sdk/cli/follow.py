"""Turn what a store holds into events, so that a view can follow processes that it is no part of."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import msgspec

from gyre_sdk.events import (
    CallRecorded,
    CellMoved,
    CellsSeen,
    Event,
    LaneOpened,
    RunEnded,
    RunStarted,
    StepSkipped,
    StepTaken,
    SwitchMeasured,
    UnitsCommitted,
    VersionPublished,
)
from gyre_sdk.journal import Entry, Journal
from gyre_sdk.records import CallStatus, RunRecord, RunStatus
from gyre_sdk.view import cells

_OPEN = (CallStatus.RECEIVED, CallStatus.DISPATCHED, CallStatus.STREAMING)


class Follower:
    """Asks a store again and again, and tells each thing once."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._running: set[str] = set()
        self._ended: set[str] = set()
        self._lanes: set[str] = set()
        self._call_seq = 0
        self._waiting: set[int] = set()
        self._training = _Training()
        self._cells = _Cells()

    @property
    def going(self) -> int:
        """Runs that have not ended."""
        return len(self._running)

    def poll(self) -> list[Event]:
        """Return what is new since the last time, runs before their calls, ends after them."""
        records = self._journal.runs()
        found: list[Event] = list(self._started(records))
        found += self._opened()
        found += self._recorded({run.run for run in records if run.status is not RunStatus.RUNNING})
        found += self._finished(records)
        found += self._training.events(self._journal)
        found += self._cells.events(self._journal)
        return sorted(found, key=lambda event: event.at)

    def _started(self, records: list[RunRecord]) -> Iterator[Event]:
        for run in records:
            if run.run not in self._running and run.run not in self._ended:
                self._running.add(run.run)
                split = run.metadata.get("split", "train")
                yield RunStarted(
                    run.created_at, run.run, run.task, run.group, split if isinstance(split, str) else "train"
                )

    def _opened(self) -> Iterator[Event]:
        for lane in self._journal.lanes():
            if lane.lane not in self._lanes:
                self._lanes.add(lane.lane)
                yield LaneOpened(lane.created_at, lane.run, lane.lane, lane.role, lane.name)

    def _recorded(self, ended: set[str]) -> Iterator[Event]:
        """Tell calls whose answer is complete; the others are asked for again until their run has ended."""
        for call in self._journal.call_summaries(self._call_seq, also=self._waiting):
            self._call_seq = max(self._call_seq, call.seq)
            if call.status in _OPEN and call.run not in ended:
                self._waiting.add(call.seq)
                continue
            self._waiting.discard(call.seq)
            if call.status not in _OPEN and call.ended_at is not None:
                yield CallRecorded(
                    call.ended_at,
                    call.run,
                    call.lane,
                    call.role,
                    call.call,
                    call.prompt_tokens,
                    call.sampled_tokens,
                    call.version,
                )

    def _finished(self, records: list[RunRecord]) -> Iterator[Event]:
        for run in records:
            if run.status is not RunStatus.RUNNING and run.run not in self._ended and run.ended_at is not None:
                self._ended.add(run.run)
                self._running.discard(run.run)
                yield RunEnded(
                    run.ended_at,
                    run.run,
                    run.status,
                    run.reward,
                    run.ended_at - run.created_at,
                    run.placeholder,
                )


class _Cells:
    """What cells did, where the store has it. Steps and versions are told by the trainer's ledger."""

    def __init__(self) -> None:
        self._after = 0

    def events(self, journal: Journal) -> list[Event]:
        """Return what is new."""
        entries = journal.entries(cells.STREAM, self._after)
        self._after = max((entry.seq for entry in entries), default=self._after)
        told = (CellMoved, CellsSeen, SwitchMeasured, UnitsCommitted)
        return [event for event in cells.read(entry.body for entry in entries).events if isinstance(event, told)]


class _Training:
    """Steps and versions out of the trainer's ledger, when the store has one."""

    def __init__(self) -> None:
        self._after = 0
        self._rewards: dict[str, list[float]] = {}
        self._groups: dict[int, list[str]] = {}
        self._units: dict[str, tuple[int, int]] = {}

    def events(self, journal: Journal) -> Iterator[Event]:
        """Yield what the ledger says that is new."""
        ledger: Any = importlib.import_module("gyre_sdk.trainer.ledger")
        for entry in journal.entries(ledger.STREAM, self._after):
            self._after = entry.seq
            event = self._event(ledger, entry)
            if event is not None:
                yield event

    def _event(self, ledger: Any, entry: Entry) -> Event | None:
        item: Any = msgspec.msgpack.decode(entry.body, type=ledger.Item)
        if isinstance(item, ledger.GroupClosed):
            self._rewards[item.group] = [reward for reward in item.rewards if reward is not None]
        elif isinstance(item, ledger.StepStarted):
            self._groups[item.step] = list(item.groups)
        elif isinstance(item, ledger.GroupTaken):
            self._groups[item.step].append(item.group)
        elif isinstance(item, ledger.UnitSealed):
            self._units[item.unit] = (item.runs, item.tokens)
        elif isinstance(item, ledger.VersionPublished):
            return VersionPublished(entry.at, item.version, 0.0)
        elif isinstance(item, ledger.StepCommitted):
            return self._step(item, entry.at)
        return None

    def _step(self, item: Any, at: float) -> Event:
        if not item.units:
            return StepSkipped(at, item.step, "nothing to train")
        rewards = [reward for group in self._groups.get(item.step, []) for reward in self._rewards.get(group, [])]
        sizes = [self._units.get(unit, (0, 0)) for unit in item.units]
        return StepTaken(
            at=at,
            step=item.step,
            steps=0,
            loss=item.metrics.get("loss", float("nan")),
            grad_norm=item.metrics.get("grad_norm", float("nan")),
            trained_tokens=sum(tokens for _, tokens in sizes),
            runs=sum(runs for runs, _ in sizes),
            mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
            success=sum(reward >= 1 for reward in rewards) / len(rewards) if rewards else 0.0,
        )
