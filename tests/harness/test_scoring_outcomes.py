"""What follows from each end of a run: the case scoring-outcome-table, lived through, and the policy's table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from session_kit import a_task
from tree_inputs import case

import gyre_sdk as gyre
from gyre_sdk.credit import tally
from gyre_sdk.errors import ImageMissing, WorkspaceUnavailable
from gyre_sdk.events import Event, RunEnded
from gyre_sdk.harness.scoring import POLICY, Retry, evaluate, outcome, stands
from gyre_sdk.harness.scoring.run import START_RETRIES
from gyre_sdk.harness.task import Artifact, Task
from gyre_sdk.harness.workspace import DockerWorkspace, WorkspacePool, files
from gyre_sdk.journal import Journal
from gyre_sdk.records import End, RunRecord, RunStatus, Score, ScoreStatus

Verifier = Callable[[Any], float]


def says(*outcomes: float | str) -> Verifier:
    """Return a scorer that gives these rewards, one a call; text is a failure."""
    rest = list(outcomes)

    def scorer(workspace: Any) -> float:
        found = rest.pop(0)
        if isinstance(found, str):
            raise OSError(found)
        return found

    return scorer


def refusal(code: str | None, status: int) -> openai.APIStatusError:
    request = httpx.Request("POST", "http://proxy/v1/chat/completions")
    kind = openai.InternalServerError if status >= 500 else openai.BadRequestError
    return kind("refused", response=httpx.Response(status, request=request), body={"code": code})


class Lived:
    """Runs of the case, recorded in one store."""

    def __init__(self, service: gyre.ServiceClient, store: Path) -> None:
        self.service, self.store = service, store
        self.scorings: dict[str, int] = {}
        self.seen: list[Event] = []

    def run(
        self, name: str, verifier: Verifier, block: Callable[[gyre.Agent], None] = lambda agent: None, **options: Any
    ) -> None:
        calls = []

        def scorer(workspace: Any) -> float:
            calls.append(1)
            return verifier(workspace)

        values: dict[str, Any] = {"workspace": "local", "observer": self.seen.append, **options}
        task = values.pop("task", None) or a_task(name=name, scorer=scorer)
        with suppress(openai.APIError, ImageMissing, ValueError, WorkspaceUnavailable):
            with gyre.session(task, service=self.service, **values) as agent:
                block(agent)
        self.scorings[name] = len(calls)

    def records(self) -> dict[str, RunRecord]:
        with Journal(self.store, "r") as journal:
            return {run.task: run for run in journal.runs()}


@pytest.fixture
def lived(service: gyre.ServiceClient, tmp_path: Path) -> Iterator[Lived]:
    yield Lived(service, tmp_path / "s.db")


def out_of_time(agent: gyre.Agent) -> None:
    raise gyre.LimitExceeded("its wall time is spent")


def lose(agent: gyre.Agent) -> None:
    agent.context.workspace.close()
    raise gyre.LimitExceeded("its wall time is spent")


def raising(error: BaseException) -> Callable[[gyre.Agent], None]:
    def block(agent: gyre.Agent) -> None:
        raise error

    return block


def test_outcome_table(lived: Lived, base_image: str) -> None:
    """Each run of the case ends as its table says; none of them is a 0 that nobody evaluated, but for the placeholder."""
    expected = case("scoring", "scoring-outcome-table")["expected"]["table"]

    def late(workspace: Any) -> float:
        time.sleep(0.3)
        raise OSError("the tests were cut off")

    lived.run("a", says(0.0))
    lived.run("b", says("no reward file", 0.7))
    lived.run("c", says("no reward file", "killed for memory", "no reward file"))
    lived.run("d", says("too slow", "too slow", "too slow"))
    lived.run("e", says(0.4), out_of_time)
    lived.run("f", says(1.0), lose, task=a_task(name="f", scorer=None, tests={"test.sh": "exit 0"}))
    lived.run("g", says(), task=a_task(name="g", image="local/does-not-exist:0"), workspace="docker")
    lived.run("h", says(0.0), raising(refusal(None, 502)))
    lived.run("i", says(0.3))
    lived.run("j", says(1.0), raising(ValueError("exit status 1")))
    lived.run("k", says(0.2), raising(refusal("context_length_exceeded", 400)))
    lived.run("l", late, overall_s=0.2)
    records = lived.records()
    for name, want in expected.items():
        run = records[name]
        assert (run.reward, run.placeholder) == (want["reward"], want.get("placeholder", False)), (name, run)
        assert (run.status is RunStatus.COMPLETED) == (name in "abi"), run
        assert (run.error is None) == (name in "abi"), run
    assert {name: lived.scorings[name] for name in "bcde"} == {"b": 2, "c": 3, "d": 3, "e": 1}
    words = {
        "c": "evaluated 3 times",
        "e": "wall time",
        "f": "workspace lost",
        "g": "does-not-exist:0",
        "h": "infrastructure",
        "j": "exit status 1",
        "k": "context limit",
        "l": "overall limit",
    }
    for name, word in words.items():
        assert word in (records[name].error or ""), records[name]
    summary = tally(records.values())
    assert (summary.scored, summary.started, summary.placeholders, summary.unscored) == (6, 12, 1, 5)
    assert summary.causes == {"scorer_error": 2, "workspace_error": 1, "infrastructure": 1, "timed_out": 1}
    ended = [event for event in lived.seen if isinstance(event, RunEnded)]
    assert [(event.placeholder, event.reward) for event in ended if event.placeholder] == [(True, 0.0)]


@pytest.mark.docker
def test_a_start_that_fails_is_tried_again(lived: Lived, docker_client: Any, base_image: str) -> None:
    """The image is made while the session waits to try again."""
    name = "gyre/test-late:1"
    tried: list[str] = []

    class Late(WorkspacePool):
        def take(self, task: Task, *, run_id: str = "") -> Any:
            tried.append(run_id)
            if len(tried) == START_RETRIES + 1:
                docker_client.images.get(base_image).tag(name)
            return super().take(task, run_id=run_id)

    try:
        with Late() as pool:
            lived.run("late", says(1.0), task=a_task(name="late", image=name, scorer=says(1.0)), workspace=pool)
    finally:
        docker_client.images.remove(name, noprune=True)
    assert len(tried) == START_RETRIES + 1
    assert lived.records()["late"].reward == 1.0


@pytest.mark.docker
@pytest.mark.parametrize(
    ("tests", "options", "word"),
    [
        ("tail /dev/zero", {"memory_mb": 32}, "neither"),  # out of memory
        ("sleep 20; echo 1 > /logs/verifier/reward.txt", {"verifier_timeout_s": 0.3}, "limit of 0.3 s"),
        ("kill -9 -1", {}, "evaluated 2 times"),  # the whole container
        ("yes > /logs/verifier/reward.txt", {"verifier_timeout_s": 1.0}, "evaluated 2 times"),
    ],
)
def test_evaluations_that_die_are_no_reward(
    docker_client: Any, base_image: str, tests: str, options: Any, word: str
) -> None:
    task = Task(instruction="x", tests={"test.sh": tests}, **{"memory_mb": 128, "pids": 64, **options})
    with DockerWorkspace(task, docker_client) as workspace:
        found = evaluate(task, workspace, retries=1)
        assert workspace.exec("true").exit_code == 0  # the agent's own is as it was
    assert (found.reward, found.status, found.evaluations) == (None, ScoreStatus.FAILED, 2)
    assert word in found.explanation, found


@pytest.mark.docker
def test_a_verifier_of_its_own_sees_the_artifacts_alone(
    docker_client: Any, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_client.images.get(base_image).tag("gyre/test-verifier", "1")
    test = """
    ls -A /workspace /workspace/out | tr '\\n' ' '
    id -u; ls -ld /tests | cut -c1-10
    [ "$(readlink out/python) $(readlink out/same)" = "/usr/bin/python3 number" ] || exit
    wc -c < out/twin > /logs/verifier/reward.txt
    """
    task = Task(
        instruction="x",
        tests={"test.sh": test},
        verifier_image="gyre/test-verifier:1",
        verifier_user="1234:1234",
        artifacts=(Artifact("out", exclude=("*.log",)), Artifact("never/made")),
        files={"given": "only the agent's"},
        memory_mb=64,
    )
    try:
        with DockerWorkspace(task, docker_client) as workspace:
            workspace.exec(
                "mkdir out; cd out; printf 123 > a.log; ln a.log number; ln a.log twin; touch ../mine; mkfifo pipe;"
                " ln -s /usr/bin/python3 python; ln -s number same"  # as in a virtual environment
            )
            found = evaluate(task, workspace, retries=0)
            monkeypatch.setattr(files, "DOWNLOAD_LIMIT", 65536)
            workspace.exec("head -c 99999 /dev/zero >out/much")
            unread = evaluate(task, workspace, retries=0)
    finally:
        docker_client.images.remove("gyre/test-verifier:1", noprune=True)
    assert found.reward == 3.0, found
    assert (unread.reward, unread.status) == (None, ScoreStatus.FAILED)
    assert "'/workspace/out' cannot be downloaded" in unread.explanation  # which is not as if it were not there
    left = ["number", "pipe", "python", "same", "twin"]
    assert found.output.split() == ["/workspace:", "out", "/workspace/out:", *left, "1234", "drwxr-xr-x"]


def test_the_policy_has_a_row_for_every_end() -> None:
    assert set(POLICY) == set(End)
    for end, rule in POLICY.items():
        assert rule.trainable == rule.graded, end  # what is evaluated may train, and nothing else
        assert not (rule.placeholder and rule.graded), end
        for status in ScoreStatus:
            reward = 0.5 if status is ScoreStatus.SCORED else None
            found = outcome(end, Score(reward, status=status))
            evaluated = rule.graded and status is ScoreStatus.SCORED
            assert found.reward == (0.5 if evaluated else 0.0 if rule.placeholder else None), (end, status)
            assert found.trainable == evaluated and found.placeholder == rule.placeholder
        assert outcome(end, None).reward == (0.0 if rule.placeholder else None)
    assert [end for end, rule in POLICY.items() if rule.retried is Retry.RUN] == [End.CANCELLED]
    assert {status for status in RunStatus if not stands(status)} == {RunStatus.RUNNING, RunStatus.CANCELLED}
