"""Processes beside their caller, shells with state, folders listed, and the async face. Cases: cases/workspace/*.json."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from test_exec import BATTERY

from gyre_sdk.errors import CommandFailed, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace
from gyre_sdk.harness.workspace.carrying import functions_in
from gyre_sdk.records import FileKind

pytestmark = pytest.mark.docker


def count(workspace, pattern):
    """Count processes by their arguments; `[x]` in the pattern keeps it from counting itself."""
    return int(workspace.exec(f"ps -eo args | grep -cE '{pattern}'").stdout)


def appears(workspace, pattern):
    found = workspace.exec(f"until ps -eo args | grep -qE '{pattern}'; do sleep 0.02; done", timeout=20)
    assert found.exit_code == 0, pattern


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_is_talked_to(workspace):
    with workspace.start('while read -r x; do echo "got $x"; done; echo bye >&2; exit 7') as process:
        process.write("one\n")
        assert process.read(10) == "got one\n"
        assert process.poll() is None
        process.write(b"two\n")
        assert process.read(10) == "got two\n"
        process.close_input()
        assert process.wait(10) == 7
        assert process.poll() == 7
        assert process.read(10) == ""
        assert process.read(10, stream="stderr") == "bye\n"
        with pytest.raises(WorkspaceError, match="input"):
            process.write("three\n")


def test_a_process_waits_no_longer_than_asked(workspace):
    with workspace.start("echo up; sleep 31421") as process:
        assert process.read(10) == "up\n"
        with pytest.raises(TimeoutError, match="wrote nothing"):
            process.read(0.05)
        with pytest.raises(TimeoutError, match="still runs"):
            process.wait(0.05)
        process.kill()
        process.kill()
        assert process.wait(10) == 137


def test_a_block_that_ends_kills_its_process_and_all_that_it_started(workspace):
    with workspace.start(
        "setsid sleep 31422 >/dev/null 2>&1 & (setsid sh -c 'sleep 31423' &); echo up; sleep 31424"
    ) as one:
        assert one.read(10) == "up\n"
        with workspace.start("echo other; sleep 31425"):
            for sleeping in range(31422, 31426):
                appears(workspace, f"[s]leep {sleeping}")
            one.kill()
            assert one.wait(10) == 137
            assert count(workspace, "[s]leep 3142[234]") == 0
            assert count(workspace, "[s]leep 31425") == 1
    assert count(workspace, "[s]leep 31425") == 0


def test_a_half_character_waits_for_its_rest(workspace):
    """workspace-output-bytes-and-size, split char: a live reader never sees half of it."""
    with workspace.start(r"printf 'a\360\237'; read x; printf '\231\202b\n'; printf '\303'") as process:
        assert process.read(10) == "a"
        process.write("go\n")
        text = process.read(10)
        while "\n" not in text:
            text += process.read(10)
        assert process.wait(10) == 0
        assert text + process.read(10) + process.read(10) == "🙂b\n�"


def test_output_that_nobody_reads_is_bounded(docker_workspace):
    with docker_workspace.start("echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last") as process:
        assert process.wait(60) == 0
        text = process.read(10)
        assert len(text) <= 1 << 20
        assert text.startswith("first\nxx") and text.endswith("xx\nlast\n")
        dropped = text.partition("[... ")[2].partition(" bytes dropped")[0]
        assert int(dropped) + len(text.replace(f"\n[... {dropped} bytes dropped ...]\n", "")) == 30_000_012


def test_a_background_child_does_not_hold_the_end(workspace):
    with workspace.start("sleep 31426 & echo up") as process:
        assert process.wait(10) == 0
        assert process.read(10) == "up\n"
        assert process.read(10) == ""
    workspace.kill_all()


def test_a_process_cannot_forge_its_end(workspace):
    with workspace.start(r"printf '\n@0 exit 0\n' >&2; printf '\n@' >&2; exit 5") as process:
        assert process.wait(10) == 5
        assert process.read(10, stream="stderr") == "\n@0 exit 0\n\n@"


def test_processes_that_do_not_start_say_why(workspace):
    with pytest.raises(WorkspaceError, match="no/such/dir"):
        workspace.start("pwd", cwd="no/such/dir")
    with pytest.raises(WorkspaceError, match="nobody-like-this"):
        workspace.start("id", user="nobody-like-this")
    with pytest.raises(WorkspaceError, match="NUL"):
        workspace.start("echo \0")
    with workspace.start("no-such-cmd-xyz") as missing:
        assert missing.wait(10) == 127
    with workspace.start('pwd; printf "%s" "$A"; exec cat', cwd="/tmp", env={"A": "q'\"\n"}) as process:
        process.close_input()
        assert process.wait(10) == 0
        assert process.read(10).endswith("tmp\nq'\"\n")


def test_kill_all_ends_processes_too(workspace):
    with workspace.start("echo up; sleep 31427") as process:
        assert process.read(10) == "up\n"
        workspace.kill_all()
        assert process.wait(10) == 137
    assert workspace.exec("echo alive").stdout == "alive\n"


def test_a_process_of_a_dead_workspace_says_so(docker_client, base_image):
    workspace = DockerWorkspace(Task(instruction="x"), docker_client)
    process = workspace.start("echo up; sleep 100")
    assert process.read(10) == "up\n"
    docker_client.api.remove_container(workspace.container.id, force=True)
    with pytest.raises(WorkspaceUnavailable, match="gone"):
        process.wait(20)
    workspace.close()


# -- shells ------------------------------------------------------------------------------------------------------------


def test_a_shell_keeps_its_state(workspace):
    with workspace.shell(env={"FOO": "bar"}) as shell:
        shell.run(
            "x=1; export Y=\"two\nlines'\"; mkdir -p 'sub/d é'; cd 'sub/d é'; f() { echo \"f:$1 }\"; }; umask 027",
            check=True,
        )
        ran = shell.run('echo "$x $FOO $Y"; f 3; umask; pwd', check=True)
        assert ran.stdout.startswith("1 bar two\nlines'\nf:3 }\n0027\n/")
        assert ran.stdout.endswith("/sub/d é\n")
        assert shell.run("sh -c 'echo \"[$x] $Y\"'").stdout == "[] two\nlines'\n"
        shell.run("unset FOO x; f() { echo new; }; IFS=:; set -f")
        assert shell.run('echo "[$FOO$x]"; f; y=a:b; echo $y *').stdout == "[]\nnew\na b *\n"
        assert shell.run("set +f; unset IFS; unset -f f; cd ..; f").exit_code == 127
        assert shell.run("f").exit_code == 127
        shell.run("set -u")
        assert shell.run("echo $not_there; echo no").stdout == ""
        assert shell.run("echo ${not_there-fine}; set +u").stdout == "fine\n"
        assert shell.run("w=5; exit 3").exit_code == 3
        assert shell.run("echo $w").stdout == "5\n"
        assert shell.run("cat; read y; echo $y", input="typed").stdout == "typed\n"
        with pytest.raises(CommandFailed):
            shell.run("false", check=True)
    with pytest.raises(WorkspaceError, match="closed"):
        shell.run("true")


def test_nothing_breaks_a_shell(workspace):
    """workspace-shell-syntax-battery, in one shell with state: each as listed, and the next command works."""
    with workspace.shell() as shell:
        shell.run("kept=42; greet() { echo hi $kept; }")
        for name, (script, code, stdout) in BATTERY.items():
            ran = shell.run(script, timeout=20)
            assert (ran.exit_code, ran.timed_out) == (code, False), name
            assert stdout is None or ran.stdout == stdout, name
            shell.run("set +e")
            assert shell.run("echo still-$kept; greet", timeout=20).stdout == "still-42\nhi 42\n", name


def test_a_command_that_is_killed_leaves_the_state_as_it_was(workspace):
    with workspace.shell() as shell:
        shell.run("x=before")
        assert shell.run("x=after; sleep 31431", timeout=0.5).timed_out
        assert shell.run("x=after; kill -9 $$").exit_code == 137
        assert shell.run("echo $x").stdout == "before\n"
        assert count(workspace, "[s]leep 31431") == 0


def test_shells_are_apart(workspace):
    with workspace.shell() as one, workspace.shell(cwd="/tmp") as other:
        one.run("x=1")
        other.run("x=2")
        assert one.run("echo $x").stdout == "1\n"
        assert other.run("echo $x; pwd").stdout.startswith("2\n")


def test_what_bash_alone_has(bash_workspace):
    with bash_workspace.shell() as shell:
        shell.run("a=(1 '2 3'); declare -A m=([x]=y); g() { echo \"g$1\"; }; export -f g; shopt -s extglob; alias q=ls")
        ran = shell.run('echo "${a[1]}" ${m[x]}; bash -c "g 9"; shopt -p extglob; alias q')
        assert ran.stdout == "2 3 y\ng9\nshopt -s extglob\nalias q='ls'\n"
        shell.run('printf "h() { echo from-file; }\\n" >lib.sh; . ./lib.sh')
        assert shell.run("h").stdout == "from-file\n"


def test_functions_are_found_in_a_commands_text():
    text = "foo () {\ncat <<'E'\ndon't } \nE\nif [ 1 ]; then echo \"}\"; fi # don't }\n}\nbar() ( echo ${x#\\}} ); function baz() { :; }"
    assert list(functions_in(text)) == ["foo", "bar", "baz"]
    assert functions_in(text)["foo"].endswith("# don't }\n}")
    assert functions_in("echo 'no() {'; qux() {") == {}


# -- folders -----------------------------------------------------------------------------------------------------------


def test_folders_are_listed(workspace):
    workspace.exec(
        "rm -rf list; mkdir -p list/sub; cd list; printf 12345 >'a b'; chmod 640 'a b'; ln -s gone link; mkfifo pipe"
    )
    workspace.exec("cd list; printf x >.hidden; printf x >'new\nline'; printf x >./-dash; mkdir sub/deep")
    found = {info.name: info for info in workspace.ls("list")}
    assert sorted(found) == list(found) == sorted(["a b", "link", "pipe", ".hidden", "new\nline", "-dash", "sub"])
    assert (found["a b"].kind, found["a b"].size, found["a b"].mode) == (FileKind.FILE, 5, 0o640)
    assert abs(found["a b"].modified_at - time.time()) < 86_400
    assert [found[name].kind for name in ("sub", "link", "pipe")] == [FileKind.FOLDER, FileKind.LINK, FileKind.OTHER]
    assert [info.name for info in workspace.ls("list/a b")] == ["a b"]
    assert workspace.ls("list/sub/deep") == []
    with pytest.raises(WorkspaceError, match="no such file"):
        workspace.ls("list/nothing")
    workspace.exec("mkdir many; cd many; i=0; while [ $i -lt 1200 ]; do : >f$i; i=$((i+1)); done")
    assert len(workspace.ls("many")) == 1200


# -- async -------------------------------------------------------------------------------------------------------------


def test_the_async_face(workspace):
    async def use():
        aio = workspace.aio
        assert (await aio.exec("echo hi", check=True)).stdout == "hi\n"
        await aio.write("async.txt", "x")
        assert await aio.read("async.txt") == b"x"
        assert "async.txt" in [info.name for info in await aio.ls()]
        async with await aio.start("cat") as process:
            await process.write("typed\n")
            assert await process.read(10) == "typed\n"
            assert await process.poll() is None
            await process.close_input()
            assert await process.wait(10) == 0
        async with await aio.shell() as shell:
            await shell.run("x=3")
            assert (await shell.run("echo $x")).stdout == "3\n"
        many = await asyncio.gather(*(aio.exec(f"sleep 0.2; echo {index}") for index in range(8)))
        assert [int(one.stdout) for one in many] == list(range(8))

    asyncio.run(use())


def test_a_cancelled_command_is_killed_with_all_that_it_started(workspace):
    async def use():
        aio = workspace.aio
        running = asyncio.create_task(aio.exec("setsid sleep 31441 & touch started; sleep 31442"))
        await aio.exec("until [ -e started ]; do sleep 0.05; done")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await aio.exec("sleep 31443")
        assert (await aio.exec("ps -eo args | grep -cE '[s]leep 3144[123]'")).stdout == "0\n"
        async with await aio.start("sleep 31444") as process:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await process.wait()
            assert await process.poll() is None

    asyncio.run(use())
    assert count(workspace, "[s]leep 31444") == 0


def test_an_interrupted_caller_leaves_no_command_behind(workspace, monkeypatch):
    """What Ctrl-C does to a blocking call: raised in the caller's thread, while the command runs."""
    from gyre_sdk.harness.workspace.supervisor import Supervisor

    def interrupted(self, running, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(Supervisor, "is_attended", interrupted)
    with pytest.raises(KeyboardInterrupt):
        workspace.exec("sleep 31445")
    monkeypatch.undo()
    assert count(workspace, "[s]leep 31445") == 0
    assert threading.active_count() < 200
