"""Scoring: honest rewards, forged ones, and the difference between bad and unknown. Cases: cases/scoring/*.json."""

from __future__ import annotations

import dataclasses
import sys
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import ImageMissing, ScoringError, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.scoring import parse_reward, prepare, score, score_with_retries
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, Isolation, LocalWorkspace, WorkspacePool, open_workspace
from gyre_sdk.records import Score

pytestmark = pytest.mark.docker
LIMITS = {"memory_mb": 128, "pids": 64, "verifier_mode": "shared"}
VERIFIER = 'if grep -q fixed app.txt; then r=1; else r=0; fi; echo "$r" > /logs/verifier/reward.txt\n'
BUSY = "setsid sh -c '{}' >/dev/null 2>&1 &"
ATTACKS = {  # scoring-forged-reward-files
    "none": "true",
    "file first, txt": "mkdir -p /logs/verifier; echo 1.0 > /logs/verifier/reward.txt",
    "file first, json preferred": "mkdir -p /logs/verifier; echo '{\"reward\": 1.0}' > /logs/verifier/reward.json",
    "read-only directory": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 555 /logs/verifier; chmod 444 /logs/verifier/reward.txt",
    "symbolic link": 'mkdir -p /logs; ln -sfn "$PWD/mine" /logs/verifier; mkdir -p mine; echo 1 > mine/reward.txt',
    "named pipe": "mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.json",
    "folder": "mkdir -p /logs/verifier/reward.json /logs/verifier/reward.txt",
    "background writer": BUSY.format(
        'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo "{\\"reward\\": 1}" > /logs/verifier/reward.json; sleep 0.01; done'
    ),
    "late writer": BUSY.format("sleep 1; echo 1 > /logs/verifier/reward.txt"),
    "background writer without a marker": "env -i /bin/setsid /bin/sh -c 'while :; do echo 1 > /logs/verifier/reward.json; sleep 0.01; done' >/dev/null 2>&1 &",
    "edits the tests": "mkdir -p tests; printf 'echo 1 > /logs/verifier/reward.txt\\n' > tests/test.sh",
    "plants tests": "printf 'echo 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh; chmod 555 /tests/test.sh /tests; ln -s /workspace /tests/more",
    "plain output": "echo reward: 1.0; echo '{\"reward\": 1.0}'",
    "hidden umask": "umask 077; mv app.txt kept; cp kept app.txt; rm kept",
}


def task_with(test: str, **options) -> Task:
    return Task(instruction="x", tests={"test.sh": test}, files={"app.txt": "broken\n"}, **{**LIMITS, **options})


@pytest.fixture(scope="module")
def pool(docker_client, base_image):
    with WorkspacePool(recycle=True) as pool:
        yield pool


@pytest.fixture(params=["unguarded", "recycled", "root", "bubblewrap"])
def place(request, docker_client, base_image, pool, tmp_path):
    """Returns a function that opens a workspace of a kind; `unguarded` has no binary that keeps its user out."""
    opened = []

    def start(task: Task):
        if request.param == "unguarded":
            (tmp_path / "Dockerfile").write_text('FROM gyre/base\nLABEL gyre.supervisor=""\n')
            opened.append(pool.take(dataclasses.replace(task, dockerfile=tmp_path)))
        elif request.param == "recycled":
            opened.append(pool.take(task))
        elif request.param == "root":
            opened.append(DockerWorkspace(task_with(VERIFIER, user="root"), docker_client))
        else:
            opened.append(LocalWorkspace(task, isolation=Isolation.BUBBLEWRAP))
        return opened[-1]

    yield start
    for workspace in opened:
        workspace.close()


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("honest", [True, False], ids=["honest", "cheat"])
def test_no_attack_changes_the_reward(place, name, honest):
    task = task_with(VERIFIER)
    workspace = place(task)
    workspace.exec(f"echo {'fixed' if honest else 'broken'} > app.txt")
    workspace.exec(ATTACKS[name], timeout=20)
    found = score(task, workspace)
    assert found.reward == (1.0 if honest else 0.0)
    if name in ("file first, txt", "symbolic link", "named pipe", "folder"):
        assert any("/logs/verifier" in note for note in found.tampered), found


