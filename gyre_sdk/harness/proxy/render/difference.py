"""What a chat template puts between a recorded turn and the next prompt, from two tiny conversations.

A conversation of one question and one answer is rendered closed, and extended by the new messages. What stands behind
the answer in the extended one is put behind the recorded ids. Old turns are never rendered or encoded again: the cost
is that of the new messages. Where the template is not append-only (it moves tools or the system message to the last
turn, or rewrites what stands before), or where anything does not add up, there is no bridge.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.dialects.history import Ids
from gyre_sdk.harness.proxy.render.chat_template import PROBE_TOOL, ChatTemplate, Rendering, Wire

_ANCHOR = "\ue1f0gyre\ue1f1"
_THOUGHT = "gyre_thought"
_KEPT = 256
_TAG_BEGUN = re.compile(r"</?[a-z]*\Z")


def opening_of(past: Sequence[Wire], new: Sequence[Wire], arguments: str, *, calling: bool = True) -> list[Wire]:
    """Return the tiny conversation that stands for a recorded one: what decides how the next turn looks.

    Args:
        past: the recorded messages, the answer last; may be empty.
        new: what follows, if anything does.
        arguments: of the tool calls, where the answer makes any.
        calling: False for a template that shows no tool calls.
    """
    answer = past[-1] if past and past[-1]["role"] == "assistant" else {}
    calls = list(answer.get("tool_calls") or ()) if calling else []
    worked = calling and bool(new) and new[0]["role"] == "tool"
    results = [message for message in new if message["role"] == "tool"] if worked else []
    if results and not calls:
        calls = [
            {"id": message.get("tool_call_id") or f"call_{place}", "type": "function", "function": {"name": "tool"}}
            for place, message in enumerate(results)
        ]
    system: list[Wire] = [{"role": "system", "content": "gyre_system"}] if past and past[0]["role"] == "system" else []
    said: dict[str, Any] = {"role": "assistant", "content": "" if calls else _ANCHOR}
    if calls:
        said["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": arguments}} for call in calls
        ]
    return [*system, {"role": "user", "content": "gyre_question"}, said]


@dataclass(slots=True)
class Difference:
    """Bridges over a model's own chat template."""

    template: ChatTemplate
    stops: Mapping[int, str]
    """Ids that end an answer, with their texts."""
    retains: bool
    """Whether old thinking stays in the prompt even where the template would drop it."""
    _known: dict[tuple[Any, ...], tuple[str, str]] = field(default_factory=dict)
    _opening: dict[bool, frozenset[int]] = field(default_factory=dict)

    def extend(
        self, whole: Ids, prompt_len: int, new: Sequence[Wire], tools: Sequence[Wire], past: Sequence[Wire]
    ) -> list[int] | None:
        """Return the ids that continue a recorded turn, or None where they cannot be derived.

        Raises:
            RenderError: a message cannot be shown at all.
        """
        self.template.check(new, tools)
        probes: list[Wire] = [PROBE_TOOL] if tools else []
        base = self._opening_of(past, new)
        if not self.retains and self._rewrites(base, new, probes, whole, past):
            return None
        shown = self.template.show([*base, *new], probes, opened=True)
        rest = self._rest(base, probes, shown)
        if rest is None:
            return None
        return self._joined(whole[prompt_len:].tolist(), whole[:prompt_len], rest, probes)

    def _opening_of(self, past: Sequence[Wire], new: Sequence[Wire]) -> list[Wire]:
        return opening_of(past, new, f'{{"gyre": "{_ANCHOR}"}}', calling=self.template.shows_calls)

    def _rest(self, base: Sequence[Wire], probes: Sequence[Wire], shown: Rendering) -> Rendering | None:
        """Return what stands behind the model's own text in an extended conversation, its close included."""
        opened, closed = self._reference(base, probes)
        before, found, after = _cut(shown.text)
        closed_before, closed_found, closed_after = _cut(closed)
        if not (found and closed_found) or not self._appends(opened, closed_before, before):
            return None
        ends = [at for text in self.stops.values() if (at := closed_after.find(text)) >= 0]
        own = closed_after[: min(ends)] if ends else closed_after
        if not after.startswith(own) or (ends and not self._stop_at(after[len(own) :])):
            return None
        return shown.after(len(before) + len(found) + (len(own) if own.strip() else 0))

    def _appends(self, opened: str, closed: str, extended: str) -> bool:
        """Return whether nothing before the answer depends on what comes after it, tags of thinking aside."""
        prompt_left, _ = _unshared(opened, closed)
        left, right = _unshared(closed, extended)
        return not self._bare(prompt_left) and self._bare(left) == self._bare(right)

    def _bare(self, text: str) -> str:
        """Return a text without tags of thinking and without white space."""
        for tag in self.template.form.think or ():
            text = text.replace(tag, "")
        return "".join(text.split())

    def _joined(self, sampled: list[int], prompt: Ids, rest: Rendering, probes: Sequence[Wire]) -> list[int] | None:
        codec = self.template.codec
        ids = codec.encode(rest.text, rest.blocked, first=False)
        text = rest.text
        if sampled and sampled[-1] in self.stops:
            lead = len(text) - len(text.lstrip())
            close = self._stop_at(text[lead:])
            if close is not None and (close == sampled[-1] or sampled[-1] not in self._openers(probes)):
                ids, text = ids[ids.index(close) + 1 :], text[lead + len(self.stops[close]) :]
            elif sampled[-1] in self._openers(probes) or close is not None:
                return None
            return ids if codec.same(text, ids) else None
        if not codec.same(text, ids):
            return None
        ending = codec.decode([int(token) for token in prompt[-256:]] + sampled)
        if self.template.thinks(ending):
            closing = codec.control.get((self.template.form.think or ("", ""))[1])
            return [closing, *ids] if closing is not None else None
        return ids

    def _stop_at(self, text: str) -> int | None:
        return next((token for token, stop in self.stops.items() if text.startswith(stop)), None)

    def _openers(self, probes: Sequence[Wire]) -> frozenset[int]:
        """Return the stop tokens that open another's turn: they close nothing, they are the next turn's first token."""
        if bool(probes) in self._opening:
            return self._opening[bool(probes)]
        found: set[int] = set()
        for role in ("user", "tool"):
            new: list[Wire] = [{"role": role, "content": "gyre_next", "tool_call_id": "call_gyre0"}]
            try:
                base = self._opening_of((), new)
                rest = self._rest(base, probes, self.template.show([*base, *new], probes, opened=True))
                closed = _cut(self._reference(base, probes)[1])[2]
            except RenderError:
                continue
            if rest is not None and not any(stop in closed for stop in self.stops.values()):
                first = self._stop_at(rest.text.lstrip())
                found |= {first} if first is not None else set()
        self._opening[bool(probes)] = frozenset(found)
        return self._opening[bool(probes)]

    def _reference(self, base: Sequence[Wire], probes: Sequence[Wire]) -> tuple[str, str]:
        """Return the tiny conversation before its answer and after it; remembered by what decides them."""
        calls = tuple((call["id"], call["function"]["name"]) for call in base[-1].get("tool_calls") or ())
        key = (len(base), bool(probes), calls)
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[key] = (
                self.template.show(base[:-1], probes, opened=True).text,
                self.template.show(base, probes, opened=False).text,
            )
        return self._known[key]

    def _rewrites(
        self, base: Sequence[Wire], new: Sequence[Wire], probes: Sequence[Wire], whole: Ids, past: Sequence[Wire]
    ) -> bool:
        """Return whether the template would drop thinking that the recorded turns hold."""
        if self.template.form.think is None:
            return False
        closing = self.template.codec.control.get(self.template.form.think[1])
        holds = any(message.get("reasoning_content") for message in past) or (
            closing is not None and bool((whole == closing).any())
        )
        if not holds:
            return False
        thought = [*base[:-1], {**base[-1], "reasoning_content": _THOUGHT}]
        return _THOUGHT not in self.template.show([*thought, *new], probes, opened=True).text


