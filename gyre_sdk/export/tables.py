"""`gyre export`: a store's samples as a file, in one of the formats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_sdk.credit import Row, scored
from gyre_sdk.errors import SettingsError
from gyre_sdk.export import lines
from gyre_sdk.export.chats import Conversation, cleaner, conversation, ends, fork
from gyre_sdk.export.columns import TABLES
from gyre_sdk.export.lines import Line
from gyre_sdk.export.materialise import GroupSamples, materialise
from gyre_sdk.export.writing import kind_of, write
from gyre_sdk.journal import RecordedExchange
from gyre_sdk.journal.reader import Reader
from gyre_sdk.records import RunRecord
from gyre_sdk.trainer.units import Sealer
from gyre_sdk.view.escape import counted

FORMATS = tuple(TABLES)
"""`parquet` (trajectories with all their numbers), `trl`, `sft`, `dpo`."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which runs make supervised and preference sets, and what of them."""

    min_reward: float | None = None
    """Runs with at least this reward."""
    best: int | None = None
    """So many of the best runs of each group. None: the best one where there is no `min_reward`, else all."""
    untrained: bool = False
    """Also trajectories without an advantage (`parquet` only)."""
    whole: bool = False
    """Preferences: everything that follows the common messages, not the next answer alone."""


@dataclass(slots=True)
class Exported:
    """What came of an export."""

    lines: int = 0
    groups: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Runs, groups and pairs that gave no line, by reason."""


def export(journal: Reader, sealer: Sealer, form: str, path: Path, wanted: Wanted = Wanted()) -> Exported:
    """Write what a store would train to a file.

    Args:
        form: one of `FORMATS`.
        path: ends in `.parquet` or `.jsonl`.

    Raises:
        SettingsError: there is no such format, the file cannot be written, or a package is missing.
        HookError, JournalError, TreeError: as `materialise`.
    """
    if form not in TABLES:
        raise SettingsError(f"format {form!r} is unknown; use one of {', '.join(FORMATS)}")
    kind_of(path)
    report = Exported()
    clean = cleaner(os.environ)

    def made() -> Iterator[Line]:
        for group in materialise(journal, sealer):
            report.groups += group.group is not None
            match form:
                case "parquet":
                    yield from _trajectories(group, wanted, report)
                case "trl":
                    yield from _trl(group, report)
                case "sft":
                    yield from _sft(journal, group, sealer, wanted, clean, report)
                case _:
                    yield from _dpo(journal, group, sealer, wanted, clean, report)

    report.lines = write(path, TABLES[form], made(), {"format": form, **sealer.settings})
    report.left_out = +report.left_out
    return report


def _trajectories(group: GroupSamples, wanted: Wanted, report: Exported) -> Iterator[Line]:
    rows = group.rows if wanted.untrained else group.trained
    runs = _counted(group, rows, report)
    return (lines.trajectory(row, runs[row.run]) for row in rows)


def _trl(group: GroupSamples, report: Exported) -> Iterator[Line]:
    number, trained = report.groups - 1, group.trained
    runs = _counted(group, trained, report)
    return (lines.trl(row, runs[row.run], number) for row in trained)


def _counted(group: GroupSamples, kept: Sequence[Row], report: Exported) -> dict[str, RunRecord]:
    """Count what gives no line; return the group's runs by id."""
    report.left_out["rows_without_advantage"] += len(group.rows) - len(kept)
    report.left_out["run_without_targets"] += len(group.runs) - len({row.run for row in group.rows})
    return {run.run: run for run in group.runs}


def _sft(
    journal: Reader, group: GroupSamples, sealer: Sealer, wanted: Wanted, clean: Callable[[str], str], report: Exported
) -> Iterator[Line]:
    for run in _best(group, wanted, report):
        found = _conversations(journal, group, sealer, run, clean)
        report.left_out["run_without_conversation"] += not found
        for one in found:
            yield {"messages": one.messages, "tools": one.tools, **lines.of_run(run, role=one.role, leaf=one.leaf)}


