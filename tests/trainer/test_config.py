"""The config of gyre-train: what it accepts and what it says otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from gyre_sdk.errors import SettingsError
from gyre_sdk.trainer.config import TrainerConfig, load_config, read_config, save_config
from gyre_sdk.trainer.engines.embedded import main as serve_engine
from gyre_sdk.trainer.main import MISCONFIGURED
from gyre_sdk.trainer.main import main as train
from gyre_sdk.trainer.transports import choose

MINIMAL = """
[policy]
model = "model"
[tasks]
loader = "some_module:tasks"
[agent]
function = "some_module:agent"
[store]
path = "out/store.db"
[output]
dir = "out"
"""


def write(folder: Path, text: str = MINIMAL) -> Path:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    path = folder / "train.toml"
    path.write_text(text)
    return path


def test_a_minimal_config_has_defaults_and_absolute_paths(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert config.policy.model == tmp_path / "model"
    assert config.store.path == tmp_path / "out" / "store.db"
    assert config.train.loss_type == "run"
    assert config.rollout.workspace == "docker"


def test_overrides_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_TRAIN__TRAIN__LEARNING_RATE", "6e-4")
    config = load_config(write(tmp_path), ["train.steps=3", "train.betas=[0.9, 0.95]"])
    assert (config.train.steps, config.train.learning_rate, config.train.betas) == (3, 6e-4, (0.9, 0.95))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.learning_rat=1", ["train.learning_rat", "did you mean 'learning_rate'?"]),
        ("train.steps=0", ["train.steps = 0", ">= 1"]),
        ("train.loss_type=ppo", ["train.loss_type = 'ppo'"]),
        ("train.selection=best", ["selection (one of paper, all, longest, main_only, or your own) = 'best'"]),
        ("train.credit_hook=mine", ["credit_hook = 'mine' is not module:function"]),
        ("train.sync_ref_model=true", ["sync_ref_model = true needs beta above 0"]),
        ("train={sync_ref_model=true, beta=0.1}", ["train.sync_ref_model = true", "set it to false"]),
        ('train={loss_type="vespo", importance_sampling="sequence_mask"}', ["vespo weighs whole calls by itself"]),
        (
            "train.importance_sampling_floor=3",
            ["importance_sampling_floor = 3.0 is above importance_sampling_cap = 2.0"],
        ),
        ('train={fsdp=true, executor="dfs"}', ["executor = 'dfs' makes as many passes as", "'flat'"]),
        ("train.roles.main.weigth=2", ["weigth"]),
        ("train.roles.main.weight=-1", ["train.roles", ">= 0"]),
        ('train={loss_type="dapo", roles={main={weight=2}}}', ["roles.main.weight = 2 has no effect", "'run'"]),
        ("rollout.runs_per_group=1", ["rollout.runs_per_group = 1", ">= 2"]),
        ("engine.port=65536", ["engine.port = 65536", "<= 65535"]),
        ("agent.function=nothing", ["function = 'nothing' is not module:function"]),
        ("tasks.folder=x", ["exactly one of loader and folder"]),
        ("engine.url=http://x", ["url belongs to kind = 'vllm'"]),
        ("engine.transport=nccl", ["transport = 'nccl' belongs to kind = 'vllm'"]),
    ],
)
def test_wrong_values(tmp_path: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_config(write(tmp_path), [override, "policy.lora.r=4"])
    for part in parts:
        assert part in str(caught.value)


def test_vllm_is_started_or_given_and_published_to(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "[engine]\nkind = 'vllm'\npython = 'vllm/bin/python'\n")
    engine = load_config(path).engine
    assert (engine.kind, engine.publish, engine.url) == ("vllm", True, None)
    assert engine.python == tmp_path / "vllm" / "bin" / "python"
    assert load_config(path, ["engine.url=http://127.0.0.1:1"]).engine.url == "http://127.0.0.1:1"
    assert choose(load_config(path)) == "file"
    assert choose(load_config(path, ["policy.lora.r=4"])) == "lora"
    assert choose(load_config(path, ["policy.lora.r=4", "engine.transport=file"])) == "file"
    assert choose(load_config(path, ["policy.lora.r=4", "engine.kind=embedded"])) == "file"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"policy\.model = .*nomodel.*config\.json is missing"):
        load_config(write(tmp_path), ["policy.model=nomodel"])


def test_the_guide_names_every_key() -> None:
    """A key that is not in the guide is a key nobody finds."""
    guide = (Path(__file__).parent.parent.parent / "docs" / "guide.md").read_text()
    for section in msgspec.structs.fields(TrainerConfig):
        assert f"### [{section.name}]" in guide
        kind = next(one for one in (*get_args(section.type), section.type) if one is not type(None))
        for key in msgspec.structs.fields(kind):
            assert f"| `{key.name}` |" in guide, f"{section.name}.{key.name}"


def test_cells(tmp_path: Path) -> None:
    """What cells need of the rest; and the settings as another process reads them."""
    path = write(tmp_path)
    assert load_config(path).cells is None
    config = load_config(path, ["cells.count=3", "cells.standing=1", "cells.policy=async"])
    assert config.cells is not None and config.cells.standing == 1
    save_config(config, tmp_path / "saved.json")
    assert read_config(tmp_path / "saved.json") == config
    for pairs, said in (
        (["cells.count=2", "cells.policy=async"], "cells.standing = 0 must lie between 0 and"),
        (["cells.count=2", "cells.standing=2"], "cells.standing = 2 leaves none of 2 cells to serve"),
        (["cells.count=2", "cells.ray_address=auto"], "belong to cells.launcher = 'ray'"),
        (["cells.count=2", "train.fsdp=true"], "cells.ranks = 1: set it to the GPUs of a cell"),
        (["cells.count=2", "policy.lora.load_in_4bit=true"], "weights in 4 bits stay on the GPU"),
        (["cells.count=2", "engine.kind=vllm", "engine.url=http://127.0.0.1:1"], "leave engine.url out"),
        (["cells.count=2", "engine.publish=false"], "engine.publish = true"),
    ):
        with pytest.raises(SettingsError, match=re.escape(said)):
            load_config(path, pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "engine.publish=false"], "training needs engine.publish = true"),
        (["--evaluate", "train"], "an evaluation cannot be named 'train'"),
        (["--set", "train.report_to=['nonsense']"], "there is no 'nonsense'; known: azure_ml, "),
        (["--set", "train.report_to=['tensorboard', 'wandb']"], "the package of 'wandb' is not installed; install it"),
        (["--set", "policy.lora.load_in_4bit=true"], "policy.lora.load_in_4bit = true needs "),
        (["--set", "train.fsdp=true"], "train.fsdp = true needs several processes: start gyre-train with torchrun"),
        (
            ["--set", "train.beta=0.1", "--set", "train.reference=nowhere"],
            "nowhere': no model is there (config.json is",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert train([str(write(tmp_path)), *arguments]) == MISCONFIGURED
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_needs_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train([str(write(tmp_path))]) == MISCONFIGURED
    assert re.search(r"needs torch, .*pip install 'gyre-sdk\[train\]'$", capsys.readouterr().err.strip())
    assert serve_engine(["--model", str(tmp_path / "model")]) == 2
    assert "pip install 'gyre-sdk[train]'" in capsys.readouterr().err
