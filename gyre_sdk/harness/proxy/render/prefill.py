"""The ids of a turn that the request has begun: what the model's template writes up to the end of the given text.

Four tiny conversations tell: one that ends with the opening of the model's turn, one whose answer is the text, and two
with answers of one word. What these two end with is the turn's close; what stands between the opening and a word is
what the template writes before text (a closed thinking block, a channel). The text is encoded together with what
stands before it, so the ids are those of the template. Only ids of the opening are written anew, never recorded ones.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.render.chat_template import PROBE_TOOL

Wire = Mapping[str, Any]
Render = Callable[[Sequence[Wire], Sequence[Wire], bool], list[int]]
"""Messages, tools and whether the model's turn is opened at the end, to ids."""

_WORDS = ("gyre_yes", "gyre_no")
_CALL = {"id": "call_gyre0", "type": "function", "function": {"name": "gyre_tool", "arguments": "{}"}}
_ASKED: list[Wire] = [{"role": "user", "content": "gyre_question"}]
_WORKED: list[Wire] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "gyre_result", "tool_call_id": "call_gyre0"},
]


def begun_turn(
    render: Render,
    decode: Callable[[list[int]], str],
    prompt: Ids,
    text: str,
    *,
    tooled: bool,
    after_tool: bool,
) -> Ids:
    """Return the ids of a prompt whose last turn, the model's, begins with a text.

    Args:
        render: the model's template.
        decode: ids to text, control tokens included.
        prompt: ids of the conversation and of the opening of the model's turn.
        text: what the model's turn begins with.
        tooled: whether the request has tools.
        after_tool: whether the message before is a tool's result.

    Raises:
        RenderError: the template opens thinking before an answer, or does not write the text as it is.
    """
    talk, tools = _WORKED if after_tool else _ASKED, [PROBE_TOOL] if tooled else []

    def closed(said: str) -> list[int]:
        return render([*talk, {"role": "assistant", "content": said}], tools, False)

    opened, plain = render(talk, tools, True), render(talk, tools, False)
    yes, no, ids = closed(_WORDS[0]), closed(_WORDS[1]), closed(text)
    close = _shared(yes[::-1], no[::-1])
    before, shown = decode(opened), decode(yes[: len(yes) - close])
    if not shown.startswith(before):
        raise RenderError(
            "the model's template opens thinking before an answer, so an answer cannot be begun for it; turn thinking"
            " off, or end with a user message"
        )
    end = len(ids) - close
    begun = ids[:end]
    if not shown.endswith(_WORDS[0]) or ids[end:] != yes[len(yes) - close :]:
        raise RenderError("the model's template closes answers in a way that is not known; end with a user message")
    if not _same(decode(begun), shown.removesuffix(_WORDS[0]) + text):
        raise RenderError(
            "the model's template changes the text that the assistant's last message begins with (white space at its"
            " ends, tags); leave that out, or end with a user message"
        )
    kept, opening = _shared(opened, begun), len(opened) - _shared(opened, plain)
    anew = len(opened) - kept
    if anew > opening or opened[len(opened) - opening :] != prompt[len(prompt) - opening :].tolist():
        raise RenderError("the model's template opens this turn in a way that is not known; end with a user message")
    return np.concatenate([prompt[: len(prompt) - anew], np.asarray(begun[kept:], dtype=np.int32)])


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _same(left: str, right: str) -> bool:
    return left == right or unicodedata.normalize("NFC", left) == unicodedata.normalize("NFC", right)


__all__ = ["Render", "begun_turn"]
