"""Rewards of roles and of calls beside the run's: a hook gives them, and each set of them gets a baseline of its own.

A *set* is a role that is rewarded as a whole (one reward per run), or the rewarded calls of a role (one per call). Its
rewards are compared across the runs of the group, every run counting once (`groups.compare`). Calls in no set keep the
advantage of their run. A set without contrast trains nothing: its calls are masked and it is counted, as a group is.

Every call's credit is decided by exactly one set, so what contradicts that, or leaves a hole in it, is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from numbers import Real
from typing import Protocol

from gyre_sdk.credit.filters import CallFacts
from gyre_sdk.credit.groups import Baseline, Comparison, compare
from gyre_sdk.errors import HookError
from gyre_sdk.records import CallId, CallStatus, RunId, RunRecord

_UNFIT = (CallStatus.FAILED, CallStatus.ABORTED)


@dataclass(frozen=True, slots=True)
class Rewards:
    """What a hook says of one run. Higher is better; finite numbers only."""

    roles: Mapping[str, float] = field(default_factory=dict)
    """Role -> reward of what its calls did."""
    calls: Mapping[str, float] = field(default_factory=dict)
    """Call -> its own reward. Where one call of a role has one, all of them need one."""


class CreditHook(Protocol):
    """Gives rewards per role or per call. It must be a function of the record alone: it is asked again on every sealing."""

    def __call__(self, run: RunRecord, calls: Sequence[CallFacts], /) -> Rewards:
        """Return the rewards of a run that has a reward.

        Args:
            run: with its reward and its parts of the score (`run.parts`).
            calls: all that it made, in the order received.
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnCredit:
    """Advantages of calls whose credit is not their run's."""

    advantages: Mapping[RunId, Mapping[CallId, float | None]]
    """None where the set has no contrast; a call that is not there has its run's."""
    sets: Mapping[str, Comparison]
    """`role NAME` and `calls of NAME` -> what the set's rewards say."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A run with what a hook said of it."""

    run: RunId
    members: Mapping[str, Sequence[CallId]]
    """Role -> its calls that have tokens to train, in order."""
    rewards: Rewards


def ask(hook: CreditHook, name: str, run: RunRecord, calls: Sequence[CallFacts]) -> Rewards:
    """Return what a hook says of a run, checked as far as one run can tell.

    Raises:
        HookError: the hook raised, or returned what cannot be.
    """
    try:
        found = hook(run, calls)
    except Exception as error:  # boundary: the user's code
        raise HookError(f"credit hook {name} raised on run {run.run}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Rewards):
        raise HookError(f"credit hook {name} returned a {type(found).__name__} for run {run.run}; return Rewards(...)")
    role_of = {call.call: call.role for call in calls}
    roles = set(role_of.values())
    for kind, values in (("role", found.roles), ("call", found.calls)):
        if not isinstance(values, Mapping):
            raise HookError(
                f"credit hook {name} gave rewards per {kind} of run {run.run} as a {type(values).__name__}; give a mapping"
            )
        for key, value in values.items():
            if not isinstance(value, Real) or not _finite(value):
                raise HookError(
                    f"credit hook {name} gave {kind} {key!r} of run {run.run} {value!r}; give a finite number"
                )
            if key not in (roles if kind == "role" else role_of):
                raise HookError(f"credit hook {name} rewarded {kind} {key!r}, which run {run.run} does not have")
    for call in found.calls:
        role = role_of[CallId(call)]
        if role in found.roles:
            raise HookError(
                f"credit hook {name} rewarded role {role!r} of run {run.run} and also call {call!r} of that role; a call"
                " has one reward: give one of them"
            )
    return found


def own_credit(
    judged: Sequence[tuple[RunRecord, Sequence[CallFacts], Rewards]], *, name: str, baseline: Baseline
) -> OwnCredit:
    """Compare what a hook said of the runs of a group.

    Raises:
        HookError: a role is rewarded as a whole in one run and by calls in another, or a reward is missing.
    """
    found = [_Judged(run.run, _members(calls), rewards) for run, calls, rewards in judged]
    by_role = {role: one.run for one in reversed(found) for role in one.rewards.roles}
    by_call = {
        role: one.run
        for one in reversed(found)
        for role, calls in one.members.items()
        if any(call in one.rewards.calls for call in calls)
    }
    for role in sorted(by_role.keys() & by_call.keys()):
        raise HookError(
            f"credit hook {name} rewarded role {role!r} as a whole in run {by_role[role]} and by calls in run"
            f" {by_call[role]}; do one of them in all runs of a group"
        )
    sets: dict[str, Comparison] = {}
    advantages: dict[RunId, dict[CallId, float | None]] = {one.run: {} for one in found}
    for role in sorted(by_role.keys() | by_call.keys()):
        whole = role in by_role
        given: dict[RunId, list[float]] = {}
        for one in found:
            calls = one.members.get(role, ())
            if not calls:
                continue
            if whole and role not in one.rewards.roles:
                raise HookError(
                    f"credit hook {name} gave no reward to role {role!r} of run {one.run}, as it did to others"
                )
            missing = [call for call in calls if not whole and call not in one.rewards.calls]
            if missing:
                raise HookError(
                    f"credit hook {name} gave no reward to call {missing[0]!r} of role {role!r} in run {one.run}, as it did"
                    " to others of that role"
                )
            rewarded = [one.rewards.roles[role]] if whole else [one.rewards.calls[call] for call in calls]
            given[one.run] = [float(reward) for reward in rewarded]
        comparison = sets[f"role {role}" if whole else f"calls of {role}"] = compare(given, baseline=baseline)
        for one in found:
            calls = one.members.get(role, ())
            credit: Sequence[float | None] = comparison.advantages.get(one.run, [None] * (1 if whole else len(calls)))
            advantages[one.run] |= dict(zip(calls, [*credit] * (len(calls) if whole else 1), strict=True))
    return OwnCredit(advantages, sets)


def _finite(reward: Real) -> bool:
    try:
        return isfinite(reward)
    except OverflowError:  # an integer beyond floats
        return False


def _members(calls: Sequence[CallFacts]) -> dict[str, list[CallId]]:
    found: dict[str, list[CallId]] = {}
    for call in calls:
        if call.sampled_tokens and call.status not in _UNFIT:
            found.setdefault(call.role, []).append(call.call)
    return found
