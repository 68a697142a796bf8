"""How one model writes conversations, in the proxy's own values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.answers import Format
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Message, ToolCall, ToolChoice
from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.render.difference import Difference, extend_ids
from gyre_sdk.harness.proxy.render.families import family_bridge
from gyre_sdk.harness.proxy.render.prefill import begun_turn

_PARSED_PROMPT = 4096
"""Tokens at the end of a prompt that a parser is shown: they tell whether thinking was opened there."""


@dataclass(frozen=True, slots=True)
class Template:
    """How one model writes conversations."""

    renderer: Any
    """A renderer of the `renderers` package, or anything with the same four methods."""
    tokenizer: Any
    stop_ids: tuple[int, ...]
    context: int | None = None
    """Longest prompt + answer that the model can attend to, in tokens; None when unknown."""
    retains: bool = True
    """Whether old thinking stays in prompts even where the template would drop it."""
    format: Format | None = None
    """How the model writes answers, where a live parser knows it."""
    difference: Difference | None = None
    """Bridges over the model's own chat template; None where `renderer` bridges itself."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a whole conversation and the opening of the model's turn.

        Raises:
            RenderError: the template cannot show these messages.
        """
        ids = self._render([_wire(message) for message in messages], tools, opened=True)
        if not ids:
            raise RenderError("the messages render to no tokens")
        return ids

    def begin(self, prompt: Ids, text: str, tools: Sequence[Mapping[str, Any]], *, after_tool: bool) -> Ids:
        """Return the ids of a prompt whose last turn, the model's, begins with a text.

        Args:
            prompt: as `render` or `bridge` gave it: it ends with the opening of the model's turn.
            text: what the model's turn begins with.
            tools: as in the request.
            after_tool: whether the last message is a tool's result.

        Raises:
            RenderError: the template cannot begin an answer with this text.
        """
        form = self.format
        marks = [*(form.think or ()), *form.call, *form.wrap] if form is not None else []
        found = next((mark for mark in marks if mark and mark in text), None)
        if found is not None:
            raise RenderError(
                f"the assistant's last message holds {found!r}, which is how this model writes thinking or tool calls;"
                " only text can be continued"
            )
        return begun_turn(self._render, self.text, prompt, text, tooled=bool(tools), after_tool=after_tool)

    def bridge(
        self,
        whole: Ids,
        prompt_len: int,
        new: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        past: Sequence[Message] = (),
    ) -> Ids | None:
        """Return the ids that continue a recorded turn with new messages, or None where none can be derived.

        The result begins with `whole`; its cost is that of the new messages.

        Args:
            whole: prompt + sampled ids, as recorded.
            prompt_len: how many of them are the prompt's.
            new: what follows, if anything does; messages of the assistant among them are context that was not sampled
                here.
            tools: as in the request.
            past: the messages that `whole` stands for, the answer last.

        Raises:
            RenderError: the template cannot show these messages.
        """
        wires, shown = [_wire(message) for message in new], list(tools)
        own_words = not new or any(message.role == "assistant" for message in new)
        try:
            if self.difference is None and not own_words:
                ids = family_bridge(self.renderer, self.stop_ids, whole, prompt_len, wires, shown or None)
            else:
                before = [_wire(message) for message in (*past[:1], *past[-1:])]
                extend = self.difference.extend if self.difference is not None else self._extend
                ids = extend(whole, prompt_len, wires, shown, before)
        except RenderError:
            raise
        except Exception as error:  # boundary: third-party templates raise whatever they like
            raise RenderError(f"the model's template cannot show these messages: {error}") from error
        return None if ids is None else np.concatenate([whole, np.asarray(ids, dtype=np.int32)])

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], opened: bool
    ) -> list[int]:
        try:
            ids: list[int] = self.renderer.render_ids(
                list(messages), tools=list(tools) or None, add_generation_prompt=opened
            )
        except RenderError:
            raise
        except Exception as error:  # boundary: third-party templates raise whatever they like
            raise RenderError(f"the model's template cannot show these messages: {error}") from error
        return ids

    def _extend(
        self,
        whole: Ids,
        prompt_len: int,
        new: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        past: Sequence[Mapping[str, Any]],
    ) -> list[int] | None:
        if not self.retains:
            return None
        return extend_ids(self.renderer, self.stop_ids, self.text, whole, prompt_len, new, tools, past)

    def parse(
        self,
        ids: Sequence[int],
        prompt: Sequence[int] | Ids,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        name: str = "",
        stop: str | None = None,
        final: bool = True,
        choice: ToolChoice = ToolChoice.AUTO,
        parallel: bool = True,
    ) -> Answer:
        """Return what sampled ids say.

        Args:
            ids: sampled ids so far.
            prompt: ids of the prompt; its end tells whether thinking was opened there.
            tools: as in the request.
            name: makes the ids of tool calls: the same name gives the same ids again.
            stop: the stop string that ended sampling; the text ends before it.
            final: False for an answer that is still being sampled: unfinished tool calls are left out.
            choice: with `NONE`, tool calls stay text.
            parallel: False keeps the first tool call only.

        Raises:
            RenderError: the parser failed.
        """
        try:
            end = np.asarray(prompt[-_PARSED_PROMPT:]).tolist()
            parsed = self.renderer.parse_response(list(ids), tools=list(tools) or None, prompt_ids=end)
            good: list[Any] = []
            bad: list[Any] = []
            for call in parsed.tool_calls or ():
                (good if str(call.status) == "ok" and choice is not ToolChoice.NONE else bad).append(call)
            texts = [
                call.raw if call.token_span is None else self.tokenizer.decode(list(ids)[slice(*call.token_span)])
                for call in (bad if final else ())
            ]
        except Exception as error:  # boundary: third-party parsers raise whatever they like
            raise RenderError(f"the sampled tokens cannot be parsed: {error}") from error
        content = "\n".join(text for text in (parsed.content, *texts) if text)
        reasoning = (parsed.reasoning_content or "").strip()
        if stop and stop in content:
            content = content[: content.index(stop)]
        elif stop and stop in reasoning:
            reasoning = reasoning[: reasoning.index(stop)]
        calls = tuple(
            ToolCall(f"call_{name}{place}", call.name, _arguments(call))
            for place, call in enumerate(good if parallel else good[:1])
        )
        return Answer(content, reasoning, calls if final else ())

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        text: str = self.tokenizer.decode(list(ids))
        return text


class _Call(msgspec.Struct):
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _arguments(call: Any) -> str:
    """Return a parsed call's arguments as the model wrote them, where its format is JSON; else as JSON."""
    if isinstance(call.arguments, str):
        return call.arguments
    try:
        raw = bytes(msgspec.json.decode(call.raw.encode(), type=_Call).arguments).decode()
        if json.loads(raw) == call.arguments:
            return raw
    except (ValueError, msgspec.DecodeError, AttributeError):
        pass
    return json.dumps(call.arguments if call.arguments is not None else {}, ensure_ascii=False)


def _wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    return wire
