"""A request whose last message is the assistant's own: the text that the answer is to continue."""

from __future__ import annotations

from collections.abc import Sequence

from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolChoice
from gyre_sdk.harness.proxy.dialects.fields import refuse


def continuable(message: Message) -> bool:
    """Return whether a message is the assistant's and holds nothing but text, so that an answer can continue it."""
    plain = not (message.tool_calls or message.reasoning or message.sealed)
    return message.role == "assistant" and plain


def take_prefill(
    messages: Sequence[Message], choice: ToolChoice, *, thinking: bool, about: str
) -> tuple[tuple[Message, ...], str]:
    """Return the messages before the assistant's last one, and its text.

    Args:
        messages: the request's; the last one is the assistant's.
        choice: the request's.
        thinking: whether the request turns thinking on.
        about: name of the field that turns it on.

    Raises:
        ProtocolError: the answer cannot continue that message.
    """
    *before, last = messages
    if last.tool_calls:
        refuse(
            "messages: the last one is the assistant's and calls tools; add a message with their results", "messages"
        )
    if not continuable(last):
        refuse("messages: the last one is the assistant's and holds thinking; only text can be continued", "messages")
    if not before:
        refuse("messages: nothing comes before the assistant's message; begin with a user message", "messages")
    if thinking:
        refuse(
            f"{about}: thinking comes before the answer's text, and the last message has begun that text; turn thinking"
            " off, or end with a user message",
            about,
        )
    if choice in (ToolChoice.REQUIRED, ToolChoice.NAMED):
        refuse(
            "tool_choice: a tool call cannot be forced where the last message has begun the answer's text; use auto,"
            " or end with a user message",
            "tool_choice",
        )
    return tuple(before), last.content


__all__ = ["continuable", "take_prefill"]
