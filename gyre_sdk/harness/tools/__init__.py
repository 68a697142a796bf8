"""Tools for models: their schemas in every protocol, calls of them in any protocol's form, hooks around each."""

from gyre_sdk.harness.tools.built_in import BUILT_IN
from gyre_sdk.harness.tools.tool import Tool, ToolOutput
from gyre_sdk.harness.tools.toolset import Toolset
from gyre_sdk.harness.tools.use import ToolUse

__all__ = ["BUILT_IN", "Tool", "ToolOutput", "ToolUse", "Toolset"]
