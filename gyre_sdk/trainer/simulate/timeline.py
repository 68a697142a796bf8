"""A simulated training as a picture: every cell's role over time, water against capacity, ready work. HTML or PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.simulate.fleet import Fleet

COLOURS: Mapping[CellState, str] = {
    CellState.SERVING: "#4c9be8",
    CellState.DRAINING: "#c9b458",
    CellState.SWITCHING: "#8a8f98",
    CellState.TRAINING: "#e8734c",
    CellState.LOADING: "#6fbf73",
    CellState.FAILED: "#7a2230",
    CellState.STOPPED: "#d8dbe0",
}
_WIDTH, _LEFT, _GRAPH = 1200, 90, 90
_POINTS = 1200
"""Points of a curve: more than a screen shows."""
_WATER, _CAPACITY, _READY = "#1d4f91", "#9ec5ee", "#b4451f"


class Lane(NamedTuple):
    """One policy's fleet, to be drawn."""

    name: str
    fleet: Fleet


def check(path: Path) -> None:
    """Refuse a file whose ending is not one of a picture.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`.
    """
    if path.suffix not in (".html", ".png"):
        raise SettingsError(f"--timeline {path}: a timeline is .html or .png")


def write(path: Path, title: str, lanes: Sequence[Lane]) -> None:
    """Write a picture; its form is the file's ending.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`, or the file cannot be written.
    """
    check(path)
    try:
        if path.suffix == ".html":
            path.write_text(as_html(title, lanes), "utf-8")
        else:
            path.write_bytes(as_png(lanes))
    except OSError as error:
        raise SettingsError(f"--timeline {path} cannot be written: {error}; name another file") from error


def as_html(title: str, lanes: Sequence[Lane]) -> str:
    """Return a page that needs nothing else; hovering a bar tells state and time."""
    longest = max(lane.fleet.now for lane in lanes)
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{state}</span>'
        for state, colour in [
            *COLOURS.items(),
            ("water (runs)", _WATER),
            ("capacity (runs)", _CAPACITY),
            ("ready work", _READY),
        ]
        if state not in (CellState.FAILED, CellState.STOPPED)
    )
    parts = "".join(f"<h2>{escape(name)}: {fleet.now / 3600:.2f} h</h2>{_svg(fleet, longest)}" for name, fleet in lanes)
    style = (
        "body{font:14px system-ui,sans-serif;margin:2em;color:#222}h2{font-size:15px;margin:1.2em 0 .3em}"
        "span{margin-right:1em;white-space:nowrap}i{display:inline-block;width:1em;height:.8em;margin-right:.3em}"
        "svg{width:100%;height:auto}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body><h1>{escape(title)}</h1><p>{legend}</p>{parts}</body></html>\n"
    )


def _svg(fleet: Fleet, longest: float) -> str:
    cells = fleet.trace.cells
    row = max(2.0, min(18.0, 360 / len(cells)))
    scale = (_WIDTH - _LEFT) / longest
    top = row * len(cells) + 12
    height = top + _GRAPH + 22
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">']
    for number, history in enumerate(cells):
        y = number * row
        if row >= 10:
            name = "core" if number == 0 else f"satellite {number}"
            parts.append(f'<text x="0" y="{y + row - 4:.1f}" font-size="11">{name}</text>')
        for start, stop, state in spans(history, fleet.now):
            x, width = _LEFT + start * scale, max((stop - start) * scale, 0.4)
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{row - 1:.1f}" fill="{COLOURS[state]}">'
                f"<title>{state} {start / 60:.1f}-{stop / 60:.1f} min</title></rect>"
            )
    points = _thinned(fleet)
    if len(points):
        runs = max(points[:, 1].max(), points[:, 2].max(), 1.0)
        work = max(points[:, 3].max(), 1.0)
        for column, most, colour in ((2, runs, _CAPACITY), (1, runs, _WATER), (3, work, _READY)):
            xs, ys = _LEFT + points[:, 0] * scale, top + _GRAPH * (1 - points[:, column] / most)
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        parts.append(f'<text x="0" y="{top + 11:.0f}" font-size="11">{runs:.0f} runs</text>')
    for tick in range(9):
        at = longest * tick / 8
        parts.append(
            f'<text x="{_LEFT + at * scale:.1f}" y="{height - 4:.0f}" font-size="11" text-anchor="middle">'
            f"{at / 3600:.1f} h</text>"
        )
    return "".join([*parts, "</svg>"])


def spans(history: Sequence[tuple[float, CellState]], end: float) -> list[tuple[float, float, CellState]]:
    """Return a cell's history as stretches (start, stop, state) up to the end; empty ones are left out."""
    stops = [start for start, _ in history[1:]] + [end]
    found = [(start, min(stop, end), state) for (start, state), stop in zip(history, stops, strict=True)]
    return [span for span in found if span[0] < span[1]]


def _thinned(fleet: Fleet) -> NDArray[np.float64]:
    points = np.asarray(fleet.trace.water, dtype=np.float64).reshape(-1, 4)
    if len(points) <= _POINTS:
        return points
    return points[np.linspace(0, len(points) - 1, _POINTS).astype(np.int64)]


def as_png(lanes: Sequence[Lane]) -> bytes:
    """Return an image: a block of rows per policy, one per cell in the colours of `COLOURS`, its water below."""
    longest = max(lane.fleet.now for lane in lanes)
    blocks = [_block(lane.fleet, longest) for lane in lanes]
    gap = np.full((12, _WIDTH, 3), 255, np.uint8)
    return _png(np.concatenate([part for block in blocks for part in (block, gap)]))


def _block(fleet: Fleet, longest: float) -> NDArray[np.uint8]:
    cells = fleet.trace.cells
    row = max(1, min(16, 360 // len(cells)))
    image = np.full((row * len(cells) + 6 + _GRAPH, _WIDTH, 3), 255, np.uint8)
    scale = (_WIDTH - 1) / longest
    for number, history in enumerate(cells):
        for start, stop, state in spans(history, fleet.now):
            left, right = int(start * scale), max(int(stop * scale), int(start * scale) + 1)
            image[number * row : (number + 1) * row - (row > 2), left:right] = _rgb(COLOURS[state])
    points = _thinned(fleet)
    if len(points):
        most = max(points[:, 1].max(), points[:, 2].max(), 1.0)
        bottom = len(image) - 1
        for column, colour in ((2, _CAPACITY), (1, _WATER)):
            xs = (points[:, 0] * scale).astype(np.int64)
            ys = bottom - ((_GRAPH - 2) * points[:, column] / most).astype(np.int64)
            for x, y, stop in zip(xs, ys, [*xs[1:], xs[-1] + 1], strict=True):
                image[y - 1 : y + 1, x : max(stop, x + 1)] = _rgb(colour)
    return image


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _png(image: NDArray[np.uint8]) -> bytes:
    """Encode 8-bit RGB rows (PNG, ISO/IEC 15948): header, one compressed stretch of unfiltered rows, end."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + width * 3), np.uint8)
    rows[:, 1:] = image.reshape(height, width * 3)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
