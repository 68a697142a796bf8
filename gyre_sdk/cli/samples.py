"""Commands that make training data again from a store: what would be trained, and files for other trainers."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from gyre_sdk.cli.store import (
    AsJson,
    OneRun,
    Store,
    add_row,
    check_run,
    json_line,
    new_table,
    open_store,
    ordered,
    print_table,
)
from gyre_sdk.credit import Baseline
from gyre_sdk.errors import SettingsError
from gyre_sdk.select import J_MAX, ROLES, Role
from gyre_sdk.view.escape import counted

if TYPE_CHECKING:
    from gyre_sdk.credit import Row
    from gyre_sdk.export import GroupSamples
    from gyre_sdk.trainer.units import Sealer

_SAMPLE_KEYS = ("run", "path_ids", "owned", "weights", "advantage", "role")


class Format(StrEnum):
    """What is written."""

    PARQUET = "parquet"
    TRL = "trl"
    SFT = "sft"
    DPO = "dpo"


Rule = Annotated[
    str, typer.Option("--rule", help="Selection: paper, all, longest, main_only, or module:function.", metavar="RULE")
]
JMax = Annotated[int, typer.Option("--j-max", min=0, help="Trajectories per run at most; 0 for all.")]
Seed = Annotated[int, typer.Option("--seed", help="Decides the draws.")]
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role",
        help="Roles in order, each with its loss weight and its own --j-max where given. Repeat it.",
        metavar="NAME[:WEIGHT[:J_MAX]]",
        show_default=False,
    ),
]
HowBaseline = Annotated[Baseline, typer.Option("--baseline", help="How a reward becomes an advantage.")]
MaxStaleness = Annotated[
    int | None,
    typer.Option("--max-staleness", min=0, help="Mask calls that were more steps old than this.", show_default=False),
]
MaskTruncated = Annotated[bool, typer.Option("--mask-truncated", help="Mask calls cut off by their length limit.")]
Hook = Annotated[
    str | None,
    typer.Option("--credit-hook", help="Rewards per role or call.", metavar="MODULE:FUNCTION", show_default=False),
]


def samples(
    store: Store,
    rule: Rule = "paper",
    j_max: JMax = J_MAX,
    seed: Seed = 0,
    role: Roles = None,
    baseline: HowBaseline = Baseline.MEAN,
    max_staleness: MaxStaleness = None,
    mask_truncated: MaskTruncated = False,
    credit_hook: Hook = None,
    groups: Annotated[bool, typer.Option("--groups", help="One line per group instead of per trajectory.")] = False,
    as_json: AsJson = False,
    run: OneRun = None,
) -> None:
    """List the trajectories that would be trained, with their weights and advantages, and what would not, by reason."""
    sealer = _sealer(rule, j_max, seed, role, baseline, max_staleness, mask_truncated, credit_hook)
    export: Any = importlib.import_module("gyre_sdk.export")
    rows_table = new_table("group", "run", "role", "leaf", "tokens", "owned", "weight", "advantage", right=(4, 5, 6, 7))
    group_table = new_table(
        "group", "scored", "mean", "rows", "owned", "raw/unique", "not trained", right=(1, 2, 3, 4, 5)
    )
    rows, dropped, alone = 0, Counter[str](), _Alone()
    with open_store(store) as journal:
        check_run(journal, run)
        found: GroupSamples
        for found in export.materialise(journal, sealer, only=None if run is None else {run}):
            rows += len(found.rows)
            dropped.update(found.dropped)
            if as_json and groups:
                json_line(_group_object(found))
            elif as_json:
                for one in found.rows:
                    json_line(ordered(_object(one, found.group), _SAMPLE_KEYS))
            else:
                for one in found.rows:
                    _row(rows_table, one, found.group)
                if found.group is None:
                    alone.add(found)
                else:
                    _group_row(group_table, found)
    alone.row(group_table)
    calls = ", ".join(
        f"{n} {name.removeprefix('call_')}" for name, n in sorted(dropped.items()) if name.startswith("call_")
    )
    rest = ", ".join(f"{number} {name}" for name, number in sorted(dropped.items()) if not name.startswith("call_"))
    summary = counted(rows, "trajectory", "trajectories")
    summary += f"; calls that are no targets: {calls}" if calls else ""
    summary += f"; not trained: {rest}" if rest else ""
    if as_json:
        typer.echo(summary, err=True)
        return
    if not groups:
        print_table(rows_table, "")
    print_table(group_table, summary)


def export(
    store: Store,
    form: Annotated[Format, typer.Option("--format", help="Trajectories (parquet), or sets for TRL's trainers.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File: OUT.parquet or OUT.jsonl.", show_default=False)],
    rule: Rule = "paper",
    j_max: JMax = J_MAX,
    seed: Seed = 0,
    role: Roles = None,
    baseline: HowBaseline = Baseline.MEAN,
    max_staleness: MaxStaleness = None,
    mask_truncated: MaskTruncated = False,
    credit_hook: Hook = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="sft, dpo: runs with at least this reward.", show_default=False)
    ] = None,
    best: Annotated[
        int | None,
        typer.Option(
            "--best", min=1, help="sft: best runs of each group; dpo: pairs of each group.", show_default=False
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="dpo: all that follows, not the next answer alone.")] = False,
    untrained: Annotated[bool, typer.Option("--all", help="parquet: also trajectories without an advantage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write training data to a file: trajectories with all their numbers, or sets for other trainers."""
    sealer = _sealer(rule, j_max, seed, role, baseline, max_staleness, mask_truncated, credit_hook)
    tables: Any = importlib.import_module("gyre_sdk.export.tables")
    wanted = tables.Wanted(min_reward=min_reward, best=best, untrained=untrained, whole=whole)
    with open_store(store) as journal:
        report = tables.export(journal, sealer, str(form), output, wanted)
    if as_json:
        json_line(tables.as_json(report, output, str(form)))
    else:
        typer.echo(tables.summary(report, output, form))


