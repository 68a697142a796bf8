"""Rewards per role and per call: each set gets its own baseline, and every hole or contradiction has a name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from units_kit import call, run_record, seal

from gyre_sdk.credit import Baseline, CallFacts, Rewards
from gyre_sdk.errors import HookError, SettingsError
from gyre_sdk.records import CallRecord, CallStatus, RunRecord
from gyre_sdk.trainer.units import Row, SealedGroup

RUNS = [
    RunRecord(run.run, run.task, 0.0, member=run.member, status=run.status, reward=run.reward, parts=parts)
    for run, parts in (
        (run_record("a", 1.0), {"review": 0.2}),
        (run_record("b", 0.0, member=1), {"review": 0.8}),
        (run_record("c", 0.5, member=2), {"review": 0.5}),
    )
]


def agent(run: str, *, critics: int = 1) -> list[CallRecord]:
    """One main call and some calls of a critic."""
    made = [call(run, "m", [1, 2], [10, 11, 12])]
    made += [call(run, f"k{n}", [5, n + 1], [20 + n, 30], role="critic") for n in range(critics)]
    return made


def sealed(hook: object, calls: dict[str, list[CallRecord]] | None = None, **options: object) -> SealedGroup:
    calls = calls or {run.run: agent(run.run) for run in RUNS}
    return seal(RUNS, calls, credit_hook=hook, **options)


def by_call(group: SealedGroup) -> dict[str, float]:
    """Advantage of every call that is trained."""
    found: dict[str, float] = {}
    rows: list[Row] = [row for unit in group.units for row in unit.rows]
    for row in rows:
        for place, value in zip(row.calls, row.advantages, strict=True):
            assert found.setdefault(row.call_ids[place], value) == value
    return found


def review(run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
    return Rewards(roles={"critic": run.parts["review"]})


def test_a_role_gets_a_baseline_of_its_own() -> None:
    group = sealed(review)
    assert by_call(group) == pytest.approx(
        {"a-m": 0.5, "b-m": -0.5, "c-m": 0.0, "a-k0": -0.3, "b-k0": 0.3, "c-k0": 0.0}
    )
    assert {row.run: row.advantage for unit in group.units for row in unit.rows} == {"a": 0.5, "b": -0.5, "c": 0.0}
    assert group.own is not None and set(group.own.sets) == {"role critic"} and group.dropped == {}
    assert group.settings["credit_hook"].endswith(":review")


@pytest.mark.parametrize("baseline", Baseline)
def test_rewards_of_calls_count_each_run_once(baseline: Baseline) -> None:
    """Run a has three calls and b, c have one: the mean is that of the runs' means, whatever the number of calls."""
    values = {"a-k0": 0.0, "a-k1": 3.0, "a-k2": 6.0, "b-k0": 1.0, "c-k0": 5.0}

    def judge(run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
        return Rewards(calls={one.call: values[one.call] for one in calls if one.role == "critic"})

    calls = {"a": agent("a", critics=3), "b": agent("b"), "c": agent("c")}
    found = by_call(sealed(judge, calls, baseline=baseline))
    variance = ((9 + 0 + 9) / 3 + 4 + 4) / 3
    wanted = {
        Baseline.MEAN: {name: value - 3.0 for name, value in values.items()},
        Baseline.POPULATION_STD: {name: (value - 3.0) / variance**0.5 for name, value in values.items()},
        Baseline.SAMPLE_STD: {name: (value - 3.0) / (variance * 1.5) ** 0.5 for name, value in values.items()},
        # the others' mean is 3 for a, 4 for b, 2 for c
        Baseline.LEAVE_ONE_OUT: {"a-k0": -3.0, "a-k1": 0.0, "a-k2": 3.0, "b-k0": -3.0, "c-k0": 3.0},
    }[baseline]
    assert {name: found[name] for name in values} == pytest.approx(wanted)


def test_a_set_without_contrast_is_masked_and_counted() -> None:
    group = sealed(lambda run, calls: Rewards(roles={"critic": 1.0}))
    assert set(by_call(group)) == {"a-m", "b-m", "c-m"}
    assert group.dropped == {"set_flat": 1, "call_no_credit": 3} and group.dropped_tokens == {"call_no_credit": 6}
    assert all(row.weights.sum() == pytest.approx(1.0) for unit in group.units for row in unit.rows)


def test_a_group_without_contrast_trains_the_sets_that_have_some() -> None:
    flat = [RunRecord(run.run, run.task, 0.0, member=run.member, reward=1.0, parts=run.parts) for run in RUNS]
    group = seal(flat, {run.run: agent(run.run) for run in RUNS}, credit_hook=review)
    assert by_call(group) == pytest.approx({"a-k0": -0.3, "b-k0": 0.3, "c-k0": 0.0})
    assert group.dropped == {"group_flat": 1, "call_no_credit": 3} and sum(unit.runs for unit in group.units) == 3


def test_a_role_that_one_run_alone_has_is_too_small() -> None:
    calls = {"a": agent("a"), "b": agent("b", critics=0), "c": agent("c", critics=0)}

    def some(run: RunRecord, facts: Sequence[CallFacts]) -> Rewards:
        return Rewards(roles={"critic": 1.0} if any(one.role == "critic" for one in facts) else {})

    group = sealed(some, calls)
    assert group.dropped == {"set_too_small": 1, "call_no_credit": 1} and "a-k0" not in by_call(group)


def test_unscored_runs_are_not_asked() -> None:
    asked = []

    def note(run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
        asked.append(run.run)
        return review(run, calls)

    runs = [*RUNS, run_record("u", None, member=3)]
    group = seal(runs, {run.run: agent(run.run) for run in runs}, credit_hook=note)
    assert asked == ["a", "b", "c"] and group.dropped == {"run_unscored": 1}


def give(run: str, **rewards: object) -> object:
    """Review as usual, but say something else of one run."""
    return lambda record, calls: Rewards(**rewards) if record.run == run else review(record, calls)  # type: ignore[arg-type]


def raising(run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
    raise KeyError("no such part")


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (give("b"), "no reward to role 'critic' of run b"),
        (give("b", roles={"critic": float("nan")}), "role 'critic' of run b nan; give a finite number"),
        (give("b", roles={"critic": None}), "role 'critic' of run b None; give a finite number"),
        (give("b", roles={"critic": 10**400}), "000; give a finite number"),
        (give("b", roles=None), "rewards per role of run b as a NoneType; give a mapping"),
        (give("b", calls=["b-k0"]), "rewards per call of run b as a list; give a mapping"),
        (give("b", roles={"critic": 1.0, "judge": 1.0}), "rewarded role 'judge', which run b does not have"),
        (give("b", calls={"a-k0": 1.0}), "rewarded call 'a-k0', which run b does not have"),
        (give("b", roles={"critic": 1.0}, calls={"b-k0": 1.0}), "role 'critic' of run b and also call 'b-k0'"),
        (give("b", calls={"b-k0": 1.0}), "role 'critic' as a whole in run a and by calls in run b"),
        (lambda run, calls: {"critic": 1.0}, "returned a dict for run a; return Rewards"),
        (raising, "raised on run a: KeyError: 'no such part'"),
    ],
)
def test_what_a_hook_gets_wrong_has_a_name(hook: object, said: str) -> None:
    with pytest.raises(HookError, match=said.replace("(", r"\(")):
        sealed(hook)


def test_a_missing_call_is_named() -> None:
    def some(run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
        return Rewards(calls={one.call: float(run.member) for one in calls if one.call.endswith("k0")})

    calls = {run.run: agent(run.run, critics=2) for run in RUNS}
    with pytest.raises(HookError, match="no reward to call 'a-k1' of role 'critic' in run a"):
        sealed(some, calls)


def test_calls_that_cannot_be_trained_need_no_reward() -> None:
    """Failed and empty calls of a rewarded role, and runs in which it sampled nothing, leave no hole in its set."""
    calls = {run.run: agent(run.run) for run in RUNS}
    calls["a"] += [
        call("a", "bad", [5, 9], [1], role="critic", status=CallStatus.FAILED),
        call("a", "empty", [5, 8], [], role="critic"),
    ]
    calls["c"] = [*agent("c", critics=0), call("c", "empty", [5, 8], [], role="critic")]

    def by_one(run: RunRecord, facts: Sequence[CallFacts]) -> Rewards:
        return Rewards(calls={one.call: float(run.member) for one in facts if one.call.endswith("k0")})

    for hook in (by_one, lambda run, facts: Rewards(roles={} if run.run == "c" else {"critic": float(run.member)})):
        group = sealed(hook, calls)
        found = by_call(group)
        assert (found["a-k0"], found["b-k0"]) == (-0.5, 0.5) and group.dropped == {"call_failed": 1}
        assert group.own is not None and len(group.own.sets) == 1


def test_a_hook_and_a_rule_are_named_in_settings(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_credit_code.py").write_text(
        "from gyre_sdk.credit import Rewards\n"
        "def review(run, calls):\n    return Rewards(roles={'critic': run.parts['review']})\n"
        "def last(choices):\n    return [choices.candidates[-1].leaf]\n"
    )
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    options = {"rule": "my_credit_code:last", "base": tmp_path}
    group = sealed("my_credit_code:review", **options)
    assert by_call(group) == pytest.approx({"a-m": 0.5, "b-m": -0.5, "c-m": 0.0})
    assert group.settings["credit_hook"] == "my_credit_code:review" and group.settings["rule"] == "my_credit_code:last"
    with pytest.raises(SettingsError, match="credit_hook = 'my_credit_code:absent'"):
        sealed("my_credit_code:absent", base=tmp_path)
    with pytest.raises(SettingsError, match="selection rule 'best' is unknown"):
        sealed(None, rule="best")
