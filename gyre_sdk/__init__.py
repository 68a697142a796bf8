"""gyre: train long-running agents.

agent call -> proxy -> tokens -> replica -> record -> tree -> score -> select -> unit -> loss -> gradient -> step
-> publish -> replicas -> proxy routing

Names load when they are first used, so that `import gyre_sdk` costs nothing and never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre_sdk.errors import LimitExceeded
    from gyre_sdk.harness.hooks import (
        Deny,
        Edit,
        Hooks,
        LaneInfo,
        PostCompact,
        PostToolUse,
        PreCompact,
        PreToolUse,
        RunEnd,
        RunStart,
        SubagentStart,
        SubagentStop,
    )
    from gyre_sdk.harness.limits import Limits
    from gyre_sdk.harness.proxy.routing import ReplicaSpec
    from gyre_sdk.harness.proxy.server import ProxySettings
    from gyre_sdk.harness.service import ServiceClient
    from gyre_sdk.harness.session import Session as session
    from gyre_sdk.harness.session import serve
    from gyre_sdk.harness.task import Task, TaskSet
    from gyre_sdk.harness.tools import Tool, ToolOutput, Toolset
    from gyre_sdk.harness.workspace import WorkspacePool
    from gyre_sdk.journal import Journal
    from gyre_sdk.records import ExecResult, RunResult, RunStatus, Score

__version__ = "0.1.0"

_HOMES = {
    "Deny": "gyre_sdk.harness.hooks",
    "Edit": "gyre_sdk.harness.hooks",
    "ExecResult": "gyre_sdk.records",
    "Hooks": "gyre_sdk.harness.hooks",
    "Journal": "gyre_sdk.journal",
    "LaneInfo": "gyre_sdk.harness.hooks",
    "LimitExceeded": "gyre_sdk.errors",
    "Limits": "gyre_sdk.harness.limits",
    "PostCompact": "gyre_sdk.harness.hooks",
    "PostToolUse": "gyre_sdk.harness.hooks",
    "PreCompact": "gyre_sdk.harness.hooks",
    "PreToolUse": "gyre_sdk.harness.hooks",
    "ProxySettings": "gyre_sdk.harness.proxy.server",
    "ReplicaSpec": "gyre_sdk.harness.proxy.routing",
    "RunEnd": "gyre_sdk.harness.hooks",
    "RunResult": "gyre_sdk.records",
    "RunStart": "gyre_sdk.harness.hooks",
    "RunStatus": "gyre_sdk.records",
    "Score": "gyre_sdk.records",
    "ServiceClient": "gyre_sdk.harness.service",
    "SubagentStart": "gyre_sdk.harness.hooks",
    "SubagentStop": "gyre_sdk.harness.hooks",
    "Task": "gyre_sdk.harness.task",
    "TaskSet": "gyre_sdk.harness.task",
    "Tool": "gyre_sdk.harness.tools",
    "ToolOutput": "gyre_sdk.harness.tools",
    "Toolset": "gyre_sdk.harness.tools",
    "WorkspacePool": "gyre_sdk.harness.workspace",
    "serve": "gyre_sdk.harness.session",
    "session": "gyre_sdk.harness.session:Session",
}

__all__ = [
    "Deny",
    "Edit",
    "ExecResult",
    "Hooks",
    "Journal",
    "LaneInfo",
    "LimitExceeded",
    "Limits",
    "PostCompact",
    "PostToolUse",
    "PreCompact",
    "PreToolUse",
    "ProxySettings",
    "ReplicaSpec",
    "RunEnd",
    "RunResult",
    "RunStart",
    "RunStatus",
    "Score",
    "ServiceClient",
    "SubagentStart",
    "SubagentStop",
    "Task",
    "TaskSet",
    "Tool",
    "ToolOutput",
    "Toolset",
    "WorkspacePool",
    "serve",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gyre_sdk' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
