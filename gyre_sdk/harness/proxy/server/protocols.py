"""Which protocol is spoken at which path."""

from __future__ import annotations

from gyre_sdk.harness.proxy.dialects import Dialect
from gyre_sdk.harness.proxy.dialects.chat import ChatCompletions
from gyre_sdk.harness.proxy.dialects.completions import Completions
from gyre_sdk.harness.proxy.dialects.messages import AnthropicMessages
from gyre_sdk.harness.proxy.dialects.responses import Responses

CHAT = ChatCompletions()
RESPONSES = Responses()
MESSAGES = AnthropicMessages()

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": Completions(),
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
"""Requests that sample, by path."""


def speaking(path: str, headers: dict[str, str] | None = None) -> Dialect:
    """Return the protocol that answers at a path, also where there is nothing: errors must be understood too."""
    found = next((dialect for start, dialect in DIALECTS.items() if path.startswith(start)), None)
    if found is None and "anthropic-version" in (headers or {}):
        return MESSAGES
    return found or CHAT
