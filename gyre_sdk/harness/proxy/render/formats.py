"""How models write thinking and tool calls, guessed from a chat template's text, and read from answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gyre_sdk.harness.proxy.answers import NUMBERED_SEPARATOR, WAYS, read_text

_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_MISTRAL, _PYTHON = "[TOOL_CALLS]", "<|python_tag|>"
_DEEPSEEK, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = re.compile(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<old>[^\n]*)\n```json\n(?P<fenced>.*?)\n```"
    r"|(?P<name>.*?)<｜tool▁sep｜>(?P<plain>.*?))<｜tool▁call▁end｜>",
    re.DOTALL,
)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ReadCall:
    """A tool call found in an answer, in the form of the `renderers` package."""

    raw: str
    """The whole block, tags included."""
    status: str = "malformed"
    """`ok` for a call that can be carried out."""
    name: str = ""
    arguments: str = "{}"
    """JSON, as the model wrote it where its format is JSON."""
    token_span: None = None


@dataclass(slots=True)
class ReadAnswer:
    """What a text says, in the form of the `renderers` package."""

    content: str
    reasoning_content: str | None = None
    tool_calls: list[ReadCall] = field(default_factory=list)


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


Reader = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[ReadCall]]]
"""Splits an answer without its thinking into content and tool calls."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What to look for in a model's answers."""

    think: tuple[str, str] | None
    """Tags around thinking."""
    calls: str | None
    """Name of the way that tool calls are written, a key of `READERS`; None where none is known."""

    def markers(self) -> tuple[str, ...]:
        """Return the tokens that an assistant's own text may hold."""
        return (*(self.think or ()), *_MARKERS.get(self.calls or "", ()))

    def read(self, text: str, tools: Sequence[Mapping[str, Any]], *, thinking: bool) -> ReadAnswer:
        """Return what an answer says; `thinking` where the prompt opened it."""
        reasoning = None
        if self.think:
            opening, closing = self.think
            if thinking or text.lstrip().startswith(opening):
                said, closed, rest = text.removeprefix(text[: len(text) - len(text.lstrip())]).partition(closing)
                reasoning = said.removeprefix(opening)
                text = rest.lstrip("\n") if closed else ""
        if self.calls is None:
            return ReadAnswer(text, reasoning)
        content, calls = READERS[self.calls](text, tools)
        return ReadAnswer(content.rstrip() if calls else content, reasoning, calls)


def guess_format(sources: Sequence[str]) -> AnswerFormat:
    """Return the format that a chat template's text shows."""
    source = "\n".join(sources)
    think = ("<think>", "</think>") if "</think>" in source else None
    for name, signs in _SIGNS:
        if all(sign in source for sign in signs):
            return AnswerFormat(think, name)
    return AnswerFormat(think, None)


def _read_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
    content, rest = _split(text, _HERMES)
    return content, [_json_call(raw, body) for raw, body in _blocks(rest, _HERMES, _HERMES_END)]


def _read_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
    start = _HERMES if _HERMES in text else "<function="
    content, rest = _split(text, start)
    if start != _HERMES:
        rest = f"{_HERMES}{rest}"
    return content, [_xml_call(raw, body, tools) for raw, body in _blocks(rest, _HERMES, _HERMES_END)]


def _read_mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
    content, rest = _split(text, _MISTRAL)
    if not rest:
        return content, []
    named = [part.partition("[ARGS]") for part in rest.split(_MISTRAL)[1:]]
    if all(mark for _, mark, _ in named):
        return content, [_call(f"{_MISTRAL}{name}[ARGS]{body}", name.strip(), body.strip()) for name, _, body in named]
    try:
        found = msgspec.json.decode(rest.removeprefix(_MISTRAL).strip().encode(), type=list[_Written])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return content, [ReadCall(rest)]
    return content, [_written(rest if not place else "", call) for place, call in enumerate(found)]


