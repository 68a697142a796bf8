"""Text of our own that looks like what agents read and write: prose, code, logs, and things read again.

With ids for it. Ids and text compress about as well as those of real agents' histories under a real vocabulary.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

_PIECE = re.compile(r" ?[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]{1,2}|\n *|\s")
_ONSETS = ["b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "t", "v", "st", "tr", "pl", "ch"]
_SYLLABLES = [onset + rime for onset in _ONSETS for rime in ("a", "e", "i", "o", "u", "an", "er", "in", "or", "es")]


class Writer:
    """Writes text from a seed. Words follow Zipf's law; names and numbers are new all the time."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._words = ["".join(self._draw.choices(_SYLLABLES, k=self._draw.choice((1, 2, 2, 2)))) for _ in range(2000)]
        self._weights = [1 / (rank + 3) for rank in range(len(self._words))]
        self._ids: dict[str, int] = {}
        self._written: list[str] = []

    def text(self, size: int) -> str:
        """Return `size` characters."""
        parts: list[str] = []
        while sum(map(len, parts)) + len(parts) < size:
            again = self._written and self._draw.random() < 0.35
            kind = self._draw.choice((self._prose, self._prose, self._code, self._log))
            parts.append(self._draw.choice(self._written[-400:]) if again else kind())
        self._written += parts
        return "\n".join(parts)[:size]

    def ids(self, text: str) -> list[int]:
        """Return ids of a text: one per word or sign, of a vocabulary of 150,000."""
        return [self._id(piece) for piece in _PIECE.findall(text)]

    def logprobs(self, count: int) -> list[float]:
        """Return log-probs as a policy gives them: most near 0, none alike."""
        return [-(self._draw.expovariate(1.0) ** 3) * 0.3 for _ in range(count)]

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            rank = len(self._ids)
            self._ids[piece] = rank if rank < 1500 else int(1500 + self._draw.random() ** 2 * 148_000)
        return self._ids[piece]

    def _take(self, count: int) -> list[str]:
        return self._draw.choices(self._words, self._weights, k=count)

    def _prose(self) -> str:
        words = self._take(self._draw.randint(8, 40))
        return (" ".join(words) + self._draw.choice((".", "?", ":", "!"))).capitalize()

    def _code(self) -> str:
        name, argument, other, value = self._take(4)
        return (
            f"def {name}_{other}({argument}: int, {value}: str = '{self._draw.randint(0, 9999)}') -> None:\n"
            f"    if {argument} > {self._draw.randint(0, 99)}:\n        return self.{value}[{argument}].{other}()\n"
        )

    def _log(self) -> str:
        first, second = self._take(2)
        return (
            f"2026-0{self._draw.randint(1, 9)}-{self._draw.randint(10, 28)} {self._draw.randint(10, 23)}:{self._draw.randint(10, 59)} ERROR {first}/{second}.py:{self._draw.randint(1, 999)} "
            + " ".join(self._take(6))
        )


def turns(writer: Writer, calls: int, tokens: int) -> Iterator[tuple[str, str]]:
    """Yield what is said to the model and what it answers, one tenth of the text, `tokens` in all."""
    for _ in range(calls):
        share = tokens / calls
        yield writer.text(int(share * 0.9 * 3.4)), writer.text(int(share * 0.1 * 3.4))
