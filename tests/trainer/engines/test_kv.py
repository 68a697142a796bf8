"""Keys and values that replicas share: the settings, what they become for vLLM, and the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gyre_sdk.trainer.config import EngineConfig
from gyre_sdk.trainer.engines import kv, vllm
from gyre_sdk.trainer.engines.kv import OPTION, KvConfig
from gyre_sdk.trainer.engines.kv_files import clear, layout_name, sweep, training_folder
from gyre_sdk.trainer.weights import PolicyFiles


def test_a_server_is_told_in_its_own_words(tmp_path: Path) -> None:
    settings = KvConfig(gib=2.5, memory_gib=0.5, blocks_per_chunk=4)
    engine = EngineConfig(kind="vllm", kv=settings)
    command = vllm.command(engine, PolicyFiles(0, tmp_path, ""), 1, transport="file", shared=tmp_path / "mine")
    told = json.loads(command[command.index(OPTION) + 1])
    assert (told["kv_connector"], told["kv_role"]) == ("OffloadingConnector", "kv_both")
    extra = told["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2**29 and extra["blocks_per_chunk"] == 4 and not extra["offload_prompt_only"]
    (tier,) = extra["secondary_tiers"]
    assert (tier["root_dir"], tier["gib"]) == (str(tmp_path / "mine"), 2.5)
    assert kv.environment(settings) == {"PYTHONHASHSEED": "0"} and kv.environment(None) == {}
    assert OPTION not in vllm.command(EngineConfig(kind="vllm"), PolicyFiles(0, tmp_path, ""), 1, transport="file")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"kv": {}}, "belongs to kind = 'vllm'"),
        ({"kind": "vllm", "url": "http://127.0.0.1:1", "kv": {}}, "leave engine.url out"),
        ({"kind": "vllm", "kv": {}, "options": [OPTION, "{}"]}, "leave one of them out"),
        ({"kind": "vllm", "kv": {}, "options": [f"{OPTION}={{}}"]}, "leave one of them out"),
        ({"kind": "vllm", "kv": {}, "options": ["--no-enable-prefix-caching"]}, "--no-enable-prefix-caching"),
        ({"kind": "vllm", "options": [OPTION, "{}"]}, r"use the section \[engine.kv\]"),
        ({"kind": "vllm", "kv": {"connector": "LMCacheConnectorV1"}}, "LMCacheConnectorV1"),
        ({"kind": "vllm", "kv": {"gib": 0}}, "> 0"),
        ({"kind": "vllm", "kv": {"blocks_per_chunk": 0}}, ">= 1"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=complaint):
        msgspec.convert(settings, EngineConfig)


def test_weights_that_never_change_may_have_any_connector() -> None:
    settings = {"kind": "vllm", "publish": False, "options": [OPTION, "{}"]}
    assert msgspec.convert(settings, EngineConfig).kv is None


def test_a_training_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """The same one while its store goes on, another one as soon as numbers of versions begin anew."""
    store, other, record = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "kv.name"
    store.touch()
    other.touch()

    def folder(store: Path, *, fresh: bool = False) -> Path:
        return training_folder(tmp_path / "kv", record, store=store, fresh=fresh)

    first = folder(store, fresh=True)
    assert first.parent == tmp_path / "kv" and folder(store) == folder(store) == first
    second = folder(store, fresh=True)
    assert second != first and folder(store) == second
    third = folder(other)
    assert third not in (first, second) and folder(other) == third
    assert folder(store) not in (first, second, third)


def write(root: Path, name: str, size: int, at: float) -> Path:
    """Write a file that was last changed at a time."""
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"k" * size)
    os.utime(path, (at, at))
    return path


def test_older_versions_go_and_then_the_oldest_files(tmp_path: Path) -> None:
    old = write(tmp_path, "2/abc/1.bin", 10, 50.0)
    files = [write(tmp_path, f"3/abc/{n}.bin", 10, 100.0 + n) for n in range(5)]
    newer = write(tmp_path, "4/abc/1.bin", 10, 90.0)
    base = write(tmp_path, "base/abc/1.bin", 10, 200.0)
    sweep(tmp_path, None, 1000)
    assert old.exists(), "nobody knows what is old"
    sweep(tmp_path, "3", 1000)
    assert not old.parent.parent.exists() and all(path.exists() for path in [*files, newer, base])
    sweep(tmp_path, "3", 45)
    assert [path.exists() for path in [newer, *files, base]] == [False, False, False, True, True, True, True]


def test_what_a_killed_training_left_is_cleared(tmp_path: Path) -> None:
    clear(tmp_path / "nowhere")
    store = tmp_path / "s.db"
    store.touch()
    left, used = (training_folder(tmp_path, tmp_path / f"{n}.name", store=store, fresh=True) for n in range(2))
    others = [write(tmp_path, name, 1, 1000.0) for name in ("results/3/abc/1.bin", "notes.txt")]
    for path in (left, used):
        write(path, "layout/3/abc/1.bin", 1, 1.0)
        os.utime(path / "layout", (1000.0, 1000.0))
        os.utime(path, (1000.0, 1000.0))
    os.utime(used / "layout", (1500.0, 1500.0))
    os.utime(others[0].parents[2], (1000.0, 1000.0))
    clear(tmp_path, now=1900.0)
    assert not left.exists() and used.exists() and all(path.exists() for path in others)


def test_a_layout_has_a_name_whatever_the_folder_of_the_model() -> None:
    fields = {"model_name": "/a", "dtype": "float32", "groups": [1]}
    assert layout_name(fields) == layout_name(fields | {"model_name": "/b"}) != layout_name(fields | {"dtype": "half"})
