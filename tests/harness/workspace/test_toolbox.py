"""Images with hardly anything in them: commands run there all the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gyre_sdk.errors import CommandFailed, WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, toolbox

pytestmark = pytest.mark.docker


PROGRAMS = ("sh", "cat", "sleep", "mv", "setsid")


def context(folder, *lines):
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def few_tools(base_image, tmp_path_factory):
    """An image with this machine's shell and four programs, and nothing else."""
    folder = tmp_path_factory.mktemp("few")
    for name in PROGRAMS:
        program = Path(shutil.which(name)).resolve()
        needed = re.findall(
            r"(/\S+) \(0x", subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        )
        for source, target in (
            (program, Path("bin", name)),
            *((Path(library), Path(library.lstrip("/"))) for library in needed),
        ):
            (folder / "root" / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / "root" / target)
    return context(folder, "FROM scratch", "COPY root /", "ENV PATH=/usr/bin:/bin", "WORKDIR /workspace")


@pytest.fixture(scope="module")
def no_shell(base_image, tmp_path_factory):
    """An image of one program that is no shell."""
    lines = (
        "FROM scratch",
        "COPY --from=gyre/base /bin/busybox /bin/env",
        "ENV PATH=/usr/bin:/bin",
        "WORKDIR /workspace",
    )
    return context(tmp_path_factory.mktemp("none"), *lines)


def everything(workspace):
    """What has to work in any image."""
    ran = workspace.exec("echo out; echo err >&2; exit 3")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "out\n", "err\n")
    held = workspace.exec("while :; do :; done & echo up", timeout=20)
    assert (held.exit_code, held.stdout, held.timed_out) == (0, "up\n", False)
    workspace.kill_all()
    stuck = workspace.exec("( ( while :; do :; done ) & ); echo before; while :; do :; done", timeout=1)
    assert (stuck.exit_code, stuck.stdout, stuck.timed_out) == (137, "before\n", True)
    workspace.write("folder/a.bin", bytes(range(256)))
    assert workspace.read("folder/a.bin") == bytes(range(256))
    assert [info.name for info in workspace.ls("folder")] == ["a.bin"]
    big = workspace.exec(
        "x=xxxxxxxxxxxxxxxx; x=$x$x$x$x; x=$x$x$x$x; i=0; while [ $i -lt 20000 ]; do echo $x; i=$((i+1)); done"
    )
    assert (big.truncated, big.stdout_total) == (True, 20_000 * 257)
    with workspace.shell() as shell:
        shell.run("kept=1")
        assert shell.run("echo $kept").stdout == "1\n"
    with workspace.start("read x; echo got $x") as process:
        process.write("it\n")
        assert process.wait(20) == 0
        assert process.read(5) == "got it\n"


def test_an_image_with_a_shell_and_no_tools(docker_client, few_tools):
    with DockerWorkspace(Task(instruction="x", dockerfile=few_tools, user="1000:1000"), docker_client) as workspace:
        everything(workspace)
        assert workspace.exec("echo $PATH").stdout == "/usr/bin:/bin\n", "its own programs alone"


def test_an_image_without_a_shell(docker_client, no_shell):
    with DockerWorkspace(Task(instruction="x", dockerfile=no_shell, user="1000:1000"), docker_client) as workspace:
        everything(workspace)
        assert (
            workspace.exec("echo $PATH; /bin/env | grep ^PATH").stdout
            == "/usr/bin:/bin:/.gyre/bin\nPATH=/usr/bin:/bin:/.gyre/bin\n"
        )
        assert workspace.exec("echo x >/.gyre/bin/sh").exit_code != 0


@pytest.fixture
def no_busybox_here(monkeypatch):
    monkeypatch.setattr(toolbox, "_unfit", set())
    monkeypatch.setattr(toolbox.shutil, "which", lambda *_, **__: None)


def test_plain_execs_where_no_busybox_can_be_lent(docker_client, few_tools, tmp_path, no_busybox_here):
    task = Task(instruction="x", dockerfile=few_tools, user="1000:1000")
    with DockerWorkspace(task, docker_client) as workspace:
        assert workspace.plain is not None
        everything(workspace)
        assert workspace.exec("cat; exit 4", input="typed").stdout == "typed"
        with pytest.raises(WorkspaceError, match="no/such"):
            workspace.exec("pwd", cwd="no/such")
        with pytest.raises(CommandFailed):
            workspace.exec("false", check=True)
        ran = workspace.exec(
            "(setsid sleep 31451 &); (setsid sh -c 'sleep 31452 & sleep 31453' &) ; sleep 31454",
            timeout=1,
        )
        assert (ran.timed_out, ran.exit_code) == (True, 137)
        look = "for p in /proc/[0-9]*; do read -r c <$p/cmdline; case $c in sleep3145*) echo $c;; esac; done"
        assert workspace.exec(look).stdout == ""
        assert workspace.exec("kill -9 -1", timeout=20).exit_code == 137
        assert workspace.exec("echo alive").stdout == "alive\n"
        with pytest.raises(WorkspaceError, match="in memory"):
            workspace.write("/logs/x", "x")
        workspace.download("folder", str(tmp_path / "down"))
        assert (tmp_path / "down" / "a.bin").stat().st_size == 256


def test_what_has_no_shell_is_refused_by_name_where_no_busybox_can_be_lent(docker_client, no_shell, no_busybox_here):
    with pytest.raises(WorkspaceError, match=r"sleep.*busybox is not installed"):
        DockerWorkspace(Task(instruction="x", dockerfile=no_shell, user="1000:1000"), docker_client)
