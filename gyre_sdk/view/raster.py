"""Pictures of lanes as pixels: a PNG image with the same shapes, words and legend as the page."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from textwrap import wrap

import numpy as np
from numpy.typing import NDArray

from gyre_sdk.view.drawing import INK, WIDTH, Box, Line, Shape, Words, draw
from gyre_sdk.view.escape import visible
from gyre_sdk.view.lanes import Lanes, legend
from gyre_sdk.view.letters import ADVANCE, ASCENT, HEIGHT, pixels

_SCALE = 2
"""Pixels of a unit of the drawing."""
_MARGIN = 24
_HEADING = 22
"""Height of a line of text with the space around it."""
_ACROSS = WIDTH // ADVANCE
"""Letters of a line."""

Image = NDArray[np.uint8]


def png(title: str, drawn: Sequence[Lanes], note: str = "") -> bytes:
    """Return an image; arguments as of `page.page`."""
    longest = max((one.end for one in drawn), default=0.0)
    blocks = [_head(title, drawn, note)]
    for one in drawn:
        height, shapes = draw(one, longest)
        heading = Words(0.0, _HEADING - 6, visible(one.title, _ACROSS))
        blocks += [_block(_HEADING, [heading], bold=True), _block(int(height) + 14, shapes)]
    whole = np.concatenate(blocks)
    margin = _MARGIN * _SCALE
    return _encoded(np.pad(whole, ((margin, margin), (margin, margin), (0, 0)), constant_values=255))


def _head(title: str, drawn: Sequence[Lanes], note: str) -> Image:
    lines = [visible(title, _ACROSS), *wrap(visible(note, 1000), _ACROSS)]
    shapes: list[Shape] = [Words(0.0, _HEADING * place + 12, line) for place, line in enumerate(lines)]
    x, y = 0, _HEADING * len(lines) + 12
    for name, colour in legend(drawn).items():
        wide = 14 + ADVANCE * len(name)
        if x + wide > WIDTH:
            x, y = 0, y + _HEADING
        shapes += [Box(x, y - 9, 10, 10, colour, name), Words(x + 14, y, name)]
        x += wide + 18
    return np.concatenate(
        [_block(_HEADING, shapes[:1], bold=True), _block(y + 10 - _HEADING, [_moved(one) for one in shapes[1:]])]
    )


def _moved(shape: Shape) -> Shape:
    """Return a shape of the head that is drawn below its title."""
    assert not isinstance(shape, Line)
    return shape._replace(y=shape.y - _HEADING)


def _block(height: int, shapes: Sequence[Shape], *, bold: bool = False) -> Image:
    """Draw shapes on a white area of a height; what reaches over its edge is cut."""
    image = np.full((height * _SCALE, WIDTH * _SCALE, 3), 255, np.uint8)
    for shape in shapes:
        match shape:
            case Box():
                _fill(image, shape)
            case Line():
                _follow(image, shape)
            case Words():
                _write(image, shape, bold=bold)
    return image


def _fill(image: Image, box: Box) -> None:
    left, top = round(box.x * _SCALE), round(box.y * _SCALE)
    right, bottom = round((box.x + box.width) * _SCALE), round((box.y + box.height) * _SCALE)
    image[top : max(bottom, top + 1), left : max(right, left + 1)] = _rgb(box.colour)


def _follow(image: Image, line: Line) -> None:
    ends = np.asarray(line.points, np.float64) * _SCALE
    if not len(ends):
        return
    parts = [ends[:1]]
    for start, stop in pairwise(ends):
        number = int(np.abs(stop - start).max()) + 1
        parts.append(start + (stop - start) * (np.arange(1, number + 1) / number)[:, None])
    places = np.rint(np.concatenate(parts)).astype(np.int64)
    for across in range(_SCALE):
        xs = np.clip(places[:, 0] + across, 0, image.shape[1] - 1)
        ys = np.clip(places[:, 1] + across, 0, image.shape[0] - 1)
        image[ys, np.clip(places[:, 0], 0, image.shape[1] - 1)] = _rgb(line.colour)
        image[np.clip(places[:, 1], 0, image.shape[0] - 1), xs] = _rgb(line.colour)


def _write(image: Image, words: Words, *, bold: bool) -> None:
    drawn = np.kron(pixels(words.text), np.ones((_SCALE, _SCALE), np.bool_))
    if bold:
        drawn[:, 1:] |= drawn[:, :-1]
    before = {"start": 0.0, "middle": 0.5, "end": 1.0}[words.anchor]
    left = max(0, round(words.x * _SCALE - before * drawn.shape[1]))
    top = max(0, round((words.y - ASCENT) * _SCALE))
    area = image[top : top + HEIGHT * _SCALE, left : left + drawn.shape[1]]
    area[drawn[: area.shape[0], : area.shape[1]]] = _rgb(words.colour or INK)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _encoded(image: Image) -> bytes:
    """Encode 8-bit RGB rows (PNG, ISO/IEC 15948): header, one compressed stretch of unfiltered rows, end."""
    height, width, _ = image.shape
    rows = np.zeros((height, 1 + width * 3), np.uint8)
    rows[:, 1:] = image.reshape(height, width * 3)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
