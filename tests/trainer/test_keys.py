"""Keys in files: drawn once, and never taken from a file that others may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.keys import kept_key, read_key


def test_a_key_is_drawn_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = kept_key(path)
    assert len(key) > 40 and path.stat().st_mode & 0o777 == 0o600
    assert kept_key(path) == key and read_key(path) == key.encode()


def test_a_key_that_others_may_read_is_drawn_anew_and_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("known")
    path.chmod(0o644)
    with pytest.raises(SettingsError, match=f"others may read it; run: chmod 600 {path}"):
        read_key(path)
    key = kept_key(path)
    assert key != "known" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read: No such file"), ("\n", "is empty")])
def test_what_is_no_key_is_said(content: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
        path.chmod(0o600)
    with pytest.raises(SettingsError, match=said):
        read_key(path)
