"""Which sampled tokens lie behind a message's text, for agents that ask to see log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gyre_sdk.harness.proxy.dialects import TokenText

_MISSING = -9999.0


class TokenFinder:
    """Finds the tokens of one text after another among sampled tokens, markup and reasoning left out."""

    def __init__(self, tokens: Sequence[TokenText] = ()) -> None:
        self._tokens: list[TokenText] = list(tokens)
        self._used = 0
        """Bytes at the start of the first token that earlier texts have taken."""

    def add(self, tokens: Sequence[TokenText]) -> None:
        """Take tokens that were sampled since."""
        self._tokens += tokens

    def take(self, text: str) -> tuple[TokenText, ...]:
        """Return the tokens whose bytes hold `text`, and forget them and all before them.

        A token that two texts share is given with the first. Where the bytes do not show which tokens are meant, all
        that are left are given.
        """
        data = text.encode("utf-8", "surrogatepass")
        if not data:
            return ()
        start = b"".join(token.raw for token in self._tokens).find(data, self._used)
        if start < 0:
            found, self._tokens, self._used = tuple(self._tokens[self._used > 0 :]), [], 0
            return found
        end, at, found_list = start + len(data), 0, []
        for place, token in enumerate(self._tokens):
            after = at + len(token.raw)
            if after > start and at < end and not (place == 0 and self._used):
                found_list.append(token)
            if after > end:
                self._tokens, self._used = self._tokens[place:], end - at
                return tuple(found_list)
            at = after
        self._tokens, self._used = [], 0
        return tuple(found_list)


def shown_token(token: TokenText) -> dict[str, Any]:
    """Return a token as the protocol shows it."""
    return {
        "token": token.text,
        "logprob": _MISSING if token.logprob is None else token.logprob,
        "bytes": list(token.raw),
        "top_logprobs": [
            {"token": other.text, "logprob": other.logprob, "bytes": list(other.raw)} for other in token.top
        ],
    }