def _sealer(
    rule: str,
    j_max: int,
    seed: int,
    roles: list[str] | None,
    baseline: Baseline,
    max_staleness: int | None,
    mask_truncated: bool,
    credit_hook: str | None,
) -> Sealer:
    units: Any = importlib.import_module("gyre_sdk.trainer.units")
    made: Sealer = units.Sealer(
        j_max=j_max or None,
        seed=seed,
        baseline=baseline,
        rule=rule,
        roles=tuple(map(_role, roles)) if roles else ROLES,
        max_staleness=max_staleness,
        mask_truncated=mask_truncated,
        credit_hook=credit_hook,
        base=Path.cwd(),
    )
    return made


def _role(text: str) -> Role:
    """Read `NAME[:WEIGHT[:J_MAX]]`."""
    name, *numbers = text.split(":")
    try:
        weight = float(numbers[0]) if numbers and numbers[0] else 1.0
        j_max = int(numbers[1]) if len(numbers) > 1 and numbers[1] else None
    except ValueError:
        numbers = ["", "", ""]
    if not name or len(numbers) > 2:
        raise SettingsError(f"--role {text!r} is not NAME[:WEIGHT[:J_MAX]], for example subagent:0.5:2")
    return Role(name, weight, j_max)


def _object(one: Row, group: str | None) -> dict[str, Any]:
    return {**msgspec.to_builtins(one.record()), "group": group}


def _row(rows: Table, one: Row, group: str | None) -> None:
    advantage = f"{one.advantage:+.3f}" if isfinite(one.advantage) else "none"
    sizes = str(len(one.ids)), str(len(one.targets)), f"{one.weights.sum():.3f}"
    add_row(rows, group or "", one.run, one.role, one.leaf, *sizes, advantage)


def _group_object(found: GroupSamples) -> dict[str, Any]:
    credit, trained = found.credit, found.trained
    raw, unique = found.row_tokens
    return {
        "group": found.group,
        "runs": [run.run for run in found.runs],
        "rewards": [run.reward for run in found.runs],
        "advantages": {} if credit is None else credit.advantages,
        "scored": 0 if credit is None else credit.scored,
        "mean": None if credit is None else credit.mean,
        "std": None if credit is None else credit.std,
        "rows": len(trained),
        "owned_tokens": sum(len(one.targets) for one in trained),
        "row_tokens": raw,
        "unique_row_tokens": unique,
        "calls": found.calls,
        "raw_tokens": found.raw_tokens,
        "unique_tokens": found.unique_tokens,
        "dropped": dict(found.dropped),
        "dropped_tokens": dict(found.dropped_tokens),
    }


def _group_row(groups: Table, found: GroupSamples) -> None:
    one = _group_object(found)
    mean = "" if one["mean"] is None else f"{one['mean']:.3f}"
    scored = f"{one['scored']} of {len(found.runs)}"
    sharing = f"{one['row_tokens']}/{one['unique_row_tokens']}"
    dropped = _reasons(found.dropped, found.dropped_tokens)
    add_row(groups, found.group or "", scored, mean, str(one["rows"]), str(one["owned_tokens"]), sharing, dropped)


def _reasons(dropped: Counter[str], tokens: Counter[str]) -> str:
    """Return what is not trained: 3 call_stale (57 tokens), 1 group_flat."""
    return ", ".join(
        f"{number} {name}" + (f" ({counted(tokens[name], 'token')})" if name in tokens else "")
        for name, number in sorted(dropped.items())
    )


@dataclass(slots=True)
class _Alone:
    """What runs without a group add up to: nothing compares them, so one line says all of them."""

    runs: list[str] = field(default_factory=list)
    rows: int = 0
    owned: int = 0
    raw: int = 0
    unique: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)

    def add(self, found: GroupSamples) -> None:
        """Take in a run."""
        one = _group_object(found)
        self.runs += [run.run for run in found.runs]
        self.rows, self.owned = self.rows + one["rows"], self.owned + one["owned_tokens"]
        self.raw, self.unique = self.raw + one["row_tokens"], self.unique + one["unique_row_tokens"]
        self.dropped.update(found.dropped)
        self.dropped_tokens.update(found.dropped_tokens)

    def row(self, groups: Table) -> None:
        """Add the line, where there is such a run."""
        if not self.runs:
            return
        name = f"run {self.runs[0]}, no group" if len(self.runs) == 1 else f"{len(self.runs):,} runs without a group"
        sharing, dropped = f"{self.raw}/{self.unique}", _reasons(self.dropped, self.dropped_tokens)
        add_row(groups, name, "", "", str(self.rows), str(self.owned), sharing, dropped)
