"""Pictures of lanes as a page that needs nothing else; hovering a bar tells state and time. HTML with SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gyre_sdk.view.drawing import WIDTH, Box, Line, Shape, Words, draw
from gyre_sdk.view.escape import visible
from gyre_sdk.view.lanes import Lanes, legend

_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222}h2{font-size:15px;margin:1.2em 0 .3em}"
    "span{margin-right:1em;white-space:nowrap}i{display:inline-block;width:1em;height:.8em;margin-right:.3em}"
    "div{overflow-x:auto}svg{width:100%;min-width:860px;height:auto}text{font-size:11px}"
    "@media print{svg{min-width:0}}"
)


def page(title: str, drawn: Sequence[Lanes], note: str = "") -> str:
    """Return a page.

    Args:
        title: above all.
        drawn: fleets, on one axis of time.
        note: what is to be said of them together.
    """
    parts = "".join(f"<h2>{_text(one.title)}</h2><div>{svg(one, max(two.end for two in drawn))}</div>" for one in drawn)
    colours = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in legend(drawn).items()
    )
    said = f"<p>{escape(visible(note, 1000))}</p>" if note else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>{said}<p>{colours}</p>{parts}</body></html>\n"
    )


def svg(drawn: Lanes, longest: float | None = None) -> str:
    """Return one fleet's picture as an element of HTML; arguments as of `drawing.draw`."""
    height, shapes = draw(drawn, longest)
    parts = "".join(map(_element, shapes))
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{parts}</svg>'


def _element(shape: Shape) -> str:
    match shape:
        case Box():
            return (
                f'<rect x="{shape.x:.2f}" y="{shape.y:.1f}" width="{shape.width:.2f}" height="{shape.height:.1f}"'
                f' fill="{shape.colour}"><title>{escape(shape.tells)}</title></rect>'
            )
        case Line():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="1.2"/>'
        case Words():
            return (
                f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" fill="{shape.colour}"'
                f' text-anchor="{shape.anchor}">{escape(shape.text)}</text>'
            )


def _text(text: str) -> str:
    return escape(visible(text, 200))
