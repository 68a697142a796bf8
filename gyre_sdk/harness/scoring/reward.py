"""What counts as a reward. Pure.

Format (Harbor): `/logs/verifier/reward.json`, `{name: number}` or a number, before `/logs/verifier/reward.txt`, one number. Of
several names, `reward` is the reward; without it the mean of all is. Any finite number is one, also below 0 or above 1: its scale is
the task's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec

from gyre_sdk.errors import ScoringError
from gyre_sdk.records import Score

REWARD_JSON = "/logs/verifier/reward.json"
REWARD_TXT = "/logs/verifier/reward.txt"
REWARD_LIMIT = 65_536
"""Bytes of a reward file."""


def parse_reward(content: str, file: str) -> Score:
    """Return the score that a reward file holds.

    Raises:
        ScoringError: it is not a finite number, or names with finite numbers; names file and value.
    """
    if len(content.encode()) > REWARD_LIMIT:
        raise ScoringError(f"{file} is larger than {REWARD_LIMIT} bytes; write a number, or names with numbers")
    if not file.endswith(".json"):
        try:
            return Score(finite(float(content.strip()), file))
        except ValueError:
            raise ScoringError(f"{file} holds {content[:80]!r}, which is not a number; write one number") from None
    try:
        value = msgspec.json.decode(content.encode())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ScoringError(
            f"{file} holds {content[:80]!r}, which is not JSON ({error}); write {{name: number}}"
        ) from None
    return as_score(value, file)


def as_score(value: Any, where: str) -> Score:
    """Return the score that a number, or a mapping of names to numbers, stands for.

    Raises:
        ScoringError: it is something else.
    """
    if isinstance(value, Mapping):
        if not value:
            raise ScoringError(f'{where} holds no reward: {{}}; write {{"reward": number}}')
        parts = finite_parts(value, where)
        return Score(parts["reward"] if "reward" in parts else _mean(list(parts.values())), parts)
    return Score(finite(value, where))


def finite_parts(parts: Mapping[Any, Any], where: str) -> dict[str, float]:
    """Return names with numbers as floats.

    Raises:
        ScoringError: one is no number, or not finite.
    """
    return {str(name): finite(number, f"{where}: {name!r}") for name, number in parts.items()}


def finite(value: Any, where: str) -> float:
    """Return a number, also one of numpy's, as a float.

    Raises:
        ScoringError: it is no number, or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ScoringError(
            f"{where} is {str(value)[:80]!r} ({type(value).__name__}), not a number; write a finite number"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ScoringError(f"{where} is {str(value)[:80]}, which is not finite; write a finite number")
    return number


def _mean(values: list[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # the sum of finite numbers need not be finite
        return math.fsum(value / len(values) for value in values)
