"""The commands that `docs/clusters.md` gives are those that `gyre-train` takes today."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from training_kit import CONFIG

from gyre_sdk.trainer.config import load_config
from gyre_sdk.trainer.main import application, overrides

DOCUMENT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", DOCUMENT, re.DOTALL)
COMMANDS = [found.replace("/shared/", "") for found in re.findall(r"gyre-train (\S*train\.toml [^#`\n]*)", DOCUMENT)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config's folder; the settings only look whether a model is there."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def settings(words: list[str], folder: Path) -> Any:
    """Return the settings that a command line of `gyre-train` means, without starting anything."""
    (folder / "train.toml").write_text(CONFIG)
    told = typer.main.get_command(application()).make_context("gyre-train", words).params
    return load_config(folder / told["config"], overrides(told["steps"], told["launcher"], told["set_"]))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_are_taken(command: str, folder: Path) -> None:
    words = shlex.split(command.replace("$head", "node-1").replace("$port", "20123"))
    cells = settings(words, folder).cells
    assert cells.launcher == "ray"
    if "$head:" in command:
        assert (cells.ray_address, cells.resources) == ("node-1:20123", {"GPU": 8.0})


def test_all_commands_were_found() -> None:
    assert len(COMMANDS) == 4


def test_the_pages_settings_are_taken(folder: Path) -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    (folder / "train.toml").write_text(CONFIG + text)
    cells = load_config(folder / "train.toml", []).cells
    assert cells is not None
    assert (cells.count, cells.launcher, cells.ray_address, cells.resources) == (4, "ray", "auto", {"GPU": 8.0})


def test_the_job_for_slurm_is_a_script() -> None:
    (script,) = [text for kind, text in BLOCKS if kind == "bash"]
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_pods_of_the_manifest_have_what_cells_need() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "yaml"]
    found = yaml.safe_load(text)
    (group,) = found["spec"]["workerGroupSpecs"]
    pods = [found["spec"]["headGroupSpec"]["template"]["spec"], group["template"]["spec"]]
    mounts = []
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        mounts.append({mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]})
        assert set(mounts[-1]) == {volume["name"] for volume in pod["volumes"]}
    assert mounts[0] == mounts[1] | {"store": "/store"}, "the store is the head's alone"
    assert group["replicas"] + 1 == 4, "the core's pod and one for each satellite"


def test_options_that_name_their_key_come_last() -> None:
    assert overrides(3, "ray", ["train.steps=9"]) == ["train.steps=9", "train.steps=3", "cells.launcher=ray"]
    assert overrides(None, None, None) == []
