"""Hooks: callables of a session, sync or async, that are told what happens and may answer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gyre_sdk.harness.hooks.payloads import PAYLOADS, Deny, Edit, LaneInfo

F = TypeVar("F", bound=Callable[..., Any])
Answer: TypeAlias = Deny | Edit | None
Hook: TypeAlias = Callable[[Any], "Answer | Awaitable[Answer]"]


class Hooks:
    """The hooks of a session, by event.

    Example::

        hooks = gyre.Hooks(SubagentStop=print)

        @hooks.on("PreToolUse", tool="bash")
        def guard(use: gyre.PreToolUse) -> gyre.Deny | None:
            return gyre.Deny("not as root") if "sudo" in use.input["command"] else None

    Hooks are called in the order in which they were added. Async ones are awaited on the caller's event loop where the
    caller is async (`async with`, `await tools.arun(...)`), else on a loop that gyre keeps in a thread.

    Args:
        hooks: event name -> a callable or several.

    Raises:
        TypeError: an event has no such name.
    """

    def __init__(self, **hooks: Hook | Sequence[Hook]) -> None:
        self._by_event: dict[str, tuple[Registered, ...]] = {}
        for event, given in hooks.items():
            for function in (given,) if callable(given) else given:
                self.on(event)(function)

    def on(self, *events: str | type[LaneInfo], tool: str | None = None) -> Callable[[F], F]:
        """Return a decorator that adds a function for events, given by name or payload class.

        Args:
            events: `PreToolUse` and so on.
            tool: a pattern (regular expression, matched whole) of the tools it is for; of tool events only.

        Raises:
            TypeError: an event has no such name, or `tool` is given for one that is not about a tool.
        """
        names = [event if isinstance(event, str) else event.__name__ for event in events]
        for name in names:
            if name not in PAYLOADS:
                raise TypeError(f"there is no hook {name!r}; there are {', '.join(PAYLOADS)}")
            if tool is not None and not name.endswith("ToolUse"):
                raise TypeError(f"hook {name} is not about a tool; leave out tool={tool!r}")
        pattern = re.compile(tool) if tool is not None else None

        def add(function: F) -> F:
            for name in names:
                self._by_event[name] = (*self._by_event.get(name, ()), Registered(function, name, pattern))
            return function

        return add

    def by_event(self) -> Mapping[str, tuple[Registered, ...]]:
        """Return the hooks as they are now; what is added later is not in it."""
        return dict(self._by_event)


@dataclass(frozen=True, slots=True)
class Registered:
    """A hook, and what it is for. Its text names it in messages."""

    function: Callable[[Any], Any]
    event: str
    tool: re.Pattern[str] | None

    def __str__(self) -> str:
        function = inspect.unwrap(self.function)
        name = getattr(function, "__qualname__", None) or repr(function)
        code = getattr(function, "__code__", None)
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"hook {self.event} {name}{place}"
