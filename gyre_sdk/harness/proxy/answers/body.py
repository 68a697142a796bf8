"""What the body of a tool call block promises to its reader, whatever the model's way to write it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum


class Standing(StrEnum):
    """What is known of a block."""

    OPEN = "open"
    """It may become a tool call."""
    CALL = "call"
    """It is one: its name and the start of its arguments are known."""
    TEXT = "text"
    """It is none: what was read is text, and so is what follows."""
    NOTHING = "nothing"
    """It is neither: what separates calls, or ends a list of them."""


class Body(ABC):
    """Reads the text between the tags of one tool call block."""

    standing: Standing = Standing.OPEN
    name: str = ""
    """Of the tool, once the standing is `CALL`."""
    over: bool = False
    """Whether the block ended by itself, before any closing tag."""
    surplus: str = ""
    """With the standing `TEXT`, or once it is over: the end of the last text fed, which was not looked at."""

    @abstractmethod
    def feed(self, text: str) -> str:
        """Return what is new of the arguments; empty before the standing is `CALL`."""

    @abstractmethod
    def finish(self, closed: bool) -> str:
        """Return the rest of the arguments. `closed`: the block ended as it should, nothing was cut off.

        Settles the standing: what is still open then is text.
        """

    def follow(self) -> Body | None:
        """Return the reader of what comes behind a block that is over, if that may be a call without a tag."""
        return None
