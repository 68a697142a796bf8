"""Rewards of tasks with several steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from proxy_kit import running
from run_kit import Service, python

import gyre_sdk as gyre
from gyre_sdk.harness.task import Step, Task, below, combine
from gyre_sdk.records import RunStatus, Score, ScoreStatus


def steps(rule: str = "mean", **second) -> Task:
    return Task(
        instruction="x",
        steps=(
            Step(name="a", instruction="x", min_reward=0.5),
            Step(name="b", instruction="y", **second),
            Step(name="c", instruction="z"),
        ),
        step_reward=rule,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("rule", "rewards", "reward"),
    [
        ("mean", [1.0, 0.5, 0.0], 0.5),
        ("mean", [0.2], 0.2 / 3),
        ("mean", [], 0.0),
        ("final", [0.0, 0.0, 1.0], 1.0),
        ("final", [1.0, 1.0], 0.0),
    ],
)
def test_the_reward_of_the_whole(rule, rewards, reward):
    score = combine(steps(rule), [Score(value) for value in rewards])
    assert score.reward == pytest.approx(reward)
    assert score.parts == dict(zip("abc", rewards, strict=False))


def test_stopping_early_never_raises_a_reward():
    task = steps()
    assert combine(task, [Score(0.6), Score(0.4)]).reward <= combine(task, [Score(0.6), Score(0.4), Score(0.0)]).reward
    assert "left out: c" in combine(task, [Score(0.6), Score(0.4)]).explanation


def test_parts_and_tampering_are_kept_apart_by_step():
    score = combine(
        steps(),
        [Score(1.0, {"reward": 1.0, "speed": 0.5}), Score(0.0, {"speed": 0.1}, tampered=("/etc/passwd",)), Score(1.0)],
    )
    assert score.parts == {"a": 1.0, "a/speed": 0.5, "b": 0.0, "b/speed": 0.1, "c": 1.0}
    assert score.tampered == ("/etc/passwd",)


def test_a_failed_evaluation_leaves_no_reward():
    score = combine(steps(), [Score(1.0), Score(None, explanation="the tests hang", status=ScoreStatus.FAILED)])
    assert (score.reward, score.status, score.parts) == (None, ScoreStatus.FAILED, {"a": 1.0})
    assert "step 'b': the tests hang" in score.explanation


@pytest.mark.parametrize(
    ("least", "score", "words"),
    [
        (None, Score(-1.0), None),
        (None, None, None),
        (0.5, Score(0.5), None),
        (0.5, Score(0.49), "reward 0.49 is below its min_reward 0.5"),
        (0.5, None, "no reward"),
        (0.5, Score(None), "no reward"),
        ({"speed": 0.5}, Score(0.0, {"speed": 0.6}), None),
        ({"speed": 0.5}, Score(1.0, {"speed": 0.4}), "speed 0.4"),
        ({"speed": 0.5}, Score(1.0), "no speed"),
    ],
)
def test_when_later_steps_are_left_out(least, score, words):
    found = below(Step(name="a", instruction="x", min_reward=least), score)
    assert found is None if words is None else words in found


def two_steps(**second) -> Task:
    """Return a task of two steps: each wants a word in `answer`, the second what the first left as well."""
    tests = {
        "test.sh": 'grep -qx "$WANT" answer && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt'
    }
    return Task(
        instruction="two words",
        name="two-words",
        tests=tests,
        steps=(
            Step(name="one", instruction="write yes", verifier_env={"WANT": "yes"}, min_reward=1.0),
            Step(name="two", instruction="add no", files={"hint": "no"}, verifier_env={"WANT": "no"}, **second),
        ),
    )


def test_a_session_gives_out_steps_and_scores_each_in_its_place(service: gyre.ServiceClient) -> None:
    told = []
    with gyre.session(two_steps(), service=service, workspace="local") as agent:
        for step in agent.steps():
            told.append((step.instruction, agent.workspace.exec("cat answer hint; ls /tests").stdout.split()))
            agent.workspace.exec(
                "echo yes >>answer" if step.instruction == "write yes" else "cat hint >>answer; echo >>answer"
            )
    assert told == [("write yes", []), ("add no", ["yes", "no"])]
    assert (agent.result.status, agent.result.reward) == (RunStatus.COMPLETED, 1.0)
    assert agent.result.parts == {"one": 1.0, "two": 1.0}


def test_a_step_that_falls_short_ends_the_steps_of_a_session(service: gyre.ServiceClient) -> None:
    with gyre.session(two_steps(), service=service, workspace="local") as agent:
        steps = [step.instruction for step in agent.steps()]
    assert (steps, agent.result.reward, agent.result.parts) == (["write yes"], 0.0, {"one": 0.0})


def test_a_block_that_leaves_in_the_middle_of_a_step_has_it_scored(service: gyre.ServiceClient) -> None:
    with gyre.session(two_steps(), service=service, workspace="local") as agent:
        for _step in agent.steps():
            agent.workspace.exec("echo yes >answer")
            break
    assert (agent.result.reward, agent.result.parts) == (0.5, {"one": 1.0})
    with gyre.session(two_steps(), service=service, workspace="local") as agent:
        pass
    assert (agent.result.status, agent.result.reward, agent.result.placeholder) == (RunStatus.COMPLETED, 0.0, False)


def test_a_task_without_steps_is_its_only_one(service: gyre.ServiceClient) -> None:
    task = Task(instruction="do it", scorer=lambda workspace: 0.75)
    with gyre.session(task, service=service, workspace="local") as agent:
        assert [step.instruction for step in agent.steps()] == ["do it"]
    assert agent.result.reward == 0.75


PROGRAM = """
import os, time
print("told:", os.environ["GYRE_INSTRUCTION"].strip(), flush=True)
time.sleep(60 if "slow" in os.environ["GYRE_INSTRUCTION"] else 0)
"""


def test_gyre_run_starts_the_program_once_per_step_within_its_limit(model: Path, tmp_path: Path, engine: Any) -> None:
    folder = tmp_path / "steps"
    for name, instruction in (("one", "a quick step"), ("two", "a slow step"), ("three", "the last")):
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(instruction)
    (folder / "tests").mkdir()
    (folder / "tests" / "test.sh").write_text("echo 0.5 >/logs/verifier/reward.txt")
    (folder / "task.toml").write_text(
        '[environment]\ndocker_image = "gyre/base"\n[[steps]]\nname = "one"\n'
        '[[steps]]\nname = "two"\n[steps.agent]\ntimeout_sec = 0.5\n[[steps]]\nname = "three"\n'
    )
    with running(model, tmp_path / "s.db", engine.url) as proxy:
        service = Service(proxy.url, proxy.service_key, tmp_path / "s.db")
        process = service.start(folder, "--host", "--workspace", "local", *python(PROGRAM))
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert lines[:3] == ["told: a quick step", "told: a slow step", "told: the last"]
    assert "completed, reward 0.5, exit code 0" in lines[3]
