"""Whether a replica computes with the weights of a version: its fingerprints beside those of the files."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gyre_sdk.errors import PublishError

if TYPE_CHECKING:
    from torch import Tensor

    from gyre_sdk.trainer.transports.replica import Replica
    from gyre_sdk.trainer.weights import PolicyFiles

__all__ = ["Expected", "Verdict", "adapter_fingerprints"]


class Verdict:
    """What a comparison found."""

    def __init__(self, compared: int, differing: list[str]) -> None:
        self.compared = compared
        self.differing = differing

    @property
    def good(self) -> bool:
        """Whether tensors could be compared, and all agreed."""
        return self.compared > 0 and not self.differing

    def require(self, replica: Replica, version: int) -> None:
        """Raise unless it is good.

        Raises:
            PublishError: naming a tensor.
        """
        if self.good:
            return
        found = (
            f"{len(self.differing)} of {self.compared} tensors differ, first {self.differing[0]!r}"
            if self.differing
            else "no tensor that it names is in the version"
        )
        raise PublishError(
            f"replica {replica.url} does not compute with the weights of version {version}: {found}; restart it, then"
            " run the same command again: it resumes"
        )


class Expected:
    """The fingerprints of one version's files at a time, each taken once in the dtype that replicas hold it in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: tuple[Path, ...] = ()
        self._dtypes: dict[str, str] = {}
        """Of the tensors that replicas have named."""
        self._known: dict[tuple[str, str], str | None] = {}
        """By name and dtype; None: not in the files."""

    def prepare(self, files: PolicyFiles) -> None:
        """Take the fingerprints of a new version as replicas will name them, before they have to wait for it."""
        with self._lock:
            self._take(files, self._dtypes)

    def compare(self, files: PolicyFiles, found: Mapping[str, str]) -> Verdict:
        """Compare what a replica says with the files of its model; tensors that only one side knows do not count."""
        with self._lock:
            dtypes = {name: value.partition(":")[0] for name, value in found.items()}
            self._dtypes.update(dtypes)
            self._take(files, dtypes)
            wanted = {name: self._known[name, dtype] for name, dtype in dtypes.items()}
        compared = [name for name, value in wanted.items() if value is not None]
        return Verdict(len(compared), [name for name in compared if wanted[name] != found[name]])

    def _take(self, files: PolicyFiles, dtypes: Mapping[str, str]) -> None:
        import torch

        from gyre_sdk.trainer.engines.fingerprint import fingerprint

        paths = tuple(files.model_files)
        if paths != self._paths:
            self._paths, self._known = paths, {}
        missing = {name: dtype for name, dtype in dtypes.items() if (name, dtype) not in self._known}
        if not missing:
            return
        for name, tensor in _tensors(paths, missing.keys()):
            self._known[name, missing[name]] = fingerprint(tensor.to(getattr(torch, missing[name])))
        for name, dtype in missing.items():
            self._known.setdefault((name, dtype))


def adapter_fingerprints(folder: Path, dtype: str) -> dict[str, str]:
    """Return the fingerprints of an adapter as layers hold it: A, and B times alpha / r, in their dtype."""
    import torch

    from gyre_sdk.trainer.engines.fingerprint import fingerprint

    config = json.loads((folder / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    expected = {}
    for name, tensor in _tensors((folder / "adapter_model.safetensors",), None):
        clean = name.removeprefix("base_model.model.").removesuffix(".weight")
        held = tensor.to(getattr(torch, dtype))
        if clean.endswith(".lora_B"):
            held = held * scaling
        expected[clean] = fingerprint(held)
    return expected


def _tensors(paths: tuple[Path, ...], names: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if names is None or name in names:
                    yield name, file.get_tensor(name)
