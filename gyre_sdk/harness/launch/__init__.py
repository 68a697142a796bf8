"""Agents without code: an unmodified program as the agent of a run, on this machine or inside the workspace."""

from gyre_sdk.harness.launch.attempt import Attempt, Plan, Where, check_plan
from gyre_sdk.harness.launch.batch import Batch, Stopped
from gyre_sdk.harness.launch.outlet import Outlet
from gyre_sdk.harness.launch.presets import PRESETS, Preset, preset_of
from gyre_sdk.harness.launch.serving import served

__all__ = [
    "PRESETS",
    "Attempt",
    "Batch",
    "Outlet",
    "Plan",
    "Preset",
    "Stopped",
    "Where",
    "check_plan",
    "preset_of",
    "served",
]