def _read_deepseek(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
    content, rest = _split(text, _DEEPSEEK)
    if not rest:
        return content, []
    calls = [
        _call(found[0], (found["old"] or found["name"] or "").strip(), found["fenced"] or found["plain"] or "{}")
        for found in _DEEPSEEK_CALL.finditer(rest)
    ]
    return content, calls or [ReadCall(rest)]


def _read_llama(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
    body = text.strip().removeprefix(_PYTHON)
    if not body.startswith("{"):
        return text, []
    return "", [_json_call(text, body)]


def _read_as(way: str) -> Reader:
    """Return the reader of a way that live parsers know."""

    def read(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[ReadCall]]:
        answer = read_text(WAYS[way], text, tools)
        return answer.content, [_call(call.arguments, call.name, call.arguments or "{}") for call in answer.tool_calls]

    return read


READERS: dict[str, Reader] = {
    "hermes": _read_hermes,
    "xml": _read_xml,
    "mistral": _read_mistral,
    "deepseek": _read_deepseek,
    "llama": _read_llama,
    **{way: _read_as(way) for way in ("glm", "dsml", "kimi", "minimax")},
}
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("glm", ("<arg_key>", "<arg_value>")),
    ("dsml", ("<｜DSML｜",)),
    ("kimi", (NUMBERED_SEPARATOR,)),
    ("minimax", ("<minimax:tool_call>",)),
    ("xml", ("<function=", "<parameter=")),
    ("hermes", (_HERMES, '"arguments"')),
    ("hermes", (_HERMES, "arguments | tojson")),
    ("mistral", (_MISTRAL,)),
    ("deepseek", (_DEEPSEEK,)),
    ("llama", ('"parameters"', "<|start_header_id|>")),
)
"""What a template's text must hold; the first that fits is taken."""
_MARKERS = {
    "hermes": (_HERMES, _HERMES_END),
    "xml": (_HERMES, _HERMES_END),
    "mistral": (_MISTRAL,),
    "llama": (_PYTHON,),
    "glm": (_HERMES, _HERMES_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
}


def _split(text: str, opening: str) -> tuple[str, str]:
    at = text.find(opening)
    return (text, "") if at < 0 else (text[:at], text[at:])


def _blocks(text: str, opening: str, closing: str) -> Iterator[tuple[str, str | None]]:
    """Yield each block with its body; None for the body of one that is not closed."""
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        end = _closing(text, start, closing)
        if end < 0:
            yield text[at:], None
            return
        yield text[at : end + len(closing)], text[start:end]
        at = text.find(opening, end)


def _closing(text: str, start: int, closing: str) -> int:
    """Return where a block closes; a closing tag inside a JSON string is not its end."""
    body = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        _, end = json.JSONDecoder().raw_decode(text, body)
        start = end
    except (ValueError, RecursionError):
        pass
    return text.find(closing, start)


def _json_call(raw: str, body: str | None) -> ReadCall:
    if body is None:
        return ReadCall(raw)
    try:
        call = msgspec.json.decode(body.strip().encode(), type=_Written)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return ReadCall(raw)
    return _written(raw, call)


def _written(raw: str, call: _Written) -> ReadCall:
    text = (bytes(call.arguments) or bytes(call.parameters) or b"{}").decode()
    if text.startswith('"'):
        text = json.loads(text)
    return _call(raw, call.name, text)


def _call(raw: str, name: str, arguments: str) -> ReadCall:
    try:
        fits = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        fits = False
    return ReadCall(raw, "ok", name, arguments) if fits and name else ReadCall(raw)


def _xml_call(raw: str, body: str | None, tools: Sequence[Mapping[str, Any]]) -> ReadCall:
    found = _FUNCTION.fullmatch(body or "")
    if found is None:
        return ReadCall(raw)
    name = found[1].strip()
    texts = _text_parameters(name, tools)
    values = {key: value if key in texts else _value(value) for key, value in _PARAMETER.findall(found[2])}
    return ReadCall(raw, "ok", name, json.dumps(values, ensure_ascii=False))


def _text_parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            known = (function.get("parameters") or {}).get("properties") or {}
            return frozenset(
                key for key, value in known.items() if isinstance(value, dict) and value.get("type") == "string"
            )
    return frozenset()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


__all__ = ["READERS", "AnswerFormat", "ReadAnswer", "ReadCall", "guess_format"]
