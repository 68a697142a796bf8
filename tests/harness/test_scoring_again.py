"""Runs scored again from their snapshots give the same; what is on record of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gyre_sdk as gyre
from gyre_sdk.cli import app
from gyre_sdk.harness.scoring.record import RESCORED, STREAM, evaluations
from gyre_sdk.harness.workspace.snapshots import remove, snapshots
from gyre_sdk.journal import Journal

pytestmark = pytest.mark.docker
TEST = """
echo looking
cat conftest.py 2>/dev/null && r=1 || r=$(cat part)
echo "{\\"reward\\": $r, \\"size\\": $(wc -c < part)}" > /logs/verifier/reward.json
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "task"
    (place / "tests").mkdir(parents=True)
    (place / "tests" / "test.sh").write_text(TEST)
    (place / "instruction.md").write_text("Write a number into part\n")
    (place / "task.toml").write_text(
        '[environment]\ndocker_image = "gyre/base"\nworkdir = "/workspace"\nmemory_mb = 64\n[verifier]\nenvironment_mode = "separate"\n'
    )
    return place


@pytest.fixture
def clean(docker_client: Any) -> Any:
    """No snapshot of these tests is left."""
    before = {one.id for one in snapshots(docker_client)}
    yield
    for one in snapshots(docker_client):
        if one.id not in before:
            remove(docker_client, one.id)


def test_rescore_gives_the_same(
    service: gyre.ServiceClient, tmp_path: Path, folder: Path, base_image: str, docker_client: Any, clean: Any
) -> None:
    task = gyre.Task.load(folder)
    runs = []
    for part in ("0.25", "0.5"):
        with gyre.session(task, service=service, workspace="docker", keep_snapshots=True) as agent:
            agent.workspace.exec(f"printf {part} > part; echo planted > conftest.py; mkdir -p /logs/verifier")
        assert agent.result.reward == float(part), agent.result
        assert agent.result.tampered == ("steering /workspace/conftest.py: planted; taken away",)
        assert agent.result.snapshot in {one.id for one in snapshots(docker_client) if one.keep}
        runs.append(agent.result.run)
    store = tmp_path / "s.db"
    with Journal(store, "r") as journal:
        first, second = evaluations(journal)
    assert (first.run, first.score.reward, first.score.parts["size"]) == (runs[0], 0.25, 4.0)
    assert first.score.output == "looking\n" and first.score.mode == "separate"

    def rescore(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
        done = CliRunner().invoke(app, ["rescore", str(store), *arguments, "--json"])
        return done.exit_code, [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    status, found = rescore("--all")
    assert (status, [one["run"] for one in found], [one["same"] for one in found]) == (0, runs, [True, True]), found
    assert found[0]["now"]["parts"] == {"reward": 0.25, "size": 4.0}
    assert found[0]["now"]["tampered"] == ["steering /workspace/conftest.py: planted; taken away"]

    (folder / "tests" / "test.sh").write_text("echo 0.75 > /logs/verifier/reward.txt")
    status, found = rescore(runs[1])
    assert (status, found[0]["same"], found[0]["now"]["reward"]) == (1, False, 0.75)
    assert "not those of the first time" in found[0]["said"]
    assert second.score.snapshot is not None
    remove(docker_client, second.score.snapshot)
    status, found = rescore(runs[1])
    assert (status, found[0]["now"]["reward"]) == (1, None) and "it was removed" in found[0]["now"]["explanation"]
    with Journal(store, "r") as journal:
        assert journal.run(runs[1]).reward == 0.5  # type: ignore[union-attr]
        assert sum(entry.kind == RESCORED for entry in journal.entries(STREAM)) == 4


def test_what_cannot_be_scored_again_is_said(
    service: gyre.ServiceClient, tmp_path: Path, folder: Path, base_image: str
) -> None:
    with gyre.session(gyre.Task.load(folder), service=service, workspace="docker") as agent:
        agent.workspace.exec("printf 1 > part")
    assert agent.result.snapshot is None
    for arguments, words in (
        ([agent.result.run], ["no snapshot", "keep_snapshots"]),
        ([], ["--all"]),
        ([agent.result.run, "--all"], ["not both"]),
    ):
        done = CliRunner().invoke(app, ["rescore", str(tmp_path / "s.db"), *arguments])
        assert done.exit_code != 0 and all(word in str(done.exception) for word in words), done
