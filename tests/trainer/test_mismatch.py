"""Behaviour versus trainer log-probs: figures, their putting together, and what is made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import MismatchError, TrainerError
from gyre_sdk.trainer.mismatch import Mismatch
from gyre_sdk.trainer.sketch import ERROR, Sketch
from gyre_sdk.trainer.units import Row

Numbers = np.ndarray[Any, np.dtype[np.float64]]


def row(
    run: str, logprobs: list[float] | Numbers, *, role: str = "main", version: int = 0, calls: list[int] | None = None
) -> Row:
    count = len(logprobs)
    calls = calls or [0] * count
    number = max(calls) + 1
    return Row(
        run=run,
        leaf=f"{run}-leaf",
        role=role,
        ids=np.arange(count + 3, dtype=np.int32),
        targets=np.arange(3, count + 3, dtype=np.int32),
        weights=np.full(count, 1.0 / count),
        logprobs=np.asarray(logprobs, float),
        versions=np.full(count, version, np.int32),
        advantage=1.0,
        calls=np.array(calls, np.int32),
        call_ids=tuple(f"c{index}" for index in range(number)),
        call_roles=(role,) * number,
    )


def report(*parts: tuple[list[Row], Any]) -> Mismatch:
    found = Mismatch()
    for rows, logp_K in parts:
        found.add(rows, logp_K)
    return found


def test_figures_by_hand() -> None:
    rows = [row("r", [-1.0, -2.0], version=3), row("s", [-1.0], role="helper", version=2)]
    found = report((rows, torch.tensor([-1.5, -2.0, -0.9])))
    whole = found.figures()
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(0.1) - 1 - 0.1]
    assert whole.tokens == 3
    assert whole.mean == pytest.approx(0.2, abs=1e-6) and whole.bias == pytest.approx(-0.4 / 3, abs=1e-6)
    assert whole.k3 == pytest.approx(sum(k3) / 3, abs=1e-6) and whole.largest == pytest.approx(0.5, abs=1e-6)
    assert found.figures(role="helper").mean == pytest.approx(0.1, abs=1e-6)
    assert found.figures(version=3).mean == pytest.approx(0.25) and found.newest == 3
    metrics = found.metrics()
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.2, abs=1e-6)
    assert metrics["mismatch/staleness_0"] == pytest.approx(0.25)
    assert metrics["mismatch/staleness_1"] == metrics["mismatch/role/helper"] == pytest.approx(0.1, abs=1e-6)
    assert metrics["sampling/sampling_logp_difference/p99"] == pytest.approx(0.5, rel=ERROR)
    assert Mismatch().metrics() == {}


def test_the_worst_call_says_where_to_look() -> None:
    long = row("r", [-1.0] * 20, version=5, calls=[0] * 10 + [1] * 10)
    logp = np.full(20, -1.0)
    logp[10:] -= 0.1
    logp[17] -= 2.0
    found = report(([long, row("s", [-1.0, -1.0])], np.append(logp, [-9.0, -9.0])))
    worst = found.worst
    assert worst is not None, "a call of two tokens is not the worst where there are longer ones"
    assert (worst.run, worst.call, worst.role, worst.version, worst.tokens) == ("r", "c1", "main", 5, 10)
    assert worst.mean == pytest.approx(0.3) and worst.worst == pytest.approx(2.1)
    assert (worst.at, worst.position, worst.leaf) == (7, 20, "r-leaf")
    assert "call c1 of run r (main, version 5): mean 0.3 over 10 tokens, 2.1 at its token 7" in found.table()
    alone = report(([row("s", [-1.0, -1.0])], [-9.0, -9.0]))
    assert alone.worst is not None and alone.worst.call == "c0"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_any_split_over_units_and_processes_gives_the_same(seed: int, process: list[int]) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        row(f"r{one}", rng.normal(-2, 1, 5), role=("main", "helper")[one % 2], version=one % 3, calls=[0, 0, 1, 1, 1])
        for one in range(6)
    ]
    logps = [np.asarray(one.logprobs) + rng.normal(0, 0.3, 5) for one in rows]
    whole = report((rows, np.concatenate(logps)))
    parts = [Mismatch() for _ in range(3)]
    for one, logp, where in zip(rows, logps, process, strict=True):
        parts[where].add([one], logp)
    merged = Mismatch()
    for part in reversed(parts):
        merged.merge(part)
    assert merged.metrics() == pytest.approx(whole.metrics(), rel=1e-12)
    assert merged.worst == whole.worst and merged.table() == whole.table()
    assert np.array_equal(merged.calls.counts, whole.calls.counts)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-7, 900), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 60))
def test_quantiles_have_the_stated_error(values: list[float], share: float, cut: int) -> None:
    sketch, rest = Sketch(), Sketch()
    sketch.add(values[:cut])
    rest.add(values[cut:])
    sketch.merge(rest)
    exact = sorted(values)[max(math.ceil(share * len(values)), 1) - 1]
    assert sketch.quantile(share) == pytest.approx(exact, rel=ERROR * 1.0001)
    assert sketch.above(exact * 1.021) <= sum(value > exact for value in values) <= sketch.above(exact / 1.021)


def test_a_sketch_of_nothing_and_of_extremes() -> None:
    sketch = Sketch()
    assert math.isnan(sketch.quantile(0.5))
    sketch.add([0.0, 0.0, 1e9])
    assert sketch.quantile(0.5) == 0.0 and sketch.quantile(1.0) > 900 and sketch.above(1.0) == 1


def test_log_probs_must_match_the_targets() -> None:
    with pytest.raises(TrainerError, match="for 3 targets"):
        report(([row("r", [-1.0] * 3)], [-1.0, -1.0]))


# -- what stops training, and what it says -----------------------------------------------------------------------------

VOCAB = 50


def sampled(rng: np.random.Generator, count: int, temperature: float = 1.0) -> tuple[Numbers, Numbers]:
    """Log-probs of sampled tokens: at sampling, and what the trainer computes at temperature 1."""
    logits = 2 * rng.standard_normal((count, VOCAB))

    def log_softmax(x: Numbers) -> Numbers:
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    behaviour, trainer = log_softmax(logits / temperature), log_softmax(logits)
    token = [rng.choice(VOCAB, p=np.exp(one) / np.exp(one).sum()) for one in behaviour]
    places = np.arange(count)
    return behaviour[places, token], trainer[places, token]


def scenario(change: Callable[[int, str, int], float], *, temperature: float = 1.0, noise: float = 1e-3) -> Mismatch:
    """24 calls of 2 roles and 3 versions; `change(number, role, version)` is the scale of a wrong context's noise."""
    rng = np.random.default_rng(0)
    found = Mismatch()
    for number in range(24):
        role, version = ("main", "helper")[number % 2], 7 + number // 2 % 3
        behaviour, trainer = sampled(rng, 30, temperature)
        wrong = change(number, role, version)
        if wrong:  # another context or other weights: unrelated numbers
            trainer = -np.abs(wrong * rng.standard_normal(30)) - 0.5
        found.add([row(f"r{number}", behaviour, role=role, version=version)], trainer + noise * rng.standard_normal(30))
    return found


