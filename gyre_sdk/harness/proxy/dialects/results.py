"""Results of tools as text: what the model is shown of whatever a tool gave.

A result stays in every later request of its run, and which tool gave it was the model's choice (it may have read a
picture). So no form of it is refused: what is no text is named in its place, and the request is recorded as it came.
"""

from __future__ import annotations

from typing import Any

import msgspec

TEXTS = frozenset(("text", "input_text", "output_text"))
"""Types of parts that hold a `text`."""


def result_text(content: Any) -> str:
    """Return the text of a tool's result: a string, parts, nothing, or an object, whose `content` counts.

    Texts of several parts are joined by a line feed; what has no text in it is shown as JSON.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(text for part in content if (text := _part(part)))
    inner = content.get("content") if isinstance(content, dict) else None
    return inner if isinstance(inner, str) else _json(content)


def written_out(part: dict[str, Any]) -> str | None:
    """Return the text that a document or a search result holds; None for any other part, and where it holds none."""
    kind, source = part.get("type"), part.get("source")
    if kind == "search_result":
        return _texts(part.get("content")) or None
    if kind != "document" or not isinstance(source, dict):
        return None
    shown = {"text": source.get("data"), "content": source.get("content")}
    return _texts(shown.get(str(source.get("type")))) or None


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else _json(part)
    kind, text = part.get("type"), part.get("text")
    if kind == "tool_reference":
        text = part.get("tool_name")
    elif kind not in TEXTS and not (kind is None and isinstance(text, str)):
        text = _json(part) if kind is None else written_out(part)
        return text if text is not None else f"[{kind}: left out, the model reads text only]"
    return text if isinstance(text, str) else ""


def _texts(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str) and text)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


__all__ = ["TEXTS", "result_text", "written_out"]
