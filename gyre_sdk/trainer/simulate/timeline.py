"""Pictures of cells over time, as HTML or PNG: of a simulated fleet, or of what a store recorded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.cells.state import CellState
from gyre_sdk.trainer.simulate.fleet import Fleet
from gyre_sdk.view.lanes import COLOURS, CURVES, GRAPH, UNNAMED, WIDTH, Lanes, Point, Span, page


def lane(name: str, fleet: Fleet) -> Lanes:
    """Return what is drawn of one policy's fleet."""
    cells = fleet.trace.cells
    return Lanes(
        f"{name}: {fleet.now / 3600:.2f} h",
        ["core", *(f"satellite {number}" for number in range(1, len(cells)))],
        [_spans(history, fleet.now) for history in cells],
        [Point(*look) for look in fleet.trace.water],
        fleet.now,
    )


def check(path: Path, option: str = "--timeline") -> None:
    """Refuse a file whose ending is not one of a picture.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`.
    """
    if path.suffix not in (".html", ".png"):
        raise SettingsError(f"{option} {path}: a timeline is .html or .png")


def write(path: Path, title: str, lanes: Sequence[Lanes], option: str = "--timeline") -> None:
    """Write a picture; its form is the file's ending.

    Raises:
        SettingsError: the ending is neither `.html` nor `.png`, or the file cannot be written; it names the option.
    """
    check(path, option)
    try:
        if path.suffix == ".html":
            path.write_text(page(title, lanes), "utf-8")
        else:
            path.write_bytes(as_png(lanes))
    except OSError as error:
        raise SettingsError(f"{option} {path} cannot be written: {error}; name another file") from error


def _spans(history: Sequence[tuple[float, CellState]], end: float) -> list[Span]:
    """Return a cell's history as stretches up to the end; empty ones are left out."""
    stops = [start for start, _ in history[1:]] + [end]
    found = [Span(start, min(stop, end), state) for (start, state), stop in zip(history, stops, strict=True)]
    return [span for span in found if span.start < span.stop]


def as_png(lanes: Sequence[Lanes]) -> bytes:
    """Return an image: a block of rows per fleet, one per cell in the colours of `COLOURS`, its water below."""
    longest = max(1e-6, *(lane.end for lane in lanes))
    blocks = [_block(lane, longest) for lane in lanes]
    gap = np.full((12, WIDTH, 3), 255, np.uint8)
    return _png(np.concatenate([part for block in blocks for part in (block, gap)]))


def _block(lane: Lanes, longest: float) -> NDArray[np.uint8]:
    row = max(1, min(16, 360 // max(1, len(lane.cells))))
    image = np.full((row * len(lane.cells) + 6 + GRAPH, WIDTH, 3), 255, np.uint8)
    scale = (WIDTH - 1) / longest
    for number, spans in enumerate(lane.cells):
        for start, stop, state in spans:
            left, right = int(start * scale), max(int(stop * scale), int(start * scale) + 1)
            image[number * row : (number + 1) * row - (row > 2), left:right] = _rgb(COLOURS.get(state, UNNAMED))
    points = np.asarray(lane.thinned(), dtype=np.float64).reshape(-1, 4)
    if len(points):
        most = max(points[:, 1].max(), points[:, 2].max(), 1.0)
        bottom = len(image) - 1
        for column, colour in ((2, CURVES["capacity (runs)"]), (1, CURVES["water (runs)"])):
            xs = (points[:, 0] * scale).astype(np.int64)
            ys = bottom - ((GRAPH - 2) * points[:, column] / most).astype(np.int64)
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
