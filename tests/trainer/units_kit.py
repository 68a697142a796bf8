"""Recorded runs to seal: records of runs and calls, and what seals them."""

from __future__ import annotations

from typing import Any

from gyre_sdk.credit import Baseline
from gyre_sdk.records import CallId, CallRecord, CallStatus, LaneId, RunId, RunRecord, RunStatus, Sampling, VersionSpan
from gyre_sdk.trainer.units import SealedGroup, Sealer


def run_record(
    run: str, reward: float | None, *, member: int = 0, status: RunStatus = RunStatus.COMPLETED
) -> RunRecord:
    return RunRecord(RunId(run), "task", 0.0, member=member, status=status, reward=reward)


def call(
    run: str,
    name: str,
    prompt: list[int],
    sampled: list[int],
    *,
    role: str = "main",
    sampling: Sampling | None = None,
    **more: Any,
) -> CallRecord:
    fields: dict[str, Any] = {
        "status": CallStatus.DELIVERED,
        "logprobs": [-1.0] * len(sampled),
        "versions": [VersionSpan(3, 0, len(sampled))] if sampled else [],
        "parent": None,
        "fork_reason": None,
        "shared": 0,
        "finish_reason": "stop",
        "received_at": 0.0,
        **more,
    }
    return CallRecord(
        call=CallId(f"{run}-{name}"),
        run=RunId(run),
        lane=LaneId(f"{run}-main"),
        role=role,
        prompt_ids=prompt,
        sampled_ids=sampled,
        sampling=sampling or Sampling(),
        **fields,
    )


def flat_run(run: str, tokens: int) -> list[CallRecord]:
    """A run of one call that sampled so many tokens."""
    return [call(run, "c", [1, 2, 3], list(range(10, 10 + tokens)))]


def seal(runs: list[RunRecord], calls: dict[str, list[CallRecord]], **options: Any) -> SealedGroup:
    lag = options.pop("lag", None)
    sealer = Sealer(**{"baseline": Baseline.MEAN, **options})
    return sealer.seal_records("g", runs, lambda run: calls.get(run, []), lag=lag)


def two_runs() -> tuple[list[RunRecord], dict[str, list[CallRecord]]]:
    return [run_record("a", 1.0), run_record("b", 0.0, member=1)], {"a": flat_run("a", 4), "b": flat_run("b", 6)}