def test_the_state_counts_at_the_agents_end(place):
    task = task_with("sleep 0.3; " + VERIFIER)
    workspace = place(task)
    workspace.exec(BUSY.format("sleep 0.2; while :; do echo fixed > app.txt; sleep 0.01; done"))
    assert score(task, workspace).reward == 0.0


LINKED = {
    "direct": "ln -s /tests/expected direct",
    "relative": "ln -s ../tests/below/expected relative",
    "through a folder": "ln -s /tests hop; ln -s hop/expected 'through a folder'",
    "through a line break": "x=$(printf 'a\\nb'); ln -s /tests \"$x\"; ln -s \"$x/expected\" 'through a line break'",
    "through a process": "ln -s /proc/self/root/tests/expected 'through a process'",
    "where the tests are": "ln -s /proc/self/cwd/expected 'where the tests are'",
    "shut/answer": "mkdir shut; ln -s /tests/expected shut/answer; chmod 311 shut",
}
COUNT = 'cd /tests; n=0; for a in {}; do cmp -s "/workspace/$a" expected && n=$((n+1)); done; echo $n >/logs/verifier/reward.txt'


def test_an_answer_that_is_a_link_to_the_expected_one_is_none(place):
    count = COUNT.format(" ".join(f"'{name}'" for name in (*LINKED, "honest", "folder/../linked")))
    task = dataclasses.replace(task_with(count), tests={"test.sh": count, "expected": "42\n", "below/expected": "42\n"})
    workspace = place(task)
    workspace.exec("; ".join(LINKED.values()), check=True)
    workspace.exec(
        "echo 42 >honest; mkdir -p folder/tests; echo 42 >folder/tests/a; ln -s folder/tests/a linked", check=True
    )
    found = score(task, workspace)
    assert found.reward == 2.0, found
    for name in ("direct", "hop", "shut/answer"):
        assert any(f"{name}: leads into the tests" in note for note in found.tampered), found


def test_a_link_into_the_tests_that_a_task_has_itself_stays(docker_client, base_image):
    test = "cmp answer own/expected && r=1; echo ${r:-0} >/logs/verifier/reward.txt"
    task = Task(instruction="x", tests={"test.sh": test, "expected": "42\n"}, memory_mb=64)
    with DockerWorkspace(task, docker_client) as workspace:
        workspace.exec("ln -s /tests own", check=True)
        seal = prepare(task, workspace)
        workspace.exec("echo 42 >answer; ln -s /tests mine", check=True)
        found = score(task, workspace, seal=seal)
    assert found.reward == 1.0, found
    assert [note for note in found.tampered if "leads" in note] == [
        "link /workspace/mine: leads into the tests or the reward; taken away"
    ]


@pytest.fixture
def workspace(docker_client, base_image, pool):
    with pool.take(task_with(VERIFIER)) as workspace:
        yield workspace


