"""The task folders and rows that people have, run for real: their own solution reaches reward 1, doing nothing does not.

Their base images come from registries; `standin_kit` says what stands in for them here.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import standin_kit

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.check import Finding, check_task
from gyre_sdk.harness.task import SwebenchOptions, Task, TaskSet

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

DATA = Path(__file__).parents[3] / "shared" / "data"
FOLDERS = DATA / "harbor-tasks"
SOUND = {
    "cookbook-dns-blacklisting": {},
    "cookbook-multi-container": {},
    "cookbook-multi-reward": {},
    "cookbook-multi-step": {"network": "none", "verifier_network": "none"},
    "cookbook-simple-task": {},
    "cookbook-simulated-user": {},
    "cookbook-skills": {},
    "inspect-simple-task": {},
}
"""Folder -> what is replaced: the one that says `allow_internet = true` needs none, and the engine of the tests has none."""
INSTANCE = "sympy__sympy-20916"


@pytest.fixture(scope="module")
def findings(docker_client) -> dict[str, list[Finding]]:
    """Outcome of the checks of every folder that can be checked, and of one SWE-bench instance."""
    if not FOLDERS.is_dir():
        pytest.skip(f"{FOLDERS} is missing: the shared data are not part of the repository")
    missing = standin_kit.missing()
    if missing is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no stand-in for public images: {missing}")
    image = standin_kit.standin(docker_client)
    tasks = {
        name: TaskSet.load(FOLDERS / name, variables={"ANTHROPIC_API_KEY": ""}).replace(**changes)[0]
        for name, changes in SOUND.items()
    }
    options = SwebenchOptions(
        image=image,
        snapshot=standin_kit.sympy(),
        test_command="python -m pytest -rA --tb=no -p no:cacheprovider {files}",
    )
    tasks[INSTANCE] = TaskSet.load(DATA / "swebench" / "swebench_verified_5_rows.jsonl", swebench=options)[INSTANCE]
    with ThreadPoolExecutor(2) as running:
        return dict(zip(tasks, running.map(lambda task: list(check_task(task)), tasks.values()), strict=True))


@pytest.mark.parametrize("name", [*SOUND, INSTANCE])
def test_the_own_solution_reaches_reward_1_and_a_no_op_does_not(findings, name):
    found = {finding.check: finding for finding in findings[name]}
    assert list(found) == ["image", "solution", "no-op"]
    assert all(finding.ok for finding in found.values()), found
    assert found["solution"].said.startswith("reward 1")
    assert found["no-op"].said.startswith("reward 0")


def test_parts_and_steps_are_told(findings):
    said = {name: {finding.check: finding.said for finding in found} for name, found in findings.items()}
    assert said["cookbook-multi-reward"]["solution"] == "reward 1 (correctness 1, performance 1)"
    assert said["cookbook-multi-step"]["solution"] == "reward 1 (scaffold 1, implement 1, document 1)"
    assert "step 'scaffold': reward 0 is below its min_reward 1" in said["cookbook-multi-step"]["no-op"]
    assert said[INSTANCE]["solution"] == "reward 1 (resolved 1, fail_to_pass 1, pass_to_pass 1)"
    assert said[INSTANCE]["no-op"].startswith("reward 0 (resolved 0, fail_to_pass 0, pass_to_pass 1)")


@pytest.mark.parametrize("name", ["autoagent-count-files", "autoagent-hello-world", "autoagent-simple-script"])
def test_folders_without_a_solution_say_so(docker_url, name):
    if not FOLDERS.is_dir():
        pytest.skip(f"{FOLDERS} is missing: the shared data are not part of the repository")
    first = next(check_task(Task.load(FOLDERS / name)))
    assert (first.check, first.ok) == ("solution", False)
    assert first.said.startswith("there is no solution/solve.sh")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cookbook-simulated-user", "ANTHROPIC_API_KEY"),
        ("dialect-inspect-coco-fix-syntax-errors", "environment/Dockerfile is missing and"),
        ("harbor-template-separate-verifier", r"instruction\.md is empty"),
    ],
)
def test_folders_that_cannot_be_read_say_why(name, reason):
    if not FOLDERS.is_dir():
        pytest.skip(f"{FOLDERS} is missing: the shared data are not part of the repository")
    with pytest.raises(TaskError, match=reason):
        Task.load(FOLDERS / name)
