"""The toy template of the cases: ids 0..255 are bytes, 256..260 control tokens, 300 and above pieces of text.

Implements the four methods of a renderer that the proxy uses, and the two of a tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_sdk.harness.proxy.render import Template

SYSTEM, USER, ASSISTANT, TOOL, END, NEWLINE = 256, 257, 258, 259, 260, 10
_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
_CALL = re.compile(r"<call>(\w+) (.*?)</call>", re.DOTALL)
_NAMES = {SYSTEM: "<|system|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", TOOL: "<|tool|>", END: "<|end|>"}


@dataclass
class Call:
    name: str
    arguments: Any
    raw: str
    status: str = "ok"
    token_span: tuple[int, int] = (0, 0)


@dataclass
class Parsed:
    content: str
    reasoning_content: str | None = None
    tool_calls: list[Call] = field(default_factory=list)


@dataclass
class Rendered:
    token_ids: list[int]


class Toy:
    """Renderer and tokenizer in one. `pieces` maps text to ids."""

    def __init__(self, pieces: dict[str, int], *, keep_thinking: bool = True) -> None:
        self.pieces = dict(sorted(pieces.items(), key=lambda item: -len(item[0])))
        self.names = {number: text for text, number in pieces.items()}
        self.keep_thinking = keep_thinking

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            piece = next((piece for piece in self.pieces if text.startswith(piece)), None)
            if piece is not None:
                ids.append(self.pieces[piece])
            else:
                piece = text[0]
                ids += piece.encode()
            text = text[len(piece) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        out = b""
        for number in ids:
            if number < 256 and number not in self.names:
                out += bytes([number])
            else:
                out += (self.names.get(number) or _NAMES.get(number) or f"[{number}]").encode()
        return out.decode("utf-8", "replace")

    def render_ids(self, messages: list[dict[str, Any]], *, tools: Any, add_generation_prompt: bool) -> list[int]:
        shown = [SYSTEM, *self.encode(json.dumps(tools)), END, NEWLINE] if tools else []
        ids = shown + [token for message in messages for token in self._message(message)]
        return [*ids, ASSISTANT] if add_generation_prompt else ids

    def bridge_to_next_turn(
        self, prompt: list[int], sampled: list[int], new: list[dict[str, Any]], *, tools: Any
    ) -> Rendered | None:
        if any(message["role"] == "assistant" for message in new):
            return None
        close = [] if sampled and sampled[-1] == END else [END]
        tail = [token for message in new for token in self._message(message)]
        return Rendered([*prompt, *sampled, *close, NEWLINE, *tail, ASSISTANT])

    def parse_response(self, ids: list[int], *, tools: Any, prompt_ids: list[int]) -> Parsed:
        text = self.decode([token for token in ids if token != END])
        reasoning = None
        if text.startswith("<think>") and "</think>" in text:
            reasoning, text = text.removeprefix("<think>").split("</think>", 1)
        elif text.startswith("<think>"):
            return Parsed("", text.removeprefix("<think>"))
        calls = []
        for name, arguments in _CALL.findall(text):
            raw = f'{{"name": "{name}", "arguments": {arguments}}}'
            try:
                calls.append(Call(name, json.loads(arguments), raw))
            except ValueError:
                calls.append(Call(name, arguments, raw))
        return Parsed(text.split("<call>")[0], reasoning, calls)

    def get_stop_token_ids(self) -> list[int]:
        return [END]

    def _message(self, message: dict[str, Any]) -> list[int]:
        content = message["content"] or ""
        reasoning = message.get("reasoning_content")
        if reasoning and self.keep_thinking and "</think>" not in content:
            content = f"<think>{reasoning}</think>{content}"
        for call in message.get("tool_calls") or ():
            content += f"<call>{call['function']['name']} {call['function']['arguments']}</call>"
        return [_ROLES[message["role"]], *self.encode(content), END, NEWLINE]


def toy_template(pieces: dict[str, int] | None = None) -> Template:
    """Return the toy as a template."""
    toy = Toy(pieces or {})
    return Template(toy, toy, (END,))