def extend_ids(
    renderer: Any,
    stop_ids: Sequence[int],
    decode: Callable[[list[int]], str],
    whole: Ids,
    prompt_len: int,
    new: Sequence[Wire],
    tools: Sequence[Wire],
    past: Sequence[Wire],
) -> list[int] | None:
    """Return the ids that continue a recorded turn, over any renderer: for histories that the agent wrote anew.

    Renderers of families do not bridge over messages of the assistant: those were not sampled there. As context they
    can be shown like any others.
    """
    sampled = whole[prompt_len:].tolist()
    base = opening_of(past, new, "{}")
    found = _behind(renderer, set(stop_ids), base, list(new), list(tools) or None)
    if found is None:
        return None
    close, rest = found
    if sampled and sampled[-1] in stop_ids:
        if close is not None:
            return rest
        return rest[1:] if rest and rest[0] == sampled[-1] else None
    said = decode(sampled)
    if "<think>" in said and "</think>" not in said:
        return None
    return rest if close is None else [close, *rest]


def _behind(
    renderer: Any, stops: set[int], base: list[Wire], new: list[Wire], tools: list[Wire] | None
) -> tuple[int | None, list[int]] | None:
    """Return the token that closes the tiny answer, if one does, and what follows it."""
    if not hasattr(renderer, "render"):
        closed = list(renderer.render_ids(base, tools=tools, add_generation_prompt=False))
        ids = list(renderer.render_ids([*base, *new], tools=tools, add_generation_prompt=True))
        if ids[: len(closed)] != closed:
            return None
        own = range(len(closed))
    else:
        shown = renderer.render([*base, *new], tools=tools, add_generation_prompt=True)
        ids = list(shown.token_ids)
        places = [at for at, index in enumerate(shown.message_indices) if index == len(base) - 1]
        if not places:
            return None
        own = range(places[0], places[-1] + 1)
    end = next((at for at in reversed(own) if ids[at] in stops), None)
    return (None, ids[own.stop :]) if end is None else (ids[end], ids[end + 1 :])


def _cut(text: str) -> tuple[str, str, str]:
    """Cut a text at its last anchor; calls in one answer hold one each."""
    before, found, after = text.rpartition(_ANCHOR)
    return (
        (before.partition(_ANCHOR)[0], text[len(before.partition(_ANCHOR)[0]) : len(text) - len(after)], after)
        if (found)
        else (text, "", "")
    )


def _unshared(left: str, right: str) -> tuple[str, str]:
    """Return what remains of two texts behind their common start; a tag stays whole."""
    size = min(len(left), len(right))
    same = size if left[:size] == right[:size] else _first_difference(left, right)
    tag = _TAG_BEGUN.search(left, 0, same)
    same = tag.start() if tag else same
    return left[same:], right[same:]


def _first_difference(left: str, right: str) -> int:
    return next(at for at, (one, two) in enumerate(zip(left, right, strict=False)) if one != two)


__all__ = ["Difference", "extend_ids", "opening_of"]
