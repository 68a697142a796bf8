"""The error policy: what follows from the way a run ended, as one table. Pure.

A reward says something about the agent, and only that: whatever fails around it gives no reward (None), never a 0. The
one 0 that nobody evaluated is the placeholder of a run that never started (arXiv:2609.33848, partial scoring).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from gyre_sdk.records import End, RunStatus, Score, ScoreStatus


class Retry(StrEnum):
    """What is tried again, within a budget, before an end is an end."""

    NOTHING = "nothing"
    START = "start"
    """Opening the workspace."""
    EVALUATION = "evaluation"
    RUN = "run"
    """The run does not stand for its place in its group: whoever planned it runs another."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What follows from one end."""

    status: RunStatus
    """Terminal state on record."""
    retried: Retry
    graded: bool
    """What the agent left is evaluated."""
    trainable: bool
    """Its tokens may be trained, and its reward counts in its group, if there is one."""
    placeholder: bool = False
    """It stands in its group with reward 0 and no token."""


POLICY: Mapping[End, Rule] = MappingProxyType(
    {
        # end                    state                      tried again       graded         trainable
        End.COMPLETED: Rule(RunStatus.COMPLETED, Retry.NOTHING, graded=True, trainable=True),
        End.AGENT_FAILED: Rule(RunStatus.AGENT_ERROR, Retry.NOTHING, graded=True, trainable=True),
        End.TIMED_OUT: Rule(RunStatus.TIMED_OUT, Retry.NOTHING, graded=True, trainable=True),
        End.LIMIT: Rule(RunStatus.LIMIT, Retry.NOTHING, graded=True, trainable=True),
        End.CONTEXT_FULL: Rule(RunStatus.LIMIT, Retry.NOTHING, graded=True, trainable=True),
        End.MODEL_FAILED: Rule(RunStatus.AGENT_ERROR, Retry.NOTHING, graded=False, trainable=False),
        End.NEVER_STARTED: Rule(
            RunStatus.WORKSPACE_ERROR, Retry.START, graded=False, trainable=False, placeholder=True
        ),
        End.WORKSPACE_LOST: Rule(RunStatus.WORKSPACE_ERROR, Retry.NOTHING, graded=False, trainable=False),
        End.SCORER_FAILED: Rule(RunStatus.SCORER_ERROR, Retry.EVALUATION, graded=False, trainable=False),
        End.CUT_OFF: Rule(RunStatus.TIMED_OUT, Retry.NOTHING, graded=False, trainable=False),
        End.CANCELLED: Rule(RunStatus.CANCELLED, Retry.RUN, graded=False, trainable=False),
    }
)
"""One row per end. `graded` is about the agent's end; the four below it are ends of the evaluation or of no run at all."""

_AFTER_EVALUATION: Mapping[ScoreStatus, End] = MappingProxyType(
    {ScoreStatus.FAILED: End.SCORER_FAILED, ScoreStatus.LOST: End.WORKSPACE_LOST, ScoreStatus.CUT_OFF: End.CUT_OFF}
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What goes on record of a run's end."""

    end: End
    status: RunStatus
    reward: float | None
    """None: no reward."""
    placeholder: bool
    trainable: bool


def outcome(end: End, score: Score | None) -> Outcome:
    """Return what a run that ended so comes to.

    Args:
        end: how the agent ended.
        score: what the evaluation came to; None when there was none.

    Only what an end is graded for counts: a reward beside an end that is not graded is dropped.
    """
    rule = POLICY[end]
    if rule.graded and score is not None and score.status is not ScoreStatus.SCORED:
        end = _AFTER_EVALUATION[score.status]
        rule = POLICY[end]
    reward = score.reward if rule.graded and score is not None else 0.0 if rule.placeholder else None
    return Outcome(end, rule.status, reward, rule.placeholder, rule.trainable and reward is not None)


def stands(status: RunStatus) -> bool:
    """Tell whether a run in this state stands for its place in its group, whatever its reward; else another is run."""
    return status is not RunStatus.RUNNING and status not in _REPEATED


_REPEATED = frozenset(rule.status for rule in POLICY.values() if rule.retried is Retry.RUN)
