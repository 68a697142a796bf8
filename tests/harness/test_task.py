"""Tasks: Harbor folders as people have them, and wrong ones that say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task import Artifact, Healthcheck, Step, Task, contents

DATA = Path(__file__).parents[3] / "shared" / "data" / "harbor-tasks"
LOADS = {
    "autoagent-count-files",
    "autoagent-hello-world",
    "autoagent-simple-script",
    "cookbook-dns-blacklisting",
    "cookbook-multi-container",
    "cookbook-multi-reward",
    "cookbook-multi-step",
    "cookbook-simple-task",
    "cookbook-skills",
    "inspect-simple-task",
}
REFUSED = {
    "cookbook-simulated-user": r"ANTHROPIC_API_KEY.*variables of the host are not passed.*--set ANTHROPIC_API_KEY=VALUE",
    "dialect-inspect-coco-fix-syntax-errors": "Dockerfile is missing",
    "harbor-template-separate-verifier": r"instruction\.md is empty",
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
    assert "test.sh" in (task.at_step(0) if task.steps else task).test_files()
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
        ("[[steps]]\nname = 'a'\n", {}, ["steps[0].name", "'a'", "folder in"]),
        ("", {"steps/a/instruction.md": "x"}, ["[[steps]]"]),
        ("[[steps]]\nname = 'a'\n", {"steps/a/tests/x": "x"}, ["steps/a/instruction.md", "missing"]),
        (
            "[[steps]]\nname = 'a'\nmin_reward = 'all'\n",
            {"steps/a/instruction.md": "x"},
            ["steps[0].min_reward", "'all'", "number"],
        ),
        (
            "[[steps]]\nname = 'a'\n",
            {"steps/a/instruction.md": "x", "tests/test.sh": ""},
            ["steps/a/tests/test.sh", "missing"],
        ),
        (
            "[[steps]]\nname = 'a'\n[steps.verifier]\nenvironment_mode = 'separate'\n",
            {"steps/a/instruction.md": "x"},
            ["steps[0].verifier.environment_mode", "not supported", "shares"],
        ),
        (
            "[[steps]]\nname = 'a'\n",
            {"steps/a/instruction.md": "x", "steps/a/tests/Dockerfile": "x"},
            ["verifier image"],
        ),
        ("multi_step_reward_strategy = 'best'\n", {}, ["multi_step_reward_strategy", "best", "mean, final"]),
        ('[verifier]\nenvironment_mode = "apart"\n', {}, ["verifier.environment_mode", "apart", "shared, separate"]),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ndocker_image = "b"\n',
            {},
            ["verifier.environment_mode", "separate"],
        ),
        ("[verifier.environment]\ncpus = 2\n", {}, ["verifier.environment.cpus", "docker_image"]),
        ("[[verifier.collect]]\ncommand = 'x'\n", {}, ["verifier.collect", "not supported"]),
        ('[environment]\nnetwork_mode = "open"\n', {}, ["network_mode", "public, no-network, allowlist"]),
        ('[environment]\nnetwork_mode = "allowlist"\n', {}, ["environment.allowed_hosts", "host names"]),
        ('[agent]\nallowed_hosts = ["a.org"]\n', {}, ["agent.allowed_hosts", "allowlist"]),
        (
            '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["http://a.org"]\n',
            {},
            ["allowed_hosts", "http://a.org", "no URL"],
        ),
        ("[environment]\ngpus = 2\n", {}, ["environment.gpus", "2", "accelerators"]),
        ("[environment]\ntpu = { type = 'v6e', topology = '2x2' }\n", {}, ["environment.tpu", "accelerators"]),
        ('[environment]\nos = "windows"\n', {}, ["environment.os", "windows"]),
        ('[environment]\nmemory = "much"\n', {}, ["environment.memory", "much", "512M"]),
        ("[environment.healthcheck]\ninterval_sec = 1\n", {}, ["environment.healthcheck.command"]),
        ("[environment.healthcheck]\ncommand = 'true'\nretry = 1\n", {}, ["healthcheck.retry", "retries"]),
        ("[[environment.mcp_servers]]\nname = 'a'\n", {}, ["mcp_servers[0].url", "address"]),
        ("[[environment.mcp_servers]]\nname = 'a'\ntransport = 'stdio'\n", {}, ["mcp_servers[0].command"]),
        ("artifacts = 'x'\n", {}, ["artifacts", "array"]),
        ("artifacts = ['../x']\n", {}, ["artifact source", "../x"]),
        ("artifacts = [{ source = '/db', service = 'postgres' }]\n", {}, ["artifacts[0].service", "postgres"]),
        ("[metadata.gyre]\nprofile = 'all'\n", {}, ["profile", "all", "root"]),
        ("[metadata.gyre]\nread_only = 1\n", {}, ["metadata.gyre.read_only", "true or false"]),
    ],
)
def test_wrong_folders_name_the_place_the_value_and_the_next_step(tmp_path, toml, files, words):
    if toml not in ("", "x = 1\n", "[environment\n") and "docker_image = " not in toml.partition("[verifier")[0]:
        files = {"environment/Dockerfile": "FROM scratch", **files}
    folder = make(tmp_path, toml=toml, **files)
    with pytest.raises(TaskError) as caught:
        Task.load(folder)
    for word in [*words, str(folder)]:
        assert word in str(caught.value), str(caught.value)


def test_all_that_a_folder_can_say(tmp_path):
    folder = make(
        tmp_path,
        toml="""
