"""Who may publish to an engine, and what: one trainer at a time, and versions that only grow. Pure."""

from __future__ import annotations

from gyre_sdk.errors import PublishError

__all__ = ["REFUSED", "Fence"]

REFUSED = "refused: "
"""How the messages of a fence begin: trying again does not help."""


class Fence:
    """What one engine knows of its publisher."""

    def __init__(self, version: int | None = None) -> None:
        self._owner = ""
        self._version = version

    def claim(self, owner: str) -> None:
        """Make `owner` the one that publishes here.

        Raises:
            PublishError: another one does.
        """
        if self._owner and owner != self._owner:
            raise PublishError(
                f"{REFUSED}trainer {self._owner!r} publishes here, trainer {owner!r} cannot; end the first, or restart the"
                " engine (POST /shutdown_weight_transfer_engine releases it)"
            )
        self._owner = owner

    def check(self, owner: str, version: int | None) -> None:
        """Refuse weights of another trainer, and older ones than those served.

        Raises:
            PublishError: naming both.
        """
        if self._owner and owner != self._owner:
            raise PublishError(f"{REFUSED}trainer {self._owner!r} publishes here, not trainer {owner!r}")
        if version is not None and self._version is not None and version < self._version:
            raise PublishError(f"{REFUSED}version {version} is older than version {self._version}, which is served")

    def passed(self, version: int | None) -> None:
        """Note what is served from now on."""
        if version is not None:
            self._version = version

    def release(self) -> None:
        """Let another trainer publish; its versions are counted anew."""
        self._owner, self._version = "", None
