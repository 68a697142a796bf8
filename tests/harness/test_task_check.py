"""`gyre task check` and `gyre task list`: sound tasks, unsound ones with the exact reason; health checks; services."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_sdk.cli import app
from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.check import check_task, rehearse
from gyre_sdk.harness.task import Healthcheck, Service, Step, Task
from gyre_sdk.harness.task.known import unknown_keys
from gyre_sdk.harness.workspace import DockerWorkspace, WorkspacePool, open_workspace
from gyre_sdk.harness.workspace.reaper import owned

docker = pytest.mark.docker
REWARD = "/logs/verifier/reward.txt"
SOLVED = f'grep -q done out.txt 2>/dev/null && echo 1 >{REWARD} || {{ echo 0 >{REWARD}; echo "out.txt has no done"; }}'


def write(folder: Path, **files: str) -> Path:
    good = {
        "task.toml": '[environment]\ndocker_image = "gyre/base"\nworkdir = "/workspace"\n[metadata.gyre]\nuser = "1000:1000"\n',
        "instruction.md": "Write done into out.txt.",
        "tests/test.sh": SOLVED,
        "solution/solve.sh": "#!/bin/sh\necho done >out.txt\n",
    }
    for name, content in (good | files).items():
        if content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    return folder


def gyre(*arguments: object) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["task", *map(str, arguments)], catch_exceptions=False)
    return done.exit_code, done.output.splitlines()


@docker
def test_several_folders_one_line_per_check(tmp_path, base_image):
    write(tmp_path / "good")
    write(tmp_path / "set/bad", **{"solution/solve.sh": "echo wrong >out.txt; echo I tried; exit 3"})
    (tmp_path / "set/broken").mkdir()
    (tmp_path / "set/broken/task.toml").write_text("[environment")
    status, lines = gyre("check", tmp_path / "set")
    assert status == 1
    assert [line.split()[:3] for line in lines] == [
        ["ok", "bad", "valid"],
        ["ok", "bad", "image"],
        ["FAIL", "bad", "solution"],
        ["ok", "bad", "no-op"],
        ["FAIL", "broken", "valid"],
    ]
    assert "reward 0; solve.sh gave exit code 3: I tried; the tests printed: out.txt has no done" in lines[2]
    assert "task.toml is not TOML" in lines[4]
    status, lines = gyre("check", tmp_path / "good")
    assert status == 0
    assert [line.split()[:3] for line in lines] == [
        ["ok", "good", "valid"],
        ["ok", "good", "image"],
        ["ok", "good", "solution"],
        ["ok", "good", "no-op"],
    ]
    assert "reward 1" in lines[2] and "reward 0" in lines[3]


@docker
@pytest.mark.parametrize(
    ("files", "check", "reason"),
    [
        ({"tests/test.sh": f"echo 1 >{REWARD}"}, "no-op", "doing nothing gets reward 1"),
        ({"tests/test.sh": "echo 'no result'; exit 7"}, "solution", "(exit code 7): no result"),
        ({"solution/solve.sh": ""}, "solution", "there is no solution/solve.sh: nothing shows that reward 1"),
        (
            {"task.toml": '[environment]\ndocker_image = "no.such/image:1"\n'},
            "image",
            "image 'no.such/image:1' is not present; run: docker pull no.such/image:1",
        ),
        (
            {"task.toml": "", "environment/Dockerfile": "FROM gyre/base\nRUN echo broken here >&2; false\n"},
            "image",
            "broken here",
        ),
    ],
)
def test_the_exact_reason(tmp_path, base_image, files, check, reason):
    folder = write(tmp_path, **files)
    if not files.get("task.toml", "x"):
        (folder / "task.toml").write_text("")
    found = {finding.check: finding for finding in check_task(Task.load(folder))}
    assert not found[check].ok
    assert reason in found[check].said, found[check].said


def test_validation_alone_needs_no_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine")
    write(tmp_path / "one")
    write(tmp_path / "two", **{"task.toml": '[environment]\ndocker_image = "a"\n[agent]\ntimeout_secs = 5\n'})
    status, lines = gyre("check", "--no-run", tmp_path)
    assert (status, lines[0]) == (0, "ok    one  valid")
    assert lines[1] == "ok    two  valid  keys that the format does not have: agent.timeout_secs"
    assert gyre("check", "--no-run", tmp_path / "none")[0] == 1
    status, lines = gyre("check", "--no-run", "--profile", "all", tmp_path / "one")
    assert status == 1 and "profile = 'all'; use one of 'default', 'root'" in lines[0]


def test_variables_are_given_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "of the host")
    text = '[environment]\ndocker_image = "a"\n[environment.env]\nT = "Bearer ${TOKEN}"\nM = "${MODE:-plain}"\n'
    folder = write(tmp_path, **{"task.toml": text})
    status, lines = gyre("check", "--no-run", folder)
    assert status == 1 and "environment.env.T = 'Bearer ${TOKEN}'" in lines[0] and "--set TOKEN=VALUE" in lines[0]
    assert gyre("check", "--no-run", folder, "--set", "TOKEN=x")[0] == 0
    assert Task.load(folder, variables={"TOKEN": "x"}).env == {"T": "Bearer x", "M": "plain"}


def test_list(tmp_path):
    write(tmp_path / "one")
    text = '[environment]\ndocker_image = "b"\n[metadata]\ntags = ["demo"]\ndifficulty = "easy"\n'
    write(tmp_path / "two", **{"task.toml": text})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("")
    status, lines = gyre("list", tmp_path)
    assert status == 1
    assert lines[0].startswith("broken: ") and "Dockerfile is missing" in lines[0]
    assert lines[1:] == [
        "one  gyre/base  network none  1 step",
        "two  b  network none  1 step  easy  demo",
        "2 of 2 tasks",
    ]
    assert gyre("list", tmp_path, "--tag", "demo")[1][1:] == [lines[2], "1 of 2 tasks"]
    assert gyre("list", tmp_path, "--name", "o*", "--match", "out")[1][1:] == [lines[1], "1 of 2 tasks"]


def test_keys_that_nobody_reads():
    values = {
        "agent": {"timeout_sec": 1, "max_turns": 15},
        "environment": {"test_timeout": 60, "env": {"ANY": "x"}, "healthcheck": {"comand": "x"}},
        "steps": [{"name": "a"}, {"name": "b", "verifier": {"timout_sec": 1}}],
        "metadata": {"gyre": {}, "free": 1},
        "stpes": [],
    }
    assert unknown_keys(values) == [
        "agent.max_turns",
        "environment.test_timeout",
        "environment.healthcheck.comand",
        "steps.verifier.timout_sec",
        "stpes",
    ]


@docker
def test_steps_share_a_workspace_and_stop_when_one_falls_short(base_image):
    step_tests = {"test.sh": f'cat out.txt; test "$(cat out.txt)" = "$WANT" && echo 1 >{REWARD} || echo 0 >{REWARD}'}
    task = Task(
        instruction="two lines",
        tests=step_tests,
        steps=(
            Step(
                name="one",
                instruction="a",
                verifier_env={"WANT": "a"},
                min_reward=1.0,
                solution={"solve.sh": "echo a >out.txt"},
            ),
            Step(
                name="two",
                instruction="b",
                files={"setup.sh": 'cp out.txt before.txt; rm -- "$0"', "b.txt": "ab"},
                healthcheck=Healthcheck(command="test -s before.txt", interval_s=0.1),
                verifier_env={"WANT": "ab"},
                solution={"solve.sh": "test ! -e setup.sh && cp b.txt out.txt"},
            ),
        ),
    )
    said = {finding.check: (finding.ok, finding.said) for finding in check_task(task)}
    assert said["solution"] == (True, "reward 1 (one 1, two 1)")
    assert said["no-op"][0] and "step 'one': reward 0 is below its min_reward 1" in said["no-op"][1]

    def only_the_first(workspace, step):
        workspace.write("out.txt", "a")
        return ""

    got, _ = rehearse(task, only_the_first)
    assert (got.reward, got.parts) == (0.5, {"one": 1.0, "two": 0.0})


@docker
def test_a_failing_setup_or_health_check_of_a_step_is_no_reward(base_image):
    def two(**second) -> Task:
        return Task(
            instruction="x",
            tests={"test.sh": f"echo 1 >{REWARD}"},
            steps=(Step(name="one", instruction="a"), Step(name="two", instruction="b", **second)),
        )

    with pytest.raises(WorkspaceError, match=r"step 'two': setup\.sh failed with exit code 4: no disk"):
        rehearse(two(files={"setup.sh": "echo no disk; exit 4"}), lambda workspace, step: "")
    check = Healthcheck(command="echo not yet; false", interval_s=0.05, retries=2)
    with pytest.raises(WorkspaceError, match=r"'echo not yet; false' gave exit code 1, 2 times in a row: not yet"):
        rehearse(two(healthcheck=check), lambda workspace, step: "")


@docker
def test_a_workspace_is_healthy_before_the_agent_gets_it(base_image, docker_client):
    before = set(owned(docker_client))
    slow = Healthcheck(
        command='echo >>tries; test "$(wc -l <tries)" -ge 4',
        interval_s=0.05,
        start_period_s=30,
        start_interval_s=0.05,
        retries=1,
    )
    workspace = open_workspace(Task(instruction="x", healthcheck=slow))
    try:
        assert workspace.read("tries") == b"\n" * 4
    finally:
        workspace.close()
    never = Healthcheck(command="sleep 9", interval_s=0.05, timeout_s=0.2, retries=2)
    with pytest.raises(WorkspaceError, match=r"'sleep 9' ran past 0\.2 s, 2 times in a row"):
        open_workspace(Task(instruction="x", healthcheck=never))
    assert set(owned(docker_client)) == before


def test_a_local_workspace_has_health_checks_and_no_services():
    services = (Service(name="db", image="gyre/base"),)
    with pytest.raises(WorkspaceError, match=r"has services \(db\), which need a Docker engine"):
        open_workspace(Task(instruction="x", services=services), kind="local")
    never = Healthcheck(command="echo no; exit 3", interval_s=0.05, retries=2)
    with pytest.raises(WorkspaceError, match=r"gave exit code 3, 2 times in a row: no"):
        open_workspace(Task(instruction="x", healthcheck=never), kind="local")


WEB = "while true; do echo -e 'HTTP/1.0 200 OK\\r\\n\\r\\nhello' | nc -l -p 8080; done"


@docker
def test_services_share_the_network_of_the_workspace_and_nothing_else(base_image, docker_client):
    before = set(owned(docker_client))
    web = Service(
        name="web",
        image="gyre/base",
        command=("sh", "-c", f"echo secret >/tmp/notes; {WEB}"),
        healthcheck=Healthcheck(command="netstat -ltn | grep -q :8080", interval_s=0.1, retries=50),
    )
    task = Task(instruction="x", services=(web, Service(name="idle", image="gyre/base", command=("sleep", "60"))))
    workspace = open_workspace(task)
    try:
        assert workspace.exec("wget -q -O - http://web:8080/").stdout == "hello\n"
        assert workspace.exec("cat /tmp/notes").exit_code != 0
        assert "8080" not in workspace.exec("ps").stdout
        assert "unreachable" in workspace.exec("wget -q -O - http://192.0.2.1/").stderr
        assert len(set(owned(docker_client)) - before) == 3
        hardened = [
            docker_client.api.inspect_container(found)["HostConfig"] for found in set(owned(docker_client)) - before
        ]
        assert all(found["CapDrop"] == ["ALL"] and not found["CapAdd"] and not found["Binds"] for found in hardened)
    finally:
        workspace.close()
    assert set(owned(docker_client)) == before


@docker
@pytest.mark.parametrize(
    ("service", "words"),
    [
        (Service(name="web", image="gyre/base", command=("sh", "-c", "echo no port; exit 3")), None),
        (
            Service(
                name="web",
                image="gyre/base",
                command=("sh", "-c", "echo no port; exit 3"),
                healthcheck=Healthcheck(command="false", interval_s=0.3, retries=20),
            ),
            "service 'web' ended: no port",
        ),
        (
            Service(
                name="web",
                image="gyre/base",
                command=("sleep", "60"),
                healthcheck=Healthcheck(command="echo refused; false", interval_s=0.05, retries=2),
            ),
            "service 'web' is not healthy: 'echo refused; false' gave exit code 1, 2 times in a row: refused",
        ),
        (Service(name="web", image="no.such/image"), "no.such/image"),
    ],
)
def test_services_that_do_not_run(base_image, docker_client, service, words):
    before = set(owned(docker_client))
    task = Task(instruction="x", services=(service,))
    if words is None:
        open_workspace(task).close()  # one without a health check may end: a job that prepares something does
    else:
        with pytest.raises(WorkspaceError, match=words):
            open_workspace(task)
    assert set(owned(docker_client)) == before


@docker
def test_services_end_with_the_lifetime_of_their_workspace_without_anybody(base_image, docker_client):
    before = set(owned(docker_client))
    idle = Service(name="idle", image="gyre/base", command=("sh", "-c", "trap '' TERM; while true; do sleep 1; done"))
    workspace = DockerWorkspace(Task(instruction="x", services=(idle,)), docker_client, ttl_s=2.0)
    assert len(set(owned(docker_client)) - before) == 2
    until = time.monotonic() + 60
    while set(owned(docker_client)) - before and time.monotonic() < until:
        time.sleep(0.2)
    left = set(owned(docker_client)) - before
    workspace.close()
    assert not left


@docker
def test_the_entry_point_of_a_folders_image_is_run_and_a_tasks_own_is_not(tmp_path, base_image):
    dockerfile = (
        "FROM gyre/base\nUSER root\nRUN printf '#!/bin/sh\\necho started >/tmp/started\\nexec \"$@\"\\n' >/entry; chmod +x /entry\n"
        'ENTRYPOINT ["/entry"]\n'
    )
    tests = f"test -s /tmp/started && grep -q done out.txt && echo 1 >{REWARD} || echo 0 >{REWARD}"
    write(
        tmp_path,
        **{
            "task.toml": "[metadata.gyre]\nworkdir = '/workspace'\n",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": tests,
        },
    )
    task = Task.load(tmp_path)
    assert {finding.check: finding.said.split(" the")[0] for finding in check_task(task)}["solution"] == "reward 1"
    plain = open_workspace(Task(instruction="x", dockerfile=tmp_path / "environment"))
    try:
        assert plain.exec("cat /tmp/started").exit_code != 0
    finally:
        plain.close()


@docker
def test_a_verifier_of_its_own_sees_the_artifacts_alone(tmp_path, base_image):
    tests = f"test -s /key && test ! -e other.txt && test ! -e /tmp/left && {SOLVED}"
    write(
        tmp_path,
        **{
            "task.toml": 'artifacts = ["out.txt"]\n[environment]\ndocker_image = "gyre/base"\nworkdir = "/workspace"\n',
            "tests/Dockerfile": "FROM gyre/base\nUSER root\nRUN echo key >/key\n",
            "tests/test.sh": tests,
            "solution/solve.sh": "test ! -e /key && echo done | tee out.txt >other.txt; echo done >/tmp/left",
        },
    )
    found = {finding.check: (finding.ok, finding.said.partition(";")[0]) for finding in check_task(Task.load(tmp_path))}
    assert list(found) == ["image", "verifier image", "solution", "no-op"]
    assert (found["solution"], found["no-op"]) == ((True, "reward 1"), (True, "reward 0"))


@docker
def test_a_pool_recycles_no_workspace_with_services_or_a_health_check(base_image):
    with WorkspacePool(recycle=True) as pool:
        for task in (
            Task(instruction="x", services=(Service(name="idle", image="gyre/base", command=("sleep", "60")),)),
            Task(instruction="x", healthcheck=Healthcheck(command="true")),
        ):
            pool.take(task).close()
            pool.take(task).close()
        assert (pool.started, pool.recycled) == (4, 0)
