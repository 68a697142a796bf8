"""The compiled launcher: how it comes into a workspace, and from when on it is used."""

from __future__ import annotations

import subprocess

import pytest

from gyre_sdk.harness.workspace.script import source

_LAUNCHED_BY = "tr '\\0' ' ' </proc/$PPID/cmdline"


@pytest.mark.parametrize("shell", ["sh", "bash", "busybox sh"])
def test_every_byte_arrives_through_any_shell(shell: str) -> None:
    data = bytes(range(256)) + b"\0" * 9 + b"012%d%%\\n'\n\x7fELF\0" + bytes(range(255, -1, -1))
    code = b"\n".join(source("n", data).split(b"\n")[:2]) + b'\nprintf "$B"\n'
    ran = subprocess.run([*shell.split(), "-s"], input=code, capture_output=True, timeout=20, check=True)
    assert (ran.stdout, ran.stderr) == (data, b"")


@pytest.mark.docker
def test_the_first_command_is_launched_by_it_and_those_after_a_clean_sweep(docker_workspace) -> None:
    assert "/launcher x" in docker_workspace.exec(_LAUNCHED_BY).stdout
    docker_workspace.exec("for f in /run/gyre/*/launcher; do rm $f && ln -s /dev/null $f; done", check=True)
    docker_workspace.kill_all()
    assert "/launcher x" in docker_workspace.exec(_LAUNCHED_BY).stdout
