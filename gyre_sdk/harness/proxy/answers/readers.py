"""The reader of a tool call block, by the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gyre_sdk.harness.proxy.answers.body import Body
from gyre_sdk.harness.proxy.answers.formats import BodyKind, Format
from gyre_sdk.harness.proxy.answers.json_body import JsonBody
from gyre_sdk.harness.proxy.answers.named_body import NUMBERED_SEPARATOR, NamedBody, TypedBody, numbered
from gyre_sdk.harness.proxy.answers.objects_body import ListedBody, ObjectsBody
from gyre_sdk.harness.proxy.answers.xml_body import KINDS, XmlBody, text_parameters


def reader_of(format: Format, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Body]:
    """Return what makes a reader for each block of an answer.

    Args:
        format: how the model writes.
        tools: as in the request; the types of parameters are read from them.
    """
    kind, keys = format.body, format.argument_keys
    if kind in KINDS:
        texts = text_parameters(tools)
        return lambda: XmlBody(texts, kind)
    makers: dict[BodyKind, Callable[[], Body]] = {
        BodyKind.TYPED: TypedBody,
        BodyKind.NUMBERED: lambda: NamedBody(NUMBERED_SEPARATOR, numbered),
        BodyKind.OBJECTS: lambda: ObjectsBody(keys),
        BodyKind.LISTED: lambda: ListedBody(keys),
    }
    return makers.get(kind) or (lambda: JsonBody(keys))
