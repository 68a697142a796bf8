"""The tools that a lane offers its model, and how calls of them are answered."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gyre_sdk.errors import HookError, SettingsError
from gyre_sdk.harness.hooks import LaneInfo, RunHooks
from gyre_sdk.harness.ports import Clock, Workspace
from gyre_sdk.harness.tools.calls import (
    Asked,
    Form,
    arguments_of,
    calls_of,
    definition,
    read_call,
    result_of,
    results_of,
)
from gyre_sdk.harness.tools.clip import clip
from gyre_sdk.harness.tools.tool import Tool, ToolOutput
from gyre_sdk.harness.tools.use import ToolUse

SHOWN_CHARS = 30_000
"""Longest output that a model is shown."""


class Toolset:
    """Tools of a lane. A wrong call is answered with what is wrong, for the model to read; nothing is raised.

    Example::

        answer = client.chat.completions.create(model="policy", messages=messages, tools=agent.tools.openai())
        messages += [answer.choices[0].message, *agent.tools.answer(answer)]

    Attributes:
        submitted: what the model handed in with `submit`; None while it has not.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        workspace: Workspace,
        info: LaneInfo,
        hooks: RunHooks,
        clock: Clock,
        *,
        shown_chars: int = SHOWN_CHARS,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._workspace, self._info, self._hooks, self._clock = workspace, info, hooks, clock
        self._shown_chars = shown_chars
        self.submitted: str | None = None

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._tools)

    def only(self, *names: str) -> Toolset:
        """Return a set with these tools and no others.

        Raises:
            SettingsError: there is no such tool.
        """
        for name in names:
            if name not in self._tools:
                raise SettingsError(f"there is no tool {name!r}; the tools are: {', '.join(self._tools)}")
        return self._with([self._tools[name] for name in names])

    def plus(self, *tools: Tool) -> Toolset:
        """Return a set with further tools; one with a known name takes its place."""
        return self._with([*self._tools.values(), *tools])

    def showing(self, chars: int) -> Toolset:
        """Return a set that shows a model at most so many characters of an output."""
        return self._with(list(self._tools.values()), chars)

    # -- what a model is told ----------------------------------------------------------------------------------------

    def openai(self) -> list[dict[str, Any]]:
        """Return the definitions for `chat.completions.create(tools=...)`."""
        return self._definitions(Form.CHAT)

    def responses(self) -> list[dict[str, Any]]:
        """Return the definitions for `responses.create(tools=...)`."""
        return self._definitions(Form.RESPONSES)

    def anthropic(self) -> list[dict[str, Any]]:
        """Return the definitions for `messages.create(tools=...)`."""
        return self._definitions(Form.ANTHROPIC)

    # -- what a model asks for ---------------------------------------------------------------------------------------

    def run(self, call: Any) -> dict[str, Any]:
        """Run one call of any protocol; return its result in the form of the call.

        Raises:
            ProtocolError: it is not a tool call.
            WorkspaceUnavailable, LimitExceeded: the run cannot go on.
            HookError: a hook is at fault.
        """
        asked = read_call(call)
        prepared = self._prepare(asked)
        if isinstance(prepared, ToolOutput):
            return self._result(asked, prepared)
        tool, given = prepared
        return self._result(asked, self._use(asked).run(given, lambda input: self._work(tool, given, input)))

    async def arun(self, call: Any) -> dict[str, Any]:
        """Do as `run` does, from async code."""
        asked = read_call(call)
        prepared = self._prepare(asked)
        if isinstance(prepared, ToolOutput):
            return self._result(asked, prepared)
        tool, given = prepared
        return self._result(asked, await self._use(asked).arun(given, lambda input: self._work(tool, given, input)))

    def answer(self, answer: Any) -> list[dict[str, Any]]:
        """Run the calls of a model's whole answer, in order; return what to append to the conversation.

        Args:
            answer: a chat completion, a response or an Anthropic message, or the part of it that holds the calls.

        Returns:
            Nothing when it calls no tool.

        Raises: as `run`.
        """
        form, calls = calls_of(answer)
        return results_of(form, [self.run(call) for call in calls])

    async def aanswer(self, answer: Any) -> list[dict[str, Any]]:
        """Do as `answer` does, from async code."""
        form, calls = calls_of(answer)
        return results_of(form, [await self.arun(call) for call in calls])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _with(self, tools: Sequence[Tool], chars: int | None = None) -> Toolset:
        return Toolset(
            tools, self._workspace, self._info, self._hooks, self._clock, shown_chars=chars or self._shown_chars
        )

    def _definitions(self, form: Form) -> list[dict[str, Any]]:
        return [definition(form, tool.name, tool.description, tool.schema) for tool in self._tools.values()]

    def _use(self, asked: Asked) -> ToolUse:
        return ToolUse(self._hooks, self._clock, self._info, asked.name, asked.id)

    def _prepare(self, asked: Asked) -> tuple[Tool, Mapping[str, Any]] | ToolOutput:
        """Return the tool and its valid arguments, or what is wrong with the call."""
        tool = self._tools.get(asked.name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolOutput(f"there is no tool {asked.name!r}; the tools are: {known}", is_error=True)
        try:
            given = arguments_of(asked)
            msgspec.convert(given, tool.input)
        except ValueError as error:  # msgspec's are ValueErrors
            return ToolOutput(f"{tool.name}: {_explained(error, tool)}", is_error=True)
        return tool, given

    def _work(self, tool: Tool, given: Mapping[str, Any], input: Mapping[str, Any]) -> Any:
        try:
            valid = msgspec.convert(input, tool.input)
        except msgspec.ValidationError as error:
            raise HookError(
                f"a PreToolUse hook edited the input of {tool.name} from {given!r} to {input!r}: {_explained(error, tool)}"
            ) from error
        output = tool.run(self._workspace, valid)
        if inspect.isawaitable(output):
            return _awaited(output)
        return _output(output)

    def _result(self, asked: Asked, output: ToolOutput) -> dict[str, Any]:
        if output.submitted is not None:
            self.submitted = output.submitted
        return result_of(asked, clip(output.text, self._shown_chars), is_error=output.is_error)


async def _awaited(output: Any) -> ToolOutput:
    return _output(await output)


def _output(output: Any) -> ToolOutput:
    return output if isinstance(output, ToolOutput) else ToolOutput(str(output))


def _explained(error: Exception, tool: Tool) -> str:
    """Turn msgspec's `Expected ..., got ... - at `$.command`` into a sentence with the parameters that there are."""
    message, _, place = str(error).partition(" - at `$")
    message, place = message.replace("`", ""), place.strip("`.")
    parameters = ", ".join(tool.schema["properties"])
    return f"{place + ': ' if place else ''}{message[:1].lower()}{message[1:]}; its parameters are: {parameters}"
