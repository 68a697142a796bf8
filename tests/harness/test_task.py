"""Tasks: Harbor folders as people have them, and wrong ones that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task import Artifact, Healthcheck, Step, Task

DATA = Path(__file__).parents[3] / "shared" / "data" / "harbor-tasks"
LOADS = {
    "autoagent-count-files",
    "autoagent-hello-world",
    "autoagent-simple-script",
    "cookbook-dns-blacklisting",
    "cookbook-multi-reward",
    "cookbook-simple-task",
    "cookbook-skills",
    "inspect-simple-task",
}
REFUSED = {
    "cookbook-multi-container": "compose",
    "cookbook-multi-step": "multi-step",
    "cookbook-simulated-user": "compose",
    "dialect-inspect-coco-fix-syntax-errors": "Dockerfile is missing",
    "harbor-template-separate-verifier": "verifier image",
}


def make(folder: Path, toml: str = "", **files: str) -> Path:
    """Write a small good task; `files` replace (or, when empty, leave out) its files."""
    good = {
        "task.toml": toml or '[environment]\ndocker_image = "gyre/base"\n',
        "instruction.md": "Do it.\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }
    for name, content in {**good, **files}.items():
        if content:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    return folder


def shared_tasks() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is missing: the shared data are not part of the repository")
    return DATA


def test_every_real_folder_loads_or_says_why_not():
    folders = {path.name for path in shared_tasks().iterdir() if path.is_dir()}
    assert folders == LOADS | set(REFUSED)


@pytest.mark.parametrize("name", sorted(LOADS))
def test_real_folders_load(name):
    task = Task.load(shared_tasks() / name)
    assert task.instruction.strip()
    assert "test.sh" in task.test_files()
    assert (task.image is None) != (task.dockerfile is None)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_real_folders_that_are_not_supported(name):
    with pytest.raises(TaskError, match=REFUSED[name]):
        Task.load(shared_tasks() / name)


def test_values_of_a_real_folder():
    task = Task.load(shared_tasks() / "autoagent-hello-world")
    assert (task.name, task.agent_timeout_s, task.verifier_timeout_s) == ("hello-world", 120.0, 30.0)
    assert (task.cpus, task.memory_mb, task.user, task.workdir) == (1.0, 512, None, None)
    assert task.dockerfile == shared_tasks() / "autoagent-hello-world" / "environment"
    image = Task.load(shared_tasks() / "inspect-simple-task")
    assert (image.image, image.name) == ("python:3.11-slim", "harbor-test/simple-task")


def test_own_extension(tmp_path):
    folder = make(
        tmp_path,
        toml='[environment]\ndocker_image = "gyre/base"\n[environment.env]\nA = "1"\n[verifier.env]\nB = "2"\n'
        '[agent]\nuser = 1000\n[metadata]\nkind = "sort"\n[metadata.gyre]\nfiles = "environment/files"\ndisk_mb = 16\npids = 32\n',
        **{"environment/files/sub/a.txt": "a"},
    )
    task = Task.load(folder)
    assert task.start_files() == {"sub/a.txt": b"a"}
    assert (task.user, task.disk_mb, task.pids, task.env, task.verifier_env) == ("1000", 16, 32, {"A": "1"}, {"B": "2"})
    assert task.metadata["kind"] == "sort"


@pytest.mark.parametrize(
    ("toml", "files", "words"),
    [
        ("[environment\n", {}, ["task.toml", "line 1"]),
        ("", {"instruction.md": ""}, ["instruction.md", "missing"]),
        ("", {"instruction.md": " \n"}, ["instruction.md", "empty"]),
        ("", {"tests/test.sh": ""}, ["test.sh", "missing"]),
        ("x = 1\n", {}, ["environment/Dockerfile", "docker_image"]),
        ("[environment]\ndocker_image = 3\n", {}, ["environment.docker_image", "3", "string"]),
        ('[environment]\ndocker_image = ""\n', {}, ["environment.docker_image", "name of an image"]),
        ('[agent]\ntimeout_sec = "soon"\n', {}, ["agent.timeout_sec", "soon", "number"]),
        ("[agent]\ntimeout_sec = -1\n", {}, ["agent.timeout_sec", "-1"]),
        ("[agent]\ntimeout_sec = true\n", {}, ["agent.timeout_sec", "True"]),
        ("[agent]\ntimeout_sec = nan\n", {}, ["agent.timeout_sec", "nan"]),
        ("agent = 1\n", {}, ["agent", "table"]),
        ('[environment]\ndocker_image = "a"\nmemory_mb = "2g"\n', {}, ["environment.memory_mb", "2g"]),
        ("[environment]\ndocker_image = 'a'\nenv = { A = 1 }\n", {}, ["environment.env.A", "string"]),
        ('[verifier.env]\nKEY = "${HOST_KEY}"\n', {}, ["verifier.env.KEY", "HOST_KEY"]),
        ('[metadata.gyre]\nfiles = "nowhere"\n', {}, ["metadata.gyre.files", "nowhere"]),
        ('[metadata.gyre]\nfiles = "../.."\n', {}, ["metadata.gyre.files"]),
        ("[metadata.gyre]\nfile = 1\n", {}, ["metadata.gyre.file", "files"]),
        ("[[steps]]\nname = 'a'\n", {}, ["multi-step"]),
        ("", {"environment/docker-compose.yaml": "services: {}\n"}, ["compose"]),
        ('[verifier]\nenvironment_mode = "separate"\n', {}, ["environment_mode", "separate"]),
        ('[environment]\nnetwork_mode = "allowlist"\n', {}, ["allowlist", "no-network"]),
        ("[environment]\ngpus = 2\n", {}, ["gpus", "2"]),
        ('[environment]\nos = "windows"\n', {}, ["windows"]),
        ("[environment.healthcheck]\ncommand = 'true'\n", {}, ["healthcheck"]),
    ],
)
def test_wrong_folders_name_the_place_the_value_and_the_next_step(tmp_path, toml, files, words):
    if toml and "docker_image" not in toml and toml != "x = 1\n" and "[environment" not in toml:
        toml = f'{toml}\n[environment]\ndocker_image = "gyre/base"\n' if not toml.startswith("agent") else toml
    folder = make(tmp_path, toml=toml, **files)
    with pytest.raises(TaskError) as caught:
        Task.load(folder)
    for word in [*words, str(folder)]:
        assert word in str(caught.value), str(caught.value)


def test_missing_folder_and_file(tmp_path):
    with pytest.raises(TaskError, match="no-such-task is not a folder; give"):
        Task.load(tmp_path / "no-such-task")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskError, match=r"task\.toml is missing"):
        Task.load(tmp_path / "empty")
    make(tmp_path / "bytes")
    (tmp_path / "bytes" / "task.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(TaskError, match="UTF-8"):
        Task.load(tmp_path / "bytes")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"instruction": " "}, "instruction"),
        ({"image": "a", "dockerfile": Path("b")}, "not both"),
        ({"tests": {"test.sh": ""}, "scorer": lambda workspace: 1.0}, "not both"),
        ({"workdir": "relative"}, "absolute"),
        ({"memory_mb": 0}, "memory_mb"),
        ({"cpus": float("nan")}, "cpus"),
        ({"agent_timeout_s": -1}, "agent_timeout_s"),
        ({"network": "wide open"}, "network.*'proxy-only'"),
        ({"network": "allowlist"}, "allowed_hosts.*name the hosts"),
        ({"allowed_hosts": ("a.org",)}, "allowed_hosts.*allowlist"),
        ({"network": "allowlist", "allowed_hosts": ("https://a.org",)}, "https://a.org.*no URL"),
        ({"verifier_network": "allowlist"}, "verifier_allowed_hosts"),
        ({"verifier_mode": "apart"}, "verifier_mode.*'shared'"),
        ({"verifier_image": "a", "verifier_dockerfile": Path("b")}, "not both"),
        ({"verifier_image": "a", "verifier_mode": "shared"}, "separate"),
        ({"profile": "privileged"}, "profile.*'root'"),
        ({"runtime": "kata"}, "runtime.*'runsc'"),
        ({"artifacts": ("/app",)}, r"artifacts.*Artifact\(path\)"),
        ({"protected": ("",)}, "protected"),
        ({"steps": (Step(name="a", instruction="x"), Step(name="a", instruction="y"))}, "own name"),
        ({"name": "a\nb"}, "name"),
    ],
)
def test_wrong_tasks_built_in_code(values, word):
    with pytest.raises(TaskError, match=word):
        Task(**{"instruction": "x", **values})


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda: Healthcheck(command=" "), "command"),
        (lambda: Healthcheck(command="true", interval_s=0), "interval_s"),
        (lambda: Healthcheck(command="true", start_period_s=-1), "start_period_s"),
        (lambda: Healthcheck(command="true", retries=0), "retries"),
        (lambda: Artifact("../x"), r"without '\.\.'"),
        (lambda: Artifact("x", "/abs"), "destination"),
        (lambda: Step(name="a/b", instruction="x"), "name"),
        (lambda: Step(name="a", instruction=""), "instruction"),
        (lambda: Step(name="a", instruction="x", agent_timeout_s=0), "agent_timeout_s"),
        (lambda: Step(name="a", instruction="x", min_reward=float("nan")), "min_reward"),
    ],
)
def test_wrong_parts_of_tasks(build, word):
    with pytest.raises(TaskError, match=word):
        build()


def test_hosts_of_an_allow_list_are_normalized():
    hosts = ("PyPI.org.", "*.Example.com", "192.0.2.1", "192.0.2.0/24", "2001:DB8::1")
    task = Task(instruction="x", network="allowlist", allowed_hosts=hosts)
    assert task.allowed_hosts == ("pypi.org", "*.example.com", "192.0.2.1", "192.0.2.0/24", "2001:db8::1")


@pytest.mark.parametrize(
    "host", ["", "http://a", "a:80", "a/b", "*", "a.*", "*.1.2.3.4", "192.0.2.1/24", "a b", "-a.org"]
)
def test_hosts_that_are_none(host):
    with pytest.raises(TaskError, match="allowed host"):
        Task(instruction="x", network="allowlist", allowed_hosts=(host,))


def test_a_step_is_a_task_of_its_own():
    first = Step(name="one", instruction="first", tests={"test.sh": "1"}, solution={"solve.sh": "s"})
    second = Step(
        name="two",
        instruction="second",
        files={"in.txt": "2"},
        tests={"more.sh": "2"},
        agent_timeout_s=5,
        verifier_env={"B": "2"},
        artifacts=(Artifact("out"),),
    )
    task = Task(
        instruction="both",
        steps=(first, second),
        files={"a.txt": "a"},
        tests={"test.sh": "0", "lib.sh": "lib"},
        verifier_env={"A": "1", "B": "1"},
        agent_timeout_s=60,
    )
    one, two = task.at_step(0), task.at_step(1)
    assert (one.instruction, two.instruction) == ("first", "second")
    assert one.start_files() == {"a.txt": b"a"} and two.start_files() == {"in.txt": b"2"}
    assert one.test_files() == {"test.sh": b"1", "lib.sh": b"lib"}
    assert two.test_files() == {"test.sh": b"0", "lib.sh": b"lib", "more.sh": b"2"}
    assert (one.agent_timeout_s, two.agent_timeout_s) == (60, 5)
    assert (two.verifier_env, two.artifacts) == ({"A": "1", "B": "2"}, (Artifact("out"),))
    assert one.solution_files() == {"solve.sh": b"s"} and one.steps == ()
    with pytest.raises(TaskError, match="no step 2; it has 2"):
        task.at_step(2)
