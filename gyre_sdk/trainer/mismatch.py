"""How far the trainer's log-probs are from those that the engine recorded at sampling, and why that may be.

A token sampled by the weights in training should have the same log-prob in both, up to rounding. Where it has not, every
ratio is wrong, and training goes on all the same: rewards fall hundreds of steps later. So the difference is measured at
every step, by role and version, and a threshold stops training with what the figures say about the cause.

d is the trainer's log-prob minus the recorded one, in nats; k3 = exp(d) - 1 - d estimates KL(behaviour || trainer).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import MismatchError, TrainerError
from gyre_sdk.trainer.sketch import Sketch
from gyre_sdk.trainer.units import Row

_STALE = 8
"""Versions are told apart by distance up to here."""
_LONG = 8
"""Tokens from which the mean of a call says something about the call."""
_EXP_LIMIT = 50.0
"""A difference beyond is as wrong as one can be; its exponential is of no use."""


@dataclass(frozen=True, slots=True, order=True)
class WorstCall:
    """The call whose tokens differ most; calls of a few tokens only where there is no longer one."""

    long: bool
    mean: float
    """Mean |d| of its tokens."""
    tokens: int
    run: str
    call: str
    role: str
    version: int
    """That sampled its worst token."""
    worst: float
    """|d| of that token."""
    at: int
    """That token's number among the call's tokens, from 0."""
    position: int
    """Its position in the row."""
    leaf: str
    """Of the row."""

    def __str__(self) -> str:
        """Say where to look."""
        return (
            f"call {self.call} of run {self.run} ({self.role}, version {self.version}): mean {self.mean:.4g} over"
            f" {self.tokens} tokens, {self.worst:.4g} at its token {self.at} (position {self.position} of row {self.leaf})"
        )


_MOMENTS = ("tokens", "absolute", "k3", "difference", "x", "y", "xx", "yy", "xy")
"""Sums; x: trainer's log-prob, y: the recorded one."""


def _no_moments() -> NDArray[np.float64]:
    return np.zeros(len(_MOMENTS))


@dataclass(slots=True)
class Figures:
    """Differences of some tokens."""

    moments: NDArray[np.float64] = field(default_factory=_no_moments)
    largest: float = 0.0
    sketch: Sketch = field(default_factory=Sketch)

    def add(self, trainer: NDArray[np.float64], behaviour: NDArray[np.float64]) -> None:
        """Take in finite log-probs of tokens."""
        d = trainer - behaviour
        size = np.abs(d)
        near = np.minimum(d, _EXP_LIMIT)
        columns = (np.ones_like(d), size, np.expm1(near) - near, d, trainer, behaviour, trainer**2, behaviour**2)
        products = (trainer * behaviour).sum()
        self.moments = self.moments + np.array([*(column.sum() for column in columns), products])
        self.largest = max(self.largest, float(size.max(initial=0.0)))
        self.sketch.add(size)

    def merge(self, other: Figures) -> None:
        """Take in what another one saw."""
        self.moments = self.moments + other.moments
        self.largest = max(self.largest, other.largest)
        self.sketch.merge(other.sketch)

    @property
    def tokens(self) -> int:
        """How many."""
        return int(self.moments[0])

    @property
    def mean(self) -> float:
        """Mean |d|; 0 without tokens."""
        return float(self.moments[1] / max(self.moments[0], 1.0))

    @property
    def k3(self) -> float:
        """Mean k3."""
        return float(self.moments[2] / max(self.moments[0], 1.0))

    @property
    def bias(self) -> float:
        """Mean d."""
        return float(self.moments[3] / max(self.moments[0], 1.0))

    @property
    def p99(self) -> float:
        """|d| that 99% of the tokens do not exceed, within 1% of itself."""
        return min(self.sketch.quantile(0.99), self.largest) if self.tokens else 0.0

    def line(self) -> tuple[float, float]:
        """Return slope and correlation of the recorded log-probs over the trainer's; NaN where there is no line."""
        n, _, _, _, x, y, xx, yy, xy = self.moments.tolist()
        spread_x, spread_y = n * xx - x * x, n * yy - y * y
        if n < _LONG or spread_x <= 1e-9 * n * n or spread_y <= 1e-9 * n * n:
            return math.nan, math.nan
        shared = n * xy - x * y
        return shared / spread_x, shared / math.sqrt(spread_x * spread_y)


