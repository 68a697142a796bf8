"""Calls that are long enough to be cut, and what vLLM counts meanwhile."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

import gyre_sdk as gyre
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord

LONG = 600
"""Tokens that a long call samples."""


def long_call(service: ServiceClient, store: Path, number: int) -> CallRecord:
    """Make a greedy call with a long prompt of its own; return what is on record of it."""
    words = " ".join(map(str, range(1000 * number, 1000 * number + 60)))
    task = gyre.Task(name="long", instruction=words, scorer=lambda workspace: 1.0)
    with gyre.session(task, service=service, workspace="local") as agent:
        agent.openai().chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": task.instruction}],
            max_tokens=LONG,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
    with Journal(store, "r") as journal:
        return next(iter(journal.calls(agent.result.run)))


def metric(url: str, name: str) -> float:
    """Return the sum of a metric."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if re.match(rf"vllm:{name}[{{ ]", line))
