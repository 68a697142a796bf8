"""What a training knows itself by, and its policy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.identity import check_policy, cluster_name, training_id


def policy(folder: Path, *, weights: bytes, tokenizer: str = "{}") -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


def test_a_training_goes_on_with_the_policy_that_it_began_with(tmp_path: Path) -> None:
    """Its folder may lie elsewhere by now; weights that differ anywhere do not, nor another tokenizer."""
    weights = bytearray(os.urandom(200_000))
    first, out = policy(tmp_path / "first", weights=weights), tmp_path / "out"
    out.mkdir()
    check_policy(out, first, fresh=True)
    check_policy(out, first, fresh=False)
    moved = Path(shutil.move(first, tmp_path / "moved"))
    check_policy(out, moved, fresh=False)
    for place in (0, 100_000, 199_999):
        changed = bytearray(weights)
        changed[place] ^= 1
        other = policy(tmp_path / f"other-{place}", weights=changed)
        with pytest.raises(
            SettingsError, match=rf"policy\.model = .*other-{place}' is not what .* than '.*moved' had; give"
        ):
            check_policy(out, other, fresh=False)
    with pytest.raises(SettingsError, match="another tokenizer"):
        check_policy(out, policy(tmp_path / "retokenized", weights=weights, tokenizer="[]"), fresh=False)
    check_policy(out, moved, fresh=False)


def test_before_anything_is_on_record_any_policy_will_do(tmp_path: Path) -> None:
    first, second = (policy(tmp_path / name, weights=name.encode()) for name in ("first", "second"))
    check_policy(tmp_path, first, fresh=True)
    check_policy(tmp_path, second, fresh=True)
    with pytest.raises(SettingsError, match=r"than '.*second' had"):
        check_policy(tmp_path, first, fresh=False)


def test_a_training_of_before_is_taken_as_it_is(tmp_path: Path) -> None:
    """One that an earlier gyre began has no note of its policy."""
    model = policy(tmp_path / "model", weights=b"w")
    check_policy(tmp_path, model, fresh=False)
    with pytest.raises(SettingsError):
        check_policy(tmp_path, policy(tmp_path / "other", weights=b"v"), fresh=False)


def test_names_outlive_the_process_and_differ_by_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    known = training_id(here), cluster_name(here)
    assert (training_id(here), cluster_name(here)) == known
    shutil.copytree(here, there)
    assert training_id(there) == known[0] and cluster_name(there) != known[1]
