"""Which worker a run belongs to, and what several workers' answers add up to. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

_SUMMED = ("calls_in_flight", "runs_open", "finished", "moved", "calls", "tokens")
_ALIKE = ("gyre_replica_state", "gyre_replica_version", "gyre_build_info")
"""Gauges that every worker gives alike: not added up."""


def shard_of(run: str, shards: int) -> int:
    """Return the number of the worker that a run's calls are written by."""
    return zlib.crc32(run.encode()) % shards


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the answers of all workers as one: counts added up, the rest as the first has it."""
    out = dict(answers[0])
    for name, value in out.items():
        values = [answer.get(name) for answer in answers]
        if name == "replicas" and isinstance(value, list):
            out[name] = _replicas(values)
        elif name in _SUMMED and isinstance(value, int):
            out[name] = sum(item for item in values if isinstance(item, int))
    return out


def merged_metrics(pages: Sequence[str]) -> str:
    """Return Prometheus pages of all workers as one."""
    values: dict[str, float] = {}
    order: list[str] = []
    for page in pages:
        for line in page.splitlines():
            if line.startswith("#") or not line:
                if line not in values:
                    values[line] = 0
                    order.append(line)
                continue
            sample, _, text = line.rpartition(" ")
            number = float(text) if any(mark in text for mark in ".en") else int(text)
            if sample not in values:
                values[sample] = number
                order.append(sample)
            elif not sample.startswith(_ALIKE):
                values[sample] += number
    return "\n".join(_grouped(order, values)) + "\n"


def _grouped(order: list[str], values: dict[str, float]) -> list[str]:
    """Return lines with each metric's samples after its head, wherever a page first had them."""
    heads: dict[str, list[str]] = {}
    for line in order:
        if line.startswith("#"):
            heads.setdefault(line.split()[2], []).append(line)
    samples: dict[str, list[str]] = {name: [] for name in heads}
    for line in order:
        if line and not line.startswith("#"):
            name = line.partition("{")[0]
            family = next(
                (name.removesuffix(end) for end in ("_bucket", "_sum", "_count") if name.removesuffix(end) in heads),
                name,
            )
            samples.setdefault(name if name in heads else family, []).append(f"{line} {values[line]!r}")
    return [line for name, lines in samples.items() for line in (*heads.get(name, ()), *lines)]


def _replicas(tables: Sequence[Any]) -> list[dict[str, Any]]:
    by_url: dict[str, dict[str, Any]] = {}
    for table in tables:
        for item in table or ():
            known = by_url.setdefault(item["url"], {**item, "calls": 0, "tokens": 0})
            known["calls"] += item["calls"]
            known["tokens"] += item["tokens"]
    return list(by_url.values())