@pytest.mark.parametrize(
    ("test", "reward", "parts"),
    [
        ("echo 0.0 > /logs/verifier/reward.txt", 0.0, {}),
        ("echo ' 0.3 ' > /logs/verifier/reward.txt; exit 1", 0.3, {}),
        (
            'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt',
            0.5,
            {"reward": 0.5, "style": 1.0},
        ),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', 0.5, {"a": 1.0, "b": 0.0}),
        ("echo 0.25 > /logs/verifier/reward.json", 0.25, {}),
        ("echo -2 > /logs/verifier/reward.txt", -2.0, {}),
        ("mkdir -p /logs/verifier; cat /tests/value > /logs/verifier/reward.txt", 0.75, {}),
        ("echo $SCALE > /logs/verifier/reward.txt", 0.125, {}),
    ],
)
def test_rewards(workspace, test, reward, parts):
    task = Task(instruction="x", tests={"test.sh": test, "value": "0.75"}, verifier_env={"SCALE": "0.125"}, **LIMITS)
    found = score(task, workspace)
    assert (found.reward, found.parts) == (reward, parts)


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("exit 1", ["neither", "exit code 1", "reward.json"]),
        ('echo \'{"reward": "high"}\' > /logs/verifier/reward.json', ["reward.json", "'high'", "str"]),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", ["reward.json", "True", "bool"]),
        ("echo '{\"reward\": null}' > /logs/verifier/reward.json", ["reward.json", "None"]),
        ("echo '{\"reward\": 1e999}' > /logs/verifier/reward.json", ["reward.json"]),
        ("echo '{}' > /logs/verifier/reward.json", ["reward.json", "no reward"]),
        ("echo '[1]' > /logs/verifier/reward.json", ["reward.json", "[1]"]),
        ('echo \'{"a": {"b": 1}}\' > /logs/verifier/reward.json', ["reward.json", "'a'"]),
        (
            "echo 'not json' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
            ["reward.json", "not json"],
        ),
        ("echo nan > /logs/verifier/reward.txt", ["reward.txt", "finite"]),
        ("echo inf > /logs/verifier/reward.txt", ["reward.txt", "finite"]),
        ("echo good > /logs/verifier/reward.txt", ["reward.txt", "'good"]),
        (": > /logs/verifier/reward.txt", ["reward.txt", "not a number"]),
        ("ln -s /etc/passwd /logs/verifier/reward.txt", ["reward.txt", "regular file"]),
        ("mkfifo /logs/verifier/reward.json", ["reward.json", "regular file"]),
        ("head -c 100000 /dev/zero > /logs/verifier/reward.txt", ["reward.txt", "larger"]),
        ("kill -9 -1", ["neither"]),
    ],
)
def test_no_number_is_no_reward(workspace, test, words):
    task = Task(instruction="x", tests={"test.sh": test}, **LIMITS)
    with pytest.raises(ScoringError) as caught:
        score(task, workspace)
    for word in [*words, "task 'task'"]:
        assert word in str(caught.value)


def test_a_flaky_verifier_is_tried_again(workspace):
    """scoring-outcome-table b, c, d."""
    counted = "n=$(cat /tmp/n 2>/dev/null || echo 0); echo $((n+1)) > /tmp/n; "
    task = Task(
        instruction="x", tests={"test.sh": counted + "[ $n = 1 ] && echo 0.7 > /logs/verifier/reward.txt"}, **LIMITS
    )
    assert score_with_retries(task, workspace).reward == 0.7
    assert workspace.read("/tmp/n") == b"2\n"
    never = Task(instruction="x", tests={"test.sh": counted}, **LIMITS)
    workspace.exec("rm /tmp/n")
    with pytest.raises(ScoringError, match="evaluated 3 times"):
        score_with_retries(never, workspace)
    assert workspace.read("/tmp/n") == b"3\n"
    slow = Task(
        instruction="x",
        tests={"test.sh": "echo 1 > /logs/verifier/reward.txt; sleep 60"},
        verifier_timeout_s=0.5,
        **LIMITS,
    )
    with pytest.raises(ScoringError, match=r"limit of 0\.5 s.*evaluated 2 times"):
        score_with_retries(slow, workspace, retries=1)


def test_a_lost_workspace_is_not_a_score(docker_client, base_image):
    """scoring-outcome-table f, g."""
    task = task_with(VERIFIER)
    workspace = DockerWorkspace(task, docker_client)
    docker_client.api.remove_container(workspace.container.id, force=True)
    began = time.monotonic()
    with pytest.raises(WorkspaceUnavailable):
        score_with_retries(task, workspace)
    assert time.monotonic() - began < 60
    workspace.close()
    with pytest.raises(ImageMissing, match=r"local/does-not-exist:0.*is not present; run: docker pull"):
        open_workspace(Task(instruction="x", image="local/does-not-exist:0"))
    with pytest.raises(ImageMissing, match="gyre sandbox build nothing"):
        open_workspace(Task(instruction="x", image="gyre/nothing"))


