"""Rewards of tasks with several steps."""

from __future__ import annotations

import pytest

from gyre_sdk.harness.task import Step, Task, below, combine
from gyre_sdk.records import Score, ScoreStatus


def steps(rule: str = "mean", **second) -> Task:
    return Task(
        instruction="x",
        steps=(
            Step(name="a", instruction="x", min_reward=0.5),
            Step(name="b", instruction="y", **second),
            Step(name="c", instruction="z"),
        ),
        step_reward=rule,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("rule", "rewards", "reward"),
    [
        ("mean", [1.0, 0.5, 0.0], 0.5),
        ("mean", [0.2], 0.2 / 3),
        ("mean", [], 0.0),
        ("final", [0.0, 0.0, 1.0], 1.0),
        ("final", [1.0, 1.0], 0.0),
    ],
)
def test_the_reward_of_the_whole(rule, rewards, reward):
    score = combine(steps(rule), [Score(value) for value in rewards])
    assert score.reward == pytest.approx(reward)
    assert score.parts == dict(zip("abc", rewards, strict=False))


def test_stopping_early_never_raises_a_reward():
    task = steps()
    assert combine(task, [Score(0.6), Score(0.4)]).reward <= combine(task, [Score(0.6), Score(0.4), Score(0.0)]).reward
    assert "left out: c" in combine(task, [Score(0.6), Score(0.4)]).explanation


def test_parts_and_tampering_are_kept_apart_by_step():
    score = combine(
        steps(),
        [Score(1.0, {"reward": 1.0, "speed": 0.5}), Score(0.0, {"speed": 0.1}, tampered=("/etc/passwd",)), Score(1.0)],
    )
    assert score.parts == {"a": 1.0, "a/speed": 0.5, "b": 0.0, "b/speed": 0.1, "c": 1.0}
    assert score.tampered == ("/etc/passwd",)


def test_a_failed_evaluation_leaves_no_reward():
    score = combine(steps(), [Score(1.0), Score(None, explanation="the tests hang", status=ScoreStatus.FAILED)])
    assert (score.reward, score.status, score.parts) == (None, ScoreStatus.FAILED, {"a": 1.0})
    assert "step 'b': the tests hang" in score.explanation


@pytest.mark.parametrize(
    ("least", "score", "words"),
    [
        (None, Score(-1.0), None),
        (None, None, None),
        (0.5, Score(0.5), None),
        (0.5, Score(0.49), "reward 0.49 is below its min_reward 0.5"),
        (0.5, None, "no reward"),
        (0.5, Score(None), "no reward"),
        ({"speed": 0.5}, Score(0.0, {"speed": 0.6}), None),
        ({"speed": 0.5}, Score(1.0, {"speed": 0.4}), "speed 0.4"),
        ({"speed": 0.5}, Score(1.0), "no speed"),
    ],
)
def test_when_later_steps_are_left_out(least, score, words):
    found = below(Step(name="a", instruction="x", min_reward=least), score)
    assert found is None if words is None else words in found
