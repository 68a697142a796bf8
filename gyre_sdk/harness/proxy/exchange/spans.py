"""Spans of weights versions over sampled tokens."""

from __future__ import annotations

from gyre_sdk.records import VersionSpan


def join_spans(
    before: list[VersionSpan], start: int, spans: tuple[VersionSpan, ...], total: int, version: int
) -> list[VersionSpan]:
    """Return spans that cover `0..total`: those `before`, then an attempt's own, moved to where it started.

    Stretches that the engine did not label get `version`, which its replica served when the attempt was sent.
    """
    out = list(before)
    for span in spans:
        at = out[-1].end if out else 0
        low, high = max(span.start + start, at), min(span.end + start, total)
        if low > at:
            _append(out, VersionSpan(version, at, low))
        if high > low:
            _append(out, VersionSpan(span.version, low, high))
    at = out[-1].end if out else 0
    if at < total:
        _append(out, VersionSpan(version, at, total))
    return out


def cut_spans(spans: list[VersionSpan], start: int, end: int) -> list[VersionSpan]:
    """Return the part of spans within `start..end`, in the same coordinates."""
    parts = [VersionSpan(span.version, max(span.start, start), min(span.end, end)) for span in spans]
    return [span for span in parts if span.start < span.end]


def _append(out: list[VersionSpan], span: VersionSpan) -> None:
    if out and out[-1].version == span.version and out[-1].end == span.start:
        span = VersionSpan(span.version, out.pop().start, span.end)
    out.append(span)
