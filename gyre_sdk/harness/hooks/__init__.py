"""What a developer can attach to a run: hooks, which may veto and edit, and observers, which only watch."""

from gyre_sdk.harness.hooks.firing import RunHooks, telling, wait_for
from gyre_sdk.harness.hooks.observers import Fanout, unobserved
from gyre_sdk.harness.hooks.payloads import (
    Deny,
    Edit,
    LaneInfo,
    Outcome,
    Payload,
    PostCompact,
    PostToolUse,
    PreCompact,
    PreToolUse,
    RunEnd,
    RunStart,
    SubagentStart,
    SubagentStop,
)
from gyre_sdk.harness.hooks.registry import Hooks

__all__ = [
    "Deny",
    "Edit",
    "Fanout",
    "Hooks",
    "LaneInfo",
    "Outcome",
    "Payload",
    "PostCompact",
    "PostToolUse",
    "PreCompact",
    "PreToolUse",
    "RunEnd",
    "RunHooks",
    "RunStart",
    "SubagentStart",
    "SubagentStop",
    "telling",
    "unobserved",
    "wait_for",
]
