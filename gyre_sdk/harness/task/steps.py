"""Rewards of tasks with several steps: when to stop, and the score of the whole. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from gyre_sdk.harness.task.model import Task
from gyre_sdk.harness.task.parts import Step
from gyre_sdk.records import Score


def below(step: Step, score: Score | None) -> str | None:
    """Return why the steps after this one are left out, or None when they are not.

    Args:
        score: None when the step has no score, which is below every threshold.
    """
    for part, least in step.thresholds().items():
        found = None if score is None else score.reward if part == "reward" else score.parts.get(part)
        if found is None:
            return f"step {step.name!r} has no {part}; its min_reward is {least:g}"
        if found < least:
            return f"step {step.name!r}: {part} {found:g} is below its min_reward {least:g}"
    return None


def combine(task: Task, scores: Sequence[Score]) -> Score:
    """Return the score of a task from those of its steps, in order; steps that were left out count 0.

    `mean`: the mean over all steps (leaving steps out must never raise a reward, so unlike in the format they count);
    `final`: the last step's, 0 when it was left out. A step whose evaluation failed leaves the whole without a reward. Parts
    are `<step>` for each reward and `<step>/<part>` for each part of it.
    """
    parts: dict[str, float] = {}
    rewards: list[float] = []
    for step, score in zip(task.steps, scores, strict=False):
        if score.reward is None:
            return msgspec.structs.replace(score, parts=parts, explanation=f"step {step.name!r}: {score.explanation}")
        rewards.append(score.reward)
        parts[step.name] = score.reward
        parts |= {f"{step.name}/{part}": value for part, value in score.parts.items() if part != "reward"}
    left_out = [step.name for step in task.steps[len(rewards) :]]
    why = below(task.steps[len(rewards) - 1], scores[len(rewards) - 1]) if left_out and rewards else None
    note = f"; {why or 'the agent did not ask for more'}; left out: {', '.join(left_out)}" if left_out else ""
    reward = math.fsum(rewards) / len(task.steps) if task.step_reward == "mean" else 0.0 if left_out else rewards[-1]
    tampered = tuple(dict.fromkeys(place for score in scores for place in score.tampered))
    explanation = f"{len(rewards)} of {len(task.steps)} steps scored{note}"
    return Score(reward, parts, explanation, tampered=tampered, output=scores[-1].output if scores else "")
