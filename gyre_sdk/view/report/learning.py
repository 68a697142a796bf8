"""The report's section on a training: curves over steps, evaluations, the last steps as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

from gyre_sdk.view.escape import counted
from gyre_sdk.view.report.plot import Curve, curves, stacked
from gyre_sdk.view.report.tables import Column, number, reward, seconds, table
from gyre_sdk.view.report.training import Evaluation, StepRow, Training

_LAST = 20
"""Steps in the table."""
_EVALUATIONS = 60
_PARTS = ("waiting for runs", "training", "publishing")


def section(found: Training) -> str:
    """Return the section."""
    steps = [row for row in found.steps if not row.skipped]
    charts = "".join(_charts(found.steps, steps, found.evaluations))
    said = f"{counted(len(found.steps), 'step')}, {counted(found.tokens, 'token')} trained"
    said += f"; {counted(found.skipped, 'step')} skipped, with nothing to train" if found.skipped else ""
    said += f"; taken up again {counted(found.resumed, 'time')}" if found.resumed else ""
    return (
        f'<h2 id="training">Training</h2><p>{said}.</p>{_mismatch(steps)}<div class="charts">{charts}</div>'
        + _evaluated(found.evaluations)
        + _table(found.steps)
    )


def _mismatch(steps: Sequence[StepRow]) -> str:
    """Say where the trainer's log-probs are farthest from those that the engine recorded."""
    known = [row for row in steps if isfinite(row.difference)]
    if not known:
        return ""
    worst = max(known, key=lambda row: row.difference)
    return (
        f'<p class="dim">Trainer against engine: the mean difference of log-probs is largest at step {worst.step},'
        f" {number(worst.difference)} nats (99% of the tokens below {number(worst.difference_p99)}, one at"
        f" {number(worst.difference_max)}).</p>"
    )


def _charts(rows: Sequence[StepRow], steps: Sequence[StepRow], evaluated: Sequence[Evaluation]) -> list[str]:
    placed = [one for one in evaluated if one.step is not None]
    labels = [one.name for one in placed]
    means = Curve("evaluations", [(float(one.step or 0), one.reward) for one in placed], 2, dots=True, labels=labels)
    solved = Curve("evaluations", [(float(one.step or 0), one.solved) for one in placed], 2, dots=True, labels=labels)
    band = [(float(row.step), max(row.low, row.reward - row.std), min(row.high, row.reward + row.std)) for row in rows]
    ratios = [(float(row.step), row.ratio_min, row.ratio_max) for row in steps]
    charts = [
        curves(
            "Reward",
            [Curve("mean of the step's runs", _points(rows, lambda row: row.reward), 1, band), means],
            unit="band: one standard deviation",
            zero=True,
        )
    ]
    if any(edge not in (0.0, 1.0) for row in rows for edge in (row.low, row.high)):
        share = Curve("training", _points(rows, lambda row: row.solved), 1)
        charts.append(curves("Solved", [share, solved], unit="share of runs with reward 1 or more", zero=True))
    charts += [
        curves("Loss", [Curve("loss", _points(steps, lambda row: row.loss), 1)]),
        curves("Gradient norm", [Curve("norm", _points(steps, lambda row: row.grad_norm), 1)], zero=True),
        curves("Entropy", [Curve("entropy", _points(steps, lambda row: row.entropy), 1)], unit="nats"),
        curves(
            "KL from the sampling policy", [Curve("k3", _points(steps, lambda row: row.kl), 1)], unit="nats", zero=True
        ),
        curves(
            "Ratio to the sampling policy",
            [Curve("mean", _points(steps, lambda row: row.ratio), 1, ratios)],
            unit="band: lowest to highest",
        ),
        curves(
            "Log-probs, trainer against engine",
            [
                Curve("p99", _points(steps, lambda row: row.difference_p99), 2),
                Curve("mean", _points(steps, lambda row: row.difference), 1),
            ],
            unit="absolute difference, nats",
            zero=True,
        ),
        curves(
            "Staleness",
            [
                Curve("highest", _points(steps, lambda row: row.staleness_max), 2),
                Curve("mean", _points(steps, lambda row: row.staleness), 1),
            ],
            unit="steps between sampling and training",
            zero=True,
        ),
        curves("Tokens trained", [Curve("per step", _points(rows, lambda row: float(row.tokens)), 1)], zero=True),
        stacked(
            "Seconds per step",
            _PARTS,
            [(float(row.step), (row.waiting_s, row.training_s, row.publishing_s)) for row in rows],
            unit="s",
        ),
    ]
    return charts


def _points(rows: Sequence[StepRow], of: Callable[[StepRow], float]) -> list[tuple[float, float]]:
    return [(float(row.step), of(row)) for row in rows]


def _evaluated(found: Sequence[Evaluation]) -> str:
    if not found:
        return ""
    columns = [
        Column("evaluation"),
        *(Column(name, number=True) for name in ("after step", "tasks", "reward", "solved", "no reward")),
    ]
    rows = [
        [
            one.name,
            "–" if one.step is None else str(one.step),
            f"{one.tasks:,}",
            f"{one.reward:.3f}",
            f"{one.solved:.1%}",
            str(one.tasks - one.scored) if one.tasks > one.scored else "",
        ]
        for one in found
    ]
    return f"<h3>Evaluations</h3>{table(columns, rows, most=_EVALUATIONS, what='evaluations')}"


def _table(steps: Sequence[StepRow]) -> str:
    names = (
        "step",
        "runs",
        "reward",
        "std",
        "solved",
        "loss",
        "grad norm",
        "KL",
        "|log-prob diff.|",
        "staleness",
        "tokens",
    )
    columns = [Column(name, number=True) for name in (*names, "waiting", "training", "publishing")]
    rows = [
        [
            str(row.step),
            str(row.runs),
            reward(row.reward),
            reward(row.std),
            f"{row.solved:.0%}" if isfinite(row.solved) else "–",
            "skipped" if row.skipped else number(row.loss),
            *map(number, (row.grad_norm, row.kl, row.difference, row.staleness)),
            f"{row.tokens:,}",
            *(seconds(part) if isfinite(part) else "–" for part in (row.waiting_s, row.training_s, row.publishing_s)),
        ]
        for row in steps
    ]
    return f"<h3>Steps, the last first</h3>{table(columns, rows[::-1], most=_LAST, what='steps')}"
