"""Calls and runs to build trees from, and shared cases: what the tree, selection and credit tests have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from gyre_sdk.records import CallId, CallStatus, RunId, RunRecord, RunStatus, VersionSpan
from gyre_sdk.tree import RunTree, SampledCall

CASES = Path(__file__).parents[2] / "shared" / "cases"


def case(area: str, name: str) -> dict[str, Any]:
    """Read a shared case, or skip."""
    path = CASES / area / f"{name}.json"
    if not path.exists():
        pytest.skip(f"shared case {path} is missing")
    return json.loads(path.read_text())


def call(
    name: str,
    prompt: list[int],
    output: list[int],
    *,
    role: str = "main",
    lane: str = "lane",
    status: CallStatus = CallStatus.DELIVERED,
    parent: str | None = None,
    logprobs: list[float | None] | None = None,
    version: int = 3,
    **others: Any,
) -> SampledCall:
    """Make a call; log-probs default to one value per token. Other arguments are fields of the call."""
    spans = [VersionSpan(version, 0, len(output))] if output else []
    return SampledCall(
        CallId(name),
        np.array(prompt, np.int32),
        np.array(output, np.int32),
        [-0.25] * len(output) if logprobs is None else logprobs,
        spans,
        role=role,
        lane=lane,
        status=status,
        parent=CallId(parent) if parent else None,
        **others,
    )


def from_case(entry: dict[str, Any], **kwargs: Any) -> SampledCall:
    """Make the call of a case's entry."""
    return call(entry["call"], entry["prompt"], entry["output"], role=entry.get("role", "main"), **kwargs)


def run(name: str, reward: float | None, *, group: str | None = "g", placeholder: bool = False) -> RunRecord:
    """Make an ended run."""
    return RunRecord(
        run=RunId(name),
        task="task",
        created_at=0.0,
        group=group,  # type: ignore[arg-type]
        reward=reward,
        placeholder=placeholder,
        status=RunStatus.COMPLETED if reward is not None else RunStatus.SCORER_ERROR,
    )


def tokens(tree: RunTree, name: str) -> list[int]:
    """Return the token ids of a call's path."""
    return tree.ids(CallId(name)).tolist()


_ids = st.lists(st.integers(0, 2), max_size=4)
_roles = st.sampled_from(["main", "main", "main-summary", "subagent", "subagent-summary", "critic"])


@st.composite
def recorded_runs(draw: st.DrawFn, max_calls: int = 9) -> list[SampledCall]:
    """Draw the calls of a run: new roots, continuations, cut continuations, resamples, failures, empty answers.

    Three token ids only, so that equal tokens, accidental prefixes and shared first tokens are common.
    """
    made: list[SampledCall] = []
    for number in range(draw(st.integers(1, max_calls))):
        kind = draw(st.sampled_from(["root", "continue", "continue", "continue", "cut", "again"])) if made else "root"
        base = draw(st.sampled_from(made)) if made else None
        if base is None or kind == "root":
            prompt = draw(_ids)
        else:
            whole = base.prompt_ids.tolist() + base.sampled_ids.tolist()
            prompt = {
                "continue": whole,
                "cut": whole[: draw(st.integers(0, len(whole)))],
                "again": base.prompt_ids.tolist(),
            }[kind]
            if kind != "again":
                prompt = prompt + draw(_ids)
        output = draw(_ids)
        logprobs: list[float | None] = [-0.5 - number for _ in output]
        if output and draw(st.integers(0, 9)) == 0:
            logprobs[0] = None
        status = draw(
            st.sampled_from([CallStatus.DELIVERED] * 5 + [CallStatus.COMPLETE, CallStatus.ABORTED, CallStatus.FAILED])
        )
        hint = draw(st.sampled_from([None, *(made_call.call for made_call in made)]))
        made.append(
            call(
                f"c{number}",
                prompt,
                output,
                role=draw(_roles),
                lane=draw(st.sampled_from(["x", "y"])),
                status=status,
                parent=hint,
                logprobs=logprobs,
                version=number,
            )
        )
    return made


@st.composite
def routed_runs(draw: st.DrawFn) -> list[SampledCall]:
    """Draw the calls of a run of which some have expert routes, of three tokens and two routes.

    A continuation repeats the routes of what it continues, or has others somewhere; the last token's are often missing.
    """
    made: list[SampledCall] = []
    for plain in draw(recorded_runs(max_calls=7)):
        size = len(plain.prompt_ids) + len(plain.sampled_ids)
        if not size or draw(st.integers(0, 3)) == 0:
            made.append(plain)
            continue
        rows = np.zeros((size, 2), np.int64)
        if draw(st.booleans()):
            at = draw(st.integers(0, size - 1))
            rows[at] = draw(st.sampled_from([(0, 1), (1, 0), (0, 700)]))
        kept = size - draw(st.integers(0, 1))
        made.append(replace(plain, routes=rows[:kept]))
    return made