def explanation(found: Mismatch, threshold: float = 0.1) -> str:
    with pytest.raises(MismatchError) as caught:
        found.check(threshold)
    return str(caught.value)


def test_rounding_is_no_mismatch() -> None:
    found = scenario(lambda *_: 0.0)
    found.check(0.1)
    assert found.causes(0.1) == []
    text = explanation(found, 1e-4)
    assert "rounding" in text and "dtypes" in text and "tokens of version 9 differ by" in text
    assert "it is" not in text, "everything is off alike: no call, role or version is named"


def test_old_versions_may_differ() -> None:
    """The policy has moved: what it sampled before has other log-probs now, and that is no fault."""
    scenario(lambda number, role, version: 2.0 * (version < 9)).check(0.1)


def test_another_temperature_is_recognised() -> None:
    text = explanation(scenario(lambda *_: 0.0, temperature=0.7))
    found = re.search(r"sampled at about (\S+) times the temperature", text)
    assert found and float(found[1]) == pytest.approx(0.7, abs=0.1)
    assert "it is" not in text


def test_a_reused_context_of_one_call_is_recognised() -> None:
    text = explanation(scenario(lambda number, role, version: 4.0 * (number == 5)))
    assert "it is 1 of 24 calls" in text and "cache salt" in text
    assert "worst: call c0 of run r5 (helper, version 9)" in text
    assert "another context or other weights" in text
    assert "it is the role" not in text and "it is version" not in text, "that it has one of each says nothing"


def test_a_wrong_role_is_recognised() -> None:
    text = explanation(scenario(lambda number, role, version: 4.0 * (role == "helper")))
    assert "it is the role helper, not main" in text and "calls; the median" not in text and "it is version" not in text


def test_a_wrong_publication_is_recognised() -> None:
    text = explanation(scenario(lambda number, role, version: 4.0 * (version == 9)))
    assert "it is version 9, not 7, 8" in text and "checksums" in text and "it is the role" not in text


@pytest.mark.parametrize("where", ["trainer", "engine"])
def test_a_number_that_is_none_stops_training(where: str) -> None:
    behaviour, trainer = np.full(10, -1.0), np.full(10, -1.0)
    (trainer if where == "trainer" else behaviour)[3] = math.nan if where == "trainer" else -math.inf
    found = report(([row("r", behaviour)], trainer))
    assert found.metrics()["mismatch/not_finite"] == 1 and found.figures().mean == 0.0
    text = explanation(found)
    assert "1 tokens have a log-prob that is no finite number" in text and "overflow" in text


def test_the_table_has_a_line_per_role_and_version() -> None:
    lines = scenario(lambda *_: 0.0).table().splitlines()
    assert lines[0].split()[:3] == ["role", "version", "tokens"]
    assert [line.split()[:3] for line in lines[1:8]] == [
        *([role, version, "120"] for role in ("helper", "main") for version in "789"),
        ["all", "720", lines[7].split()[2]],
    ]
    assert max(map(len, lines[:8])) <= 80
