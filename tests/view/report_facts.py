"""Facts of a small training with known numbers, for tests of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_sdk.records import CallStatus, GroupId, RunId, RunRecord, RunStatus
from gyre_sdk.view.report import CallFact, Facts, StepFact


def run(name: str, task: str = "t", reward: float | None = None, **more: Any) -> RunRecord:
    """Return a run that ended after `seconds`, 10 by default; a status other than `running` is an end."""
    at, seconds = more.pop("at", 1000.0), more.pop("seconds", 10.0)
    status = more.pop("status", RunStatus.COMPLETED)
    group = more.pop("group", None)
    return RunRecord(
        RunId(name),
        task,
        at,
        group=None if group is None else GroupId(group),
        status=status,
        ended_at=None if status is RunStatus.RUNNING else at + seconds,
        reward=reward,
        **more,
    )


def call(run: str, sampled: int = 5, version: int = 0, **more: Any) -> CallFact:
    """Return a call that was delivered unless told otherwise."""
    return CallFact(
        run,
        more.get("status", CallStatus.DELIVERED),
        sampled,
        version,
        more.get("ended_at"),
        more.get("fork"),
        more.get("error"),
    )


def step(number: int, rewards: Sequence[float], **more: Any) -> StepFact:
    """Return a step with two units of 50 targets."""
    metrics = {
        "loss": 0.5 / number,
        "grad_norm": 1.0,
        "seconds": 9.0,
        "seconds_waiting": 6.0,
        **more.get("metrics", {}),
    }
    units = more.get("units", 2)
    return StepFact(number, 2000.0 + number, ("g",), rewards, units, 50 * units, metrics, more.get("publish_s", 0.25))


def trained() -> Facts:
    """Return two steps with evaluations before and after them, and one of everything that goes wrong."""
    runs = [
        run("e1", "held-out", 0.0, metadata={"split": "before"}),
        run("a1", "easy", 1.0, group="g1", seconds=30.0),
        run("a2", "easy", 1.0, group="g1"),
        run("b1", "hard", 0.0, group="g2"),
        run("b2", "hard", 0.5, group="g2", seconds=20.0),
        run("b3", "hard", None, group="g2", status=RunStatus.SCORER_ERROR, error="no number 17\nmore"),
        run("b4", "hard", None, group="g2", status=RunStatus.SCORER_ERROR, error="no number 18\nmore"),
        run("b5", "hard", 0.0, group="g2", placeholder=True, status=RunStatus.WORKSPACE_ERROR, error="no image"),
        run("b6", "hard", None, group="g3", status=RunStatus.RUNNING),
        run("e2", "held-out", 1.0, metadata={"split": "after"}, dispatch_version=2),
    ]
    calls = [
        call("a1", 7, 1),
        call("a1", 3, 2, fork="compaction"),
        call("a2"),
        call("b1", 0, -1, status=CallStatus.ABORTED, error="the agent hung up"),
    ]
    return Facts(
        name="a store",
        runs=runs,
        calls=calls,
        groups={"g1": ["a1", "a2"], "g2": ["b1", "b2", "b3", "b4", "b5"]},
        steps=(
            step(1, (0.0, 1.0), metrics={"untrained/group_flat": 1.0, "untrained/call_unselected": 4.0}),
            step(2, (), units=0, metrics={"untrained/group_flat": 2.0}),
            step(3, (1.0, 0.5), publish_s=None),
        ),
        versions={0: 0, 1: 1, 2: 3},
    )
