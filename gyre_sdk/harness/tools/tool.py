"""A tool: what a model is told of it, what it takes, what it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from gyre_sdk.harness.ports import Workspace
from gyre_sdk.records import ExecResult


class ToolOutput(msgspec.Struct, frozen=True):
    """What a tool gives back."""

    text: str
    """What the model is shown."""
    is_error: bool = False
    result: ExecResult | None = None
    """What its command did, where it ran one."""
    submitted: str | None = None
    """The answer, where the tool hands one in."""
    denied: bool = False
    """Whether a hook refused the call; `text` is the reason."""


Run: TypeAlias = "Callable[[Workspace, Any], str | ToolOutput | Awaitable[str | ToolOutput]]"
"""Gets the lane's workspace and the validated input. Text is an output that is no error. What it raises, its caller gets."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool for models; `agent.tools.plus(tool)` offers it beside the others.

    Example::

        class Look(msgspec.Struct, forbid_unknown_fields=True):
            where: Annotated[str, msgspec.Meta(description="a folder")]

        look = gyre.Tool("look", "List a folder.", Look, lambda workspace, look: "\\n".join(os.listdir(look.where)))

    Raises:
        TypeError: `input` is not a struct that forbids unknown fields.
    """

    name: str
    description: str
    input: type[msgspec.Struct]
    """Its fields are the tool's parameters; `msgspec.Meta(description=...)` describes them to the model."""
    run: Run

    def __post_init__(self) -> None:
        if not issubclass(self.input, msgspec.Struct) or not self.input.__struct_config__.forbid_unknown_fields:
            raise TypeError(
                f"tool {self.name!r}: input is {self.input!r}; give a msgspec.Struct with forbid_unknown_fields=True,"
                " so that a model is told of a parameter that does not exist"
            )

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the input: an object with all its definitions inside, in the subset that all providers take."""
        (schema,), definitions = msgspec.json.schema_components([self.input], ref_template="#/$defs/{name}")
        own = definitions.pop(self.input.__name__, schema)
        kept = {"type", "properties", "required", "additionalProperties"}
        schema = {key: value for key, value in own.items() if key in kept}
        return {**schema, "$defs": definitions} if definitions else schema
