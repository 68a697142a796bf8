"""One use of a tool: `PreToolUse`, the work, `PostToolUse`; one of each, whatever happens between."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gyre_sdk.harness.hooks import Deny, LaneInfo, Outcome, PostToolUse, PreToolUse, RunHooks, wait_for
from gyre_sdk.harness.limits import is_limit
from gyre_sdk.harness.ports import Clock
from gyre_sdk.harness.tools.tool import ToolOutput

Work = Callable[[Mapping[str, Any]], Any]
"""Does it with an input, perhaps edited; gives a `ToolOutput`, or an awaitable of one."""


class ToolUse:
    """One use of a tool.

    Args:
        hooks: of the run.
        clock: times it.
        info: where.
        tool: its name.
        call_id: the model's id of the call; empty where code called.
    """

    def __init__(self, hooks: RunHooks, clock: Clock, info: LaneInfo, tool: str, call_id: str = "") -> None:
        self._hooks, self._clock = hooks, clock
        self._place = msgspec.structs.asdict(info) | {"tool": tool, "call_id": call_id}
        self._input: Mapping[str, Any] = {}
        self._began = 0.0
        self._admitted = False

    def run(self, input: Mapping[str, Any], work: Work) -> ToolOutput:
        """Do it; a refusal is an output that is an error.

        Raises:
            HookError: a hook is at fault.
            Exception: what the work raised.
        """
        try:
            denied = self._admit(*self._hooks.fire(self._pre(input)))
            output = denied or wait_for(work(self._input))
        except BaseException as error:
            self._fail(error)
            raise
        if not self._hooks.ended(self):
            return output
        return self._shown(output, self._hooks.fire(self._post(output))[0])

    async def arun(self, input: Mapping[str, Any], work: Work) -> ToolOutput:
        """Do it from async code; blocking work runs in a thread, async work and async hooks on the running loop."""
        try:
            denied = self._admit(*await self._hooks.afire(self._pre(input)))
            output = denied or await self._awaited(work)
        except BaseException as error:
            self._fail(error)
            raise
        if not self._hooks.ended(self):
            return output
        return self._shown(output, (await self._hooks.afire(self._post(output)))[0])

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _awaited(self, work: Work) -> Any:
        output = await asyncio.to_thread(work, self._input)
        return await output if inspect.isawaitable(output) else output

    def _pre(self, input: Mapping[str, Any]) -> PreToolUse:
        self._input, self._began = input, self._clock.monotonic()
        self._hooks.began(self, self._abandon)
        return PreToolUse(**self._place, input=input)

    def _admit(self, pre: PreToolUse, denied: Deny | None) -> ToolOutput | None:
        self._input, self._admitted = pre.input, denied is None
        return None if denied is None else ToolOutput(denied.reason, is_error=True, denied=True)

    def _post(
        self, output: ToolOutput, outcome: Outcome | None = None, error: BaseException | None = None
    ) -> PostToolUse:
        if outcome is None:
            outcome = Outcome.DENIED if output.denied else Outcome.FAILED if output.is_error else Outcome.COMPLETED
        return PostToolUse(
            **self._place,
            input=self._input,
            output=output.text,
            is_error=output.is_error,
            outcome=outcome,
            error=error,
            result=output.result,
            duration_s=self._clock.monotonic() - self._began,
        )

    def _shown(self, output: ToolOutput, post: PostToolUse) -> ToolOutput:
        return output if post.output == output.text else msgspec.structs.replace(output, text=post.output)

    def _fail(self, error: BaseException) -> None:
        """Tell of work that gave nothing. A hook that fails now is noted at what ended the work."""
        if self._hooks.ended(self):
            post = self._post(ToolOutput("", is_error=True), self._outcome(error), error)
            try:
                self._hooks.fire(post)
            except Exception as failure:  # boundary: what ended the work goes on
                error.add_note(str(failure))

    def _outcome(self, error: BaseException) -> Outcome:
        if not isinstance(error, Exception):
            return Outcome.CANCELLED
        if not self._admitted:
            return Outcome.DENIED
        return Outcome.LIMIT if is_limit(error) else Outcome.FAILED

    def _abandon(self) -> None:
        if self._hooks.ended(self):
            self._hooks.fire(self._post(ToolOutput("", is_error=True), Outcome.ABANDONED))
