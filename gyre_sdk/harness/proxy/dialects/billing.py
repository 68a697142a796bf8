"""A billing header at the head of a system text, which changes with every request. It is recorded and never shown.

Clients of Anthropic's send it, and gateways between them and another protocol pass it on as text like any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from gyre_sdk.harness.proxy.dialects.canonical import Message

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def after_billing(text: str) -> str:
    """Return a system text without the header."""
    return _BILLING.sub("", text, count=1)


def without_billing(messages: Iterable[Message]) -> list[Message]:
    """Return messages whose system texts have no header; one that is nothing else is left out."""
    kept: list[Message] = []
    for message in messages:
        shown = after_billing(message.content) if message.role == "system" else message.content
        if shown == message.content:
            kept.append(message)
        elif shown:
            kept.append(msgspec.structs.replace(message, content=shown))
    return kept


__all__ = ["after_billing", "without_billing"]
