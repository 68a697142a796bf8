"""The runs that are compared: the same ids for every system, from one seed. Needs numpy and the standard library only.

A run is a list of calls over a list of messages; a call's prompt is messages, and its answer is one more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 150_000
SHAPES = ("chain", "branches")
_SIDE = 2_500
"""Tokens that a sub-agent is given beside the history that it starts from."""


@dataclass(frozen=True)
class Call:
    """A call as places in the run's messages."""

    prompt: tuple[int, ...]
    answer: int
    side: bool = False


@dataclass(frozen=True)
class History:
    """A run."""

    messages: tuple[NDArray[np.int32], ...]
    """Ids of each message."""
    calls: tuple[Call, ...]

    def prompt(self, call: Call) -> NDArray[np.int32]:
        """Return the ids of a call's prompt, put together."""
        return np.concatenate([self.messages[place] for place in call.prompt])

    @property
    def raw_tokens(self) -> int:
        """Prompt + sampled ids, summed over calls."""
        sizes = [len(message) for message in self.messages]
        return sum(sum(sizes[place] for place in call.prompt) + sizes[call.answer] for call in self.calls)

    @property
    def unique_tokens(self) -> int:
        """Ids of different messages: each message stands in one place only."""
        return sum(len(message) for message in self.messages)

    @property
    def sampled_tokens(self) -> int:
        """Ids of answers."""
        return sum(len(self.messages[call.answer]) for call in self.calls)


def history(shape: str, tokens: int, calls: int, answer: int) -> History:
    """Make a run whose longest path has about that many tokens.

    `chain`: every call extends the one before. `branches`: every second call is a sub-agent's that starts from the
    history so far and has an end of its own; the main agent never sees it.
    """
    generator = np.random.default_rng(0)
    messages: list[NDArray[np.int32]] = []
    made: list[Call] = []

    def message(size: int) -> int:
        messages.append(generator.integers(0, VOCABULARY, size, dtype=np.int32))
        return len(messages) - 1

    turns = calls if shape == "chain" else calls // 2
    path: list[int] = []
    for size in _sizes(tokens, turns, answer):
        path.append(message(size))
        made.append(Call(tuple(path), message(answer)))
        path.append(made[-1].answer)
        if shape == "branches":
            given = message(min(_SIDE, size))
            made.append(Call((*path, given), message(answer), side=True))
    return History(tuple(messages), tuple(made))


def _sizes(tokens: int, turns: int, answer: int) -> Iterator[int]:
    """Yield how many tokens each turn adds before its answer; the first one also brings system prompt and task."""
    first = tokens // 50
    each = (tokens - first - turns * answer) // turns
    for turn in range(turns):
        yield each + (first if turn == 0 else 0)
