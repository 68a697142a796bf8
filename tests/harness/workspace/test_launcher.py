"""The compiled launcher: how it comes into a workspace, and from when on it is used."""

from __future__ import annotations

import fcntl
import subprocess
import termios

import pytest

from gyre_sdk.harness.workspace.script import source
from gyre_sdk.harness.workspace.supervisor import arguments

_LAUNCHED_BY = "tr '\\0' ' ' </proc/$PPID/cmdline"


@pytest.mark.parametrize("shell", ["sh", "bash", "busybox sh"])
def test_every_byte_arrives_through_any_shell(shell: str) -> None:
    data = bytes(range(256)) + b"\0" * 9 + b"012%d%%\\n'\n\x7fELF\0" + bytes(range(255, -1, -1))
    code = b"\n".join(source("n", data).split(b"\n")[:2]) + b'\nprintf "$B"\n'
    ran = subprocess.run([*shell.split(), "-s"], input=code, capture_output=True, timeout=20, check=True)
    assert (ran.stdout, ran.stderr) == (data, b"")


def test_a_shell_has_read_all_of_its_code_before_it_asks_for_requests(tmp_path) -> None:
    """It reads by blocks: were some of the code in a further one, the first request would be taken for code, too."""
    for length in range(0, 1024, 256):
        code = b"#" * length + b"\n" + source("n", None)
        shell, folder = ("busybox", "sh"), f"{tmp_path}/{length}"
        argv = arguments(folder, half_cap=1, how="marked", keep="first", workspace="x", shell=shell)
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(code)
            process.stdin.flush()
            assert b" ready " in process.stderr.readline()
            left = fcntl.ioctl(process.stdin, termios.FIONREAD, b"\0" * 4)
            assert left == b"\0" * 4, length
            process.stdin.close()


@pytest.mark.docker
def test_the_first_command_is_launched_by_it_and_those_after_a_clean_sweep(docker_workspace) -> None:
    assert "/launcher x" in docker_workspace.exec(_LAUNCHED_BY).stdout
    docker_workspace.exec("for f in /run/gyre/*/launcher; do rm $f && ln -s /dev/null $f; done", check=True)
    docker_workspace.kill_all()
    assert "/launcher x" in docker_workspace.exec(_LAUNCHED_BY).stdout
