"""What tells a training from others, and the policy that it began with from others: kept in the output folder."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import msgspec

from gyre_sdk.errors import SettingsError

__all__ = ["Beginning", "check_policy", "cluster_name", "sketch", "training_id"]

_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_NAME = "policy.json"


class Beginning(msgspec.Struct, frozen=True):
    """The policy that a training began with."""

    model: str
    """Folder."""
    sketch: str


def training_id(folder: Path) -> str:
    """Return what tells this training from others that publish to the same replica; it outlives the process."""
    path = folder / "training.id"
    if not path.is_file():
        path.write_text(f"gyre-{secrets.token_hex(6)}")
    return path.read_text().strip()


def cluster_name(folder: Path) -> str:
    """Return what tells this training from all others on a cluster: where its output is, and which it is."""
    return hashlib.blake2b(f"{training_id(folder)} {folder.resolve()}".encode(), digest_size=10).hexdigest()


def sketch(model: Path) -> str:
    """Return a fingerprint of a model folder's weights and tokenizer, from samples all over its files: of other weights it is
    another, wherever they lie, and a large model is not read whole for it."""
    found = hashlib.blake2b(digest_size=16)
    for path in sorted([*model.glob("*.safetensors"), *model.glob("tokenizer.json")]):
        size = path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for place in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * place // (_SAMPLES - 1))
                found.update(file.read(_SAMPLE_BYTES))
    return found.hexdigest()


def check_policy(folder: Path, model: Path, *, fresh: bool) -> None:
    """Check that a training goes on with the policy that it began with: what is on record was sampled by it.

    Args:
        folder: the training's.
        model: `policy.model`.
        fresh: nothing is on record yet: whatever is given is what it begins with.

    Raises:
        SettingsError: it is another one.
    """
    path, own = folder / _NAME, sketch(model)
    try:
        began = None if fresh else msgspec.json.decode(path.read_bytes(), type=Beginning)
    except (OSError, msgspec.DecodeError):
        began = None
    if began is not None and began.sketch != own:
        raise SettingsError(
            f"policy.model = {str(model)!r} is not what this training began with: other weights or another tokenizer than"
            f" {began.model!r} had; give that model again, or train this one with another store.path and output.dir"
        )
    path.write_bytes(msgspec.json.encode(Beginning(str(model), own)))