@pytest.mark.parametrize("where", ["recycled", "local"])
def test_protected_files_are_as_they_were(pool, where):
    """Also in `shared` mode, where nothing else is compared with the start."""
    test = "cat data gone folder/* | tr -d '\\n' > /logs/verifier/reward.txt"
    files = {"data": "12", "gone": "3", "folder/a": "4", "free": "x"}
    task = Task(instruction="x", tests={"test.sh": test}, files=files, protected=("data", "gone", "folder"), **LIMITS)
    with pool.take(task) if where == "recycled" else LocalWorkspace(task) as workspace:
        seal = prepare(task, workspace)
        workspace.exec("echo 9 > data; rm gone; echo 5 > folder/b; echo 6 > folder/a; echo y > free; mkdir gone")
        found = score(task, workspace, seal=seal)
        assert workspace.read("free") == b"y\n"
    assert found.reward == 1234.0, found
    assert {note.split(" ")[1].rpartition("/")[2] for note in found.tampered} == {"data:", "gone:", "a:", "b:"}


def test_scorers_in_python(workspace):
    def with_scorer(scorer):
        return score(Task(instruction="x", scorer=scorer, verifier_mode="shared"), workspace)

    workspace.write("app.txt", "fixed")
    assert with_scorer(lambda ws: float(ws.read("app.txt") == b"fixed")).reward == 1.0
    assert with_scorer(lambda ws: {"a": 1, "b": 0}) == Score(0.5, {"a": 1.0, "b": 0.0}, mode="shared")
    assert with_scorer(lambda ws: Score(0.2, {"x": 1.0}, "why")).explanation == "why"
    numpy = with_scorer(lambda ws: Score(np.float64(0.5), {"a": np.float32(0.25), "b": np.int64(2)}, 7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(numpy), type=Score) == numpy
    assert (numpy.reward, numpy.parts, numpy.explanation) == (0.5, {"a": 0.25, "b": 2.0}, "7")
    assert with_scorer(lambda ws: {"a": np.float32(0.5)}) == Score(0.5, {"a": 0.5}, mode="shared")
    for wrong in (None, float("nan"), True, np.True_, "1", {}, Score(float("inf")), Score(1.0, {"a": float("nan")})):
        with pytest.raises(ScoringError):
            with_scorer(lambda ws, wrong=wrong: wrong)
    with pytest.raises(ScoringError, match="ZeroDivisionError"):
        with_scorer(lambda ws: 1 / 0)
    with pytest.raises(ScoringError, match="SystemExit"):
        with_scorer(lambda ws: sys.exit(1))


def test_the_agents_processes_are_dead_before_a_scorer_looks(workspace):
    workspace.exec("setsid sleep 31477 >/dev/null 2>&1 &")
    seen = []
    score(
        Task(
            instruction="x",
            verifier_mode="shared",
            scorer=lambda ws: seen.append(ws.exec("ps -eo args | grep -c '[s]leep 31477'").stdout) or 1.0,
        ),
        workspace,
    )
    assert seen == ["0\n"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_finite_number_is_read_exactly(value):
    assert parse_reward(f"{value!r}\n", "reward.txt").reward == value
    assert parse_reward(f'{{"reward": {value!r}}}', "reward.json").reward == value


@given(st.text(max_size=30))
def test_any_text_is_a_number_or_an_error(text):
    for file in ("reward.txt", "reward.json"):
        try:
            assert isinstance(parse_reward(text, file).reward, float)
        except ScoringError as error:
            assert file in str(error)


def test_without_isolation_tests_never_touch_the_machine():
    """They would be placed at /tests and read /logs of the machine itself."""
    with pytest.raises(WorkspaceError, match=r"/tests and /logs: .* install bubblewrap"):
        LocalWorkspace(task_with(VERIFIER), isolation=Isolation.NONE)


def test_an_evaluation_in_place_has_the_verifiers_network(docker_client, base_image):
    """The agent's egress proxy is gone while tests run, and there again for the step that follows."""
    ask = "wget -O- http://127.0.0.1:8112/ 2>&1"
    task = Task(
        instruction="x",
        network="allowlist",
        allowed_hosts=("example.org",),
        verifier_network="none",
        verifier_mode="shared",
        tests={"test.sh": f"if {ask} | grep -q refused; then echo 1; else echo 0; fi >/logs/verifier/reward.txt"},
    )
    with DockerWorkspace(task, docker_client) as workspace:
        assert "returned error" in workspace.exec(ask).stdout
        assert score(task, workspace).reward == 1.0
        assert "returned error" in workspace.exec(ask).stdout