multi_step_reward_strategy = "final"
artifacts = ["/app/out", { source = "logs", destination = "l", exclude = ["*.tmp"] }]
[task]
name = "org/all"
keywords = ["sort", "demo"]
[metadata]
tags = ["demo", "files"]
difficulty = "easy"
[metadata.gyre]
profile = "root"
runtime = "runsc"
read_only = true
protected = ["/etc/passwd"]
[environment]
docker_image = "gyre/base"
memory = "1.5G"
network_mode = "no-network"
skills_dir = "/skills"
healthcheck = { command = "test -e /ready", interval_sec = 0.5, start_period_sec = 2, retries = 5 }
[[environment.mcp_servers]]
name = "files"
transport = "stdio"
command = "serve"
args = ["-v"]
[[environment.mcp_servers]]
name = "web"
transport = "http"
url = "http://127.0.0.1:9/mcp"
[agent]
network_mode = "allowlist"
allowed_hosts = ["PyPI.org"]
[verifier]
user = "root"
network_mode = "public"
environment = { docker_image = "gyre/verifier" }
[solution.env]
S = "1"
""",
        **{"solution/solve.sh": "true\n", "instruction.md": "<!-- Canary GUID 1 -->\n\n# Do\nit.\n"},
    )
    task = Task.load(folder)
    assert task.instruction == "# Do\nit.\n"
    assert task.healthcheck == Healthcheck(command="test -e /ready", interval_s=0.5, start_period_s=2.0, retries=5)
    assert task.artifacts == (Artifact("/app/out"), Artifact("logs", "l", ("*.tmp",)))
    assert (task.network, task.allowed_hosts) == ("allowlist", ("pypi.org",))
    assert (task.verifier_network, task.verifier_allowed_hosts) == ("full", ())
    assert (task.verifier_image, task.verifier_user, task.verifier_mode) == ("gyre/verifier", "root", "separate")
    assert (task.profile, task.runtime, task.read_only, task.protected) == ("root", "runsc", True, ("/etc/passwd",))
    assert (task.memory_mb, task.skills, task.step_reward) == (1536, "/skills", "final")
    assert [server["transport"] for server in task.mcp_servers] == ["stdio", "streamable-http"]
    assert task.tags == ("demo", "files", "sort")
    assert (task.solution_files(), task.solution_env) == ({"solve.sh": b"true\n"}, {"S": "1"})


@pytest.mark.parametrize(
    ("said", "network", "verifier"),
    [
        ("", "none", "none"),
        ("[environment]\nnetwork_mode = 'public'", "full", "full"),
        ("[environment]\nallow_internet = true", "full", "full"),
        ("[environment]\nallow_internet = false", "none", "none"),
        ("[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'no-network'", "none", "full"),
        ("[verifier]\nnetwork_mode = 'public'", "none", "full"),
        ("[metadata.gyre]\nnetwork = 'proxy-only'\nverifier_network = 'full'", "proxy-only", "full"),
    ],
)
def test_networks_per_phase(tmp_path, said, network, verifier):
    folder = make(tmp_path, toml=f"{said}\n", **{"environment/Dockerfile": "FROM scratch"})
    task = Task.load(folder)
    assert (task.network, task.verifier_network) == (network, verifier)


def test_a_verifier_of_its_own(tmp_path):
    folder = make(tmp_path, **{"tests/Dockerfile": "FROM scratch"})
    assert Task.load(folder).verifier_dockerfile == folder / "tests"
    make(tmp_path, toml='[environment]\ndocker_image = "a"\n[verifier]\nenvironment_mode = "shared"\n')
    task = Task.load(folder)
    assert (task.verifier_mode, task.verifier_dockerfile) == ("shared", None)


def test_values_of_a_real_folder_of_several_steps():
    task = Task.load(shared_tasks() / "cookbook-multi-step")
    assert [(step.name, step.min_reward) for step in task.steps] == [
        ("scaffold", 1.0),
        ("implement", 0.5),
        ("document", None),
    ]
    assert task.instruction.startswith("Comprehensive multi-step task")
    assert (task.workdir, task.env, task.network) == ("/app", {"GREETER_PROJECT": "hello-multi-step-full"}, "full")
    assert task.tags == ("multi-step", "demo", "bells-and-whistles", "comprehensive")
    step = task.at_step(1)
    assert sorted(contents(task.steps[1].files)) == ["config.txt", "setup.sh"]
    assert sorted(step.test_files()) == ["expected.txt", "helpers.sh", "test.sh"]
    assert step.verifier_env == {"EXPECTED_NAME": "Harbor", "EXPECTED_GREETING": "Hello, Harbor!"}
    assert task.steps[1].healthcheck == Healthcheck(command="test -x /app/greet.sh", interval_s=1, timeout_s=5)
    assert "canary" not in step.instruction.lower() and list(step.solution_files()) == ["solve.sh"]


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
    assert one.start_files() == {} and two.start_files() == {}
    assert one.test_files() == {"test.sh": b"1", "lib.sh": b"lib"}
    assert two.test_files() == {"test.sh": b"0", "lib.sh": b"lib", "more.sh": b"2"}
    assert (one.agent_timeout_s, two.agent_timeout_s) == (60, 5)
    assert (two.verifier_env, two.artifacts) == ({"A": "1", "B": "2"}, (Artifact("out"),))
    assert one.solution_files() == {"solve.sh": b"s"} and one.steps == ()
    with pytest.raises(TaskError, match="no step 2; it has 2"):
        task.at_step(2)