@dataclass(slots=True)
class Mismatch:
    """The differences of a step. `merge` puts processes together, in any order."""

    cells: dict[tuple[str, int], Figures] = field(default_factory=dict)
    """By role and version."""
    calls: Sketch = field(default_factory=Sketch)
    """Mean |d| of each call."""
    worst: WorstCall | None = None
    not_finite: int = 0
    """Tokens with a log-prob that is no number, here or at sampling; in nothing else."""

    def add(self, rows: Sequence[Row], logp_K: Any) -> None:
        """Take in a unit's rows, with the trainer's log-prob of every target in row order (tensor or array).

        Raises:
            TrainerError: there is not one log-prob per target.
        """
        trainer_K = (
            logp_K.detach().to("cpu").double().numpy() if hasattr(logp_K, "detach") else np.asarray(logp_K, float)
        )
        behaviour_K = np.concatenate([row.logprobs for row in rows])
        if trainer_K.shape != behaviour_K.shape:
            raise TrainerError(
                f"log-probs of shape {trainer_K.shape} for {len(behaviour_K)} targets; give one per target, in row order"
            )
        version_K = np.concatenate([row.versions for row in rows])
        calls, call_K = _calls(rows)
        roles = sorted({role for _, _, role in calls})
        role_K = np.array([roles.index(role) for _, _, role in calls])[call_K]
        finite_K = np.isfinite(trainer_K) & np.isfinite(behaviour_K)
        self.not_finite += int((~finite_K).sum())
        for role, name in enumerate(roles):
            role_here_K = finite_K & (role_K == role)
            for version in np.unique(version_K[role_here_K]).tolist():
                own_K = role_here_K & (version_K == version)
                self.cells.setdefault((name, version), Figures()).add(trainer_K[own_K], behaviour_K[own_K])
        size_K = np.abs(trainer_K - behaviour_K, where=finite_K, out=np.zeros_like(trainer_K))
        tokens = np.bincount(call_K, finite_K, minlength=len(calls))
        means = np.bincount(call_K, size_K, minlength=len(calls)) / np.maximum(tokens, 1)
        self.calls.add(means[tokens > 0])
        candidates = [(bool(tokens[one] >= _LONG), means[one], int(one)) for one in np.flatnonzero(tokens)]
        if candidates:
            one = max(candidates)[2]
            worst = _worst(rows, size_K, np.flatnonzero(finite_K & (call_K == one)), calls[one])
            self.worst = worst if self.worst is None else max(self.worst, worst)

    def merge(self, other: Mismatch) -> None:
        """Take in what another process saw."""
        for key, figures in other.cells.items():
            self.cells.setdefault(key, Figures()).merge(figures)
        self.calls.merge(other.calls)
        self.not_finite += other.not_finite
        self.worst = max((one for one in (self.worst, other.worst) if one is not None), default=None)

    @property
    def newest(self) -> int | None:
        """The newest version that sampled something; None without tokens."""
        return max((version for _, version in self.cells), default=None)

    def figures(self, *, role: str | None = None, version: int | None = None) -> Figures:
        """Return the differences of a role, a version, both, or everything."""
        return _together(
            figures
            for (own_role, own_version), figures in sorted(self.cells.items())
            if role in (None, own_role) and version in (None, own_version)
        )

    def metrics(self) -> dict[str, float]:
        """Return what is logged; versions by their distance to the newest."""
        if self.newest is None:
            return {"mismatch/not_finite": float(self.not_finite)} if self.not_finite else {}
        whole = self.figures()
        found = {
            "sampling/sampling_logp_difference/mean": whole.mean,
            "sampling/sampling_logp_difference/p99": whole.p99,
            "sampling/sampling_logp_difference/max": whole.largest,
            "mismatch/k3": whole.k3,
            "mismatch/bias": whole.bias,
        }
        if self.worst is not None:
            found["mismatch/worst_call"] = self.worst.mean
        for role in sorted({role for role, _ in self.cells}):
            found[f"mismatch/role/{role}"] = self.figures(role=role).mean
        by_distance: dict[int, Figures] = {}
        for (_, version), figures in sorted(self.cells.items()):
            by_distance.setdefault(min(self.newest - version, _STALE), Figures()).merge(figures)
        for distance, figures in sorted(by_distance.items()):
            found[f"mismatch/staleness_{distance}"] = figures.mean
        if self.not_finite:
            found["mismatch/not_finite"] = float(self.not_finite)
        return found

    def table(self) -> str:
        """Return the differences as lines of text, a line per role and version."""
        lines = [f"{'role':<20} {'version':>7} {'tokens':>9} {'mean |d|':>9} {'k3':>9} {'p99 |d|':>9} {'max |d|':>9}"]
        for (role, version), figures in sorted(self.cells.items()):
            lines.append(_line(role, str(version), figures))
        if len(self.cells) > 1:
            lines.append(_line("all", "", self.figures()))
        if self.worst is not None:
            lines.append(f"worst: {self.worst}")
        if self.not_finite:
            lines.append(f"not a finite number: {self.not_finite} tokens")
        return "\n".join(lines)

    def check(self, threshold: float) -> None:
        """Stop where the trainer computes other log-probs than the engine did.

        Args:
            threshold: most nats that the tokens of the newest version may differ in the mean. Older ones differ because
                the policy has moved: that is what ratios are for.

        Raises:
            MismatchError: they differ by more, or a log-prob is no number.
        """
        mean = 0.0 if self.newest is None else self.figures(version=self.newest).mean
        if mean <= threshold and not self.not_finite:
            return
        what = (
            f"{self.not_finite} tokens have a log-prob that is no finite number"
            if self.not_finite
            else f"tokens of version {self.newest} differ by {mean:.4g} nats in the mean, the threshold is {threshold:g}"
        )
        causes = "\n".join(f"* {cause}" for cause in self.causes(threshold))
        raise MismatchError(f"the trainer's log-probs are not the engine's: {what}\n{self.table()}\n{causes}")

    def causes(self, threshold: float) -> list[str]:
        """Return what the figures say about the cause: first where it is, then of what kind."""
        found = []
        if self.not_finite:
            found.append(
                "log-probs that are no number: weights or activations overflow in the trainer (try float32 or bf16), or the"
                " engine reported none; look at the loss and gradient norm of the steps before"
            )
        if self.newest is None or self.figures(version=self.newest).mean <= threshold:
            return found
        found += self._where(threshold)
        bad = _together(figures for key, figures in sorted(self.cells.items()) if figures.mean > threshold)
        return [*found, _kind(bad)]

    def _where(self, threshold: float) -> list[str]:
        total, above = int(self.calls.counts.sum()), self.calls.above(threshold)
        if total >= 4 and above <= max(total // 4, 1):
            return [
                f"it is {above} of {total} calls; the median call differs by {self.calls.quantile(0.5):.2g}: keys and values of"
                " an older version reused for these (is the version the cache salt?), or their prompt reached the engine"
                " with other tokens. Look at the worst one"
            ]
        found = []
        roles = {role: self.figures(role=role).mean for role in sorted({role for role, _ in self.cells})}
        bad_roles = [role for role, mean in roles.items() if mean > threshold]
        if bad_roles and len(bad_roles) < len(roles):
            found.append(
                f"it is the role {', '.join(bad_roles)}, not {', '.join(sorted(set(roles) - set(bad_roles)))}: other sampling"
                " settings, another template or another model behind that role"
            )
        versions = {version: self.figures(version=version).mean for version in sorted({v for _, v in self.cells})}
        bad_versions = [version for version, mean in versions.items() if mean > threshold]
        if len(bad_versions) < len(versions):
            found.append(
                f"it is version {', '.join(map(str, bad_versions))}, not"
                f" {', '.join(str(version) for version in versions if version not in bad_versions)}: what was published is not"
                " what was trained, or a replica answered under a version that it did not have (compare the checksums of the"
                " publication)"
            )
        return found


def _calls(rows: Sequence[Row]) -> tuple[list[tuple[str, str, str]], NDArray[np.int64]]:
    """Return run, id and role of each call, and the place of each target's call among them."""
    found: dict[tuple[str, str, str], int] = {}
    places = []
    for row in rows:
        names = zip(row.call_ids, row.call_roles, strict=True)
        own = np.array([found.setdefault((row.run, call, role), len(found)) for call, role in names], np.int64)
        places.append(own[row.calls])
    return list(found), np.concatenate(places)


def _worst(
    rows: Sequence[Row], size_K: NDArray[np.float64], own: NDArray[np.int64], call: tuple[str, str, str]
) -> WorstCall:
    token = int(size_K[own].argmax())
    ends = np.cumsum([len(row.targets) for row in rows])
    place = int(np.searchsorted(ends, own[token], side="right"))
    row = rows[place]
    target = int(own[token] - (ends[place] - len(row.targets)))
    run, name, role = call
    return WorstCall(
        long=len(own) >= _LONG,
        mean=float(size_K[own].mean()),
        tokens=len(own),
        run=run,
        call=name,
        role=role,
        version=int(row.versions[target]),
        worst=float(size_K[own[token]]),
        at=token,
        position=int(row.targets[target]),
        leaf=row.leaf,
    )


def _kind(bad: Figures) -> str:
    slope, correlation = bad.line()
    if correlation > 0.9 and abs(slope - 1) > 0.05:
        return (
            f"recorded log-probs follow the trainer's with slope {slope:.2f}: sampled at about {1 / slope:.2f} times the"
            " temperature that the trainer divides by, or recorded before the temperature was applied"
        )
    if not correlation > 0.9:
        return (
            f"recorded and computed log-probs hardly go together (correlation {correlation:.2f}): the engine saw another"
            " context or other weights. Compare the prompt's tokens (template, special tokens) and the version"
        )
    return (
        f"recorded and computed log-probs go together (correlation {correlation:.3f}, slope {slope:.2f}): rounding. Compare the"
        " dtypes of engine and trainer, quantisation, kernels and attention backends; importance_sampling = 'truncate'"
        " corrects what is left"
    )


def _together(parts: Iterable[Figures]) -> Figures:
    found = Figures()
    for part in parts:
        found.merge(part)
    return found


def _line(role: str, version: str, figures: Figures) -> str:
    return (
        f"{role:<20} {version:>7} {figures.tokens:>9} {figures.mean:>9.4g} {figures.k3:>9.4g} {figures.p99:>9.4g}"
        f" {figures.largest:>9.4g}"
    )
