"""The live view of a terminal: a fold over events, and a renderer. Views decide nothing."""

from gyre_sdk.view.live import LiveView
from gyre_sdk.view.render import Page, render
from gyre_sdk.view.state import State

__all__ = ["LiveView", "Page", "State", "render"]
