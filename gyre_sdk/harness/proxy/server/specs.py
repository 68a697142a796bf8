"""What `gyre serve --model SPEC` means: where the policy's tokenizer is, which replicas serve it, which models are hosted."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from gyre_sdk.errors import SettingsError

_FORMS = "local:PATH, http://HOST:PORT, litellm:PROVIDER/MODEL or a model folder"
_ASK_TIMEOUT = 10.0
"""Seconds that a replica has to tell where its model is."""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a service."""

    folder: Path | None
    """Of the policy; None when all models are hosted."""
    replicas: tuple[str, ...]
    """Addresses that serve the policy."""
    hosted: tuple[str, ...]
    """litellm's names."""
    local: bool
    """Whether an embedded engine is to serve `folder`."""


def read_specs(specs: Sequence[str], replicas: Sequence[str], tokenizer: Path | None) -> Models:
    """Return the models that `--model` and `--replica` name.

    Args:
        specs: of `--model`.
        replicas: of `--replica`.
        tokenizer: the policy's folder, where the specs do not tell it.

    Raises:
        SettingsError: a spec has no known form, two policies are named, or the policy's folder is not known.
    """
    folders: list[Path] = []
    urls, hosted, local = list(replicas), [], False
    for spec in specs:
        kind, colon, rest = spec.partition(":")
        if kind == "litellm" and colon:
            if not all(rest.partition("/")):
                raise SettingsError(f"--model {spec!r}: write litellm:PROVIDER/MODEL, as litellm names it")
            hosted.append(rest)
        elif kind in ("http", "https") and rest.startswith("//"):
            urls.append(spec.rstrip("/"))
        elif kind == "local" and colon:
            folders.append(_existing(spec, Path(rest)))
            local = True
        else:
            folders.append(_existing(spec, Path(spec)))
    if len({folder.resolve() for folder in folders}) > 1:
        raise SettingsError(f"one service has one policy, but --model names {len(folders)} model folders")
    if local:
        _require_engine()
    folder = folders[0] if folders else None
    if tokenizer is not None:
        folder = _existing(f"--tokenizer {tokenizer}", tokenizer) if not local else folder
    elif folder is None and urls:
        folder = _folder_of(urls[0])
    return Models(folder, tuple(urls), tuple(dict.fromkeys(hosted)), local)


def _existing(spec: str, folder: Path) -> Path:
    if not folder.is_dir():
        raise SettingsError(f"{spec!r} is not a model folder here; give {_FORMS}")
    return folder


def _require_engine() -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        raise SettingsError("local:PATH needs the embedded engine; run: pip install 'gyre-sdk[train]'")


def _folder_of(url: str) -> Path:
    """Ask a replica which folder it serves."""
    remedy = "give --tokenizer FOLDER, with the model's tokenizer.json"
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=_ASK_TIMEOUT, trust_env=False)
        answer.raise_for_status()
        root = str(answer.json()["data"][0].get("root") or "")
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
        raise SettingsError(f"replica {url} does not tell its model: {problem}; {remedy}") from error
    if not root or not Path(root).is_dir():
        raise SettingsError(f"replica {url} serves {root!r}, which is not a folder here; {remedy}")
    return Path(root)
