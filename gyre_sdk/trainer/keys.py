"""Keys of a training, each in a file of its owner's: processes that this user starts know each other by them."""

from __future__ import annotations

import secrets
from pathlib import Path

from gyre_sdk.errors import SettingsError

__all__ = ["kept_key", "read_key"]

_OTHERS = 0o077
"""Rights of anybody but the owner."""


def kept_key(path: Path) -> str:
    """Return the key in a file that only this user can read; where there is none yet, draw one."""
    if path.is_file() and not path.stat().st_mode & _OTHERS:
        key = path.read_text().strip()
        if key:
            return key
    return _write_key(path)


def read_key(path: Path) -> bytes:
    """Return the key in a file.

    Raises:
        SettingsError: it is not there, or others may read it.
    """
    try:
        if path.stat().st_mode & _OTHERS:
            raise SettingsError(f"{path}: others may read it; run: chmod 600 {path}")
        key = path.read_bytes().strip()
    except OSError as error:
        raise SettingsError(
            f"the key file {path} cannot be read: {error.strerror}; give the one that the trainer made"
        ) from error
    if not key:
        raise SettingsError(f"the key file {path} is empty; give the one that the trainer made")
    return key


def _write_key(path: Path) -> str:
    key = secrets.token_urlsafe(32)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(key)
    return key
