"""Reasoning as an opaque text: what `encrypted_content` holds for agents that keep the conversation themselves.

The text only has to come back as it was given out. It hides nothing and proves nothing: an agent may put any reasoning
into its history anyway. A checksum tells our texts from those of other services, which are never shown to the model.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_PREFIX = "gyre-r1-"
_DIGEST = 8


def seal(reasoning: str) -> str:
    """Return the opaque form of a reasoning text."""
    data = reasoning.encode("utf-8", "surrogatepass")
    return _PREFIX + base64.urlsafe_b64encode(_digest(data) + data).decode()


def unseal(sealed: object) -> str | None:
    """Return the reasoning text of an opaque form, or None for anything that `seal` did not make."""
    if not isinstance(sealed, str) or not sealed.startswith(_PREFIX):
        return None
    try:
        whole = base64.b64decode(sealed.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        data = whole[_DIGEST:]
        return data.decode("utf-8", "surrogatepass") if whole[:_DIGEST] == _digest(data) else None
    except (binascii.Error, ValueError):
        return None


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST, person=b"gyre-reasoning").digest()