def _dpo(
    journal: Reader, group: GroupSamples, sealer: Sealer, wanted: Wanted, clean: Callable[[str], str], report: Exported
) -> Iterator[Line]:
    """Pair the best run of a group with the worst, the second best with the second worst, and so on."""
    if group.group is None:
        report.left_out["run_without_group"] += 1
        return
    ranked = _ranked(group)
    pairs = list(zip(ranked, reversed(ranked), strict=True))[: len(ranked) // 2]
    for better, worse in pairs[: wanted.best]:
        high, low = _reward(better), _reward(worse)
        if high <= low or (wanted.min_reward is not None and high < wanted.min_reward):
            report.left_out["pair_without_contrast" if high <= low else "pair_below_min_reward"] += 1
            continue
        mine, theirs = (_conversations(journal, group, sealer, run, clean) for run in (better, worse))
        found = [
            (at, -left - right, one, other)
            for left, one in enumerate(mine)
            for right, other in enumerate(theirs)
            if one.tools == other.tools and (at := fork(one, other)) is not None
        ]
        if not found:
            report.left_out["pair_without_common_prompt"] += 1
            continue
        at, _, one, other = max(found, key=lambda fit: fit[:2])
        stop = None if wanted.whole else at + 1
        yield {
            "prompt": one.messages[:at],
            "chosen": one.messages[at:stop],
            "rejected": other.messages[at:stop],
            "tools": one.tools,
            "group": group.group,
            "task": better.task,
            "chosen_run": better.run,
            "rejected_run": worse.run,
            "chosen_reward": high,
            "rejected_reward": low,
        }


def _reward(run: RunRecord) -> float:
    assert run.reward is not None
    return run.reward


def _ranked(group: GroupSamples) -> list[RunRecord]:
    """Return the runs with a reward, the highest first; equal ones by member."""
    return sorted((run for run in group.runs if scored(run)), key=lambda run: (-_reward(run), run.member, run.run))


def _best(group: GroupSamples, wanted: Wanted, report: Exported) -> Sequence[RunRecord]:
    """Return the runs that a supervised set takes of a group: none of a group whose rewards show no best one."""
    ranked = _ranked(group)
    report.left_out["run_unscored"] += len(group.runs) - len(ranked)
    if wanted.min_reward is None and (group.credit is None or group.credit.dropped is not None):
        report.left_out["group_without_contrast" if group.group is not None else "run_without_group"] += 1
        return []
    kept = [run for run in ranked if wanted.min_reward is None or _reward(run) >= wanted.min_reward]
    many = 1 if wanted.best is None and wanted.min_reward is None else wanted.best
    report.left_out["run_below_the_best"] += len(ranked) - len(kept[:many])
    return kept[:many]


def _conversations(
    journal: Reader, group: GroupSamples, sealer: Sealer, run: RunRecord, clean: Callable[[str], str]
) -> list[Conversation]:
    """Return the conversations that a run's trajectories end with; of a run without token ids, those nobody goes on from.

    A trajectory ends with its last trained answer: the call after it may have failed before there was one.
    """
    exchanges = journal.exchanges(run.run)
    by_call: dict[str, RecordedExchange] = {exchange.call: exchange for exchange in exchanges}
    answers = [row.call_ids[-1] for row in group.rows if row.run == run.run]
    chosen = [by_call[call] for call in answers if call in by_call]
    if not chosen:
        rank = {role.name: place for place, role in enumerate(sealer.roles)}
        last = sorted(ends(exchanges), key=lambda one: (rank.get(one.role, len(rank)), one.role))
        chosen = last[: sealer.j_max]
    found = [conversation(one, clean) for one in chosen]
    return [one for one in found if one is not None]


def summary(report: Exported, path: Path, form: str) -> str:
    """Return a line for people."""
    left = ", ".join(f"{count} {reason}" for reason, count in sorted(report.left_out.items()))
    return f"{counted(report.lines, 'line')} ({form}) in {path}" + (f"; left out: {left}" if left else "")


def as_json(report: Exported, path: Path, form: str) -> dict[str, Any]:
    """Return the same for programs."""
    return {"format": form, "path": str(path), "lines": report.lines, "left_out": dict(report.left_out)}
