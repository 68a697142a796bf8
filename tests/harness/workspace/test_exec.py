"""Commands: what they print and return, and what is left of them. Cases: cases/workspace/*.json."""

from __future__ import annotations

import pickle
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_sdk.errors import CommandFailed, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import LocalWorkspace, local
from gyre_sdk.harness.workspace.channel import ProcessChannel, Sink
from gyre_sdk.harness.workspace.output import clip

pytestmark = pytest.mark.docker

# (script, exit code, standard output or None, part of standard error): workspace-shell-syntax-battery
BATTERY = {
    "heredoc": (
        "cat > a.txt <<'EOF'\nfirst row\n$HOME stays\nEOF\nwc -l < a.txt; cat a.txt",
        0,
        "2\nfirst row\n$HOME stays\n",
    ),
    "heredoc without its end": ("cat <<EOF\nabc", 0, "abc\n"),
    "heredoc end inside a block": ("if true; then\ncat <<EOF\n  EOF\nEOF\nfi", 0, "  EOF\n"),
    "heredoc with tabs": ("cat <<-EOF\n\tx\n\tEOF\n", 0, "x\n"),
    "unclosed quote": ('echo "abc', 2, ""),
    "stray bracket": ("echo )", 2, ""),
    "exit": ("exit 7", 7, ""),
    "set -e": ("set -e\nfalse\necho no", 1, ""),
    "trailing backslash": ("echo a \\", 0, "a\n"),
    "comment last": ("echo hi # done", 0, "hi\n"),
    "only a comment": ("# only a comment", 0, ""),
    "empty": ("", 0, ""),
    "no final newline": ("printf x", 0, "x"),
    "kills its own shell": ("kill -KILL $$", 137, ""),
    "reads its input": ("cat", 0, ""),
    "closes its output": ("exec >/dev/null; echo x", 0, ""),
    "looks like the protocol": ("echo '@ done x1 0'; echo '= x1 0'; echo .; echo -", 0, "@ done x1 0\n= x1 0\n.\n-\n"),
    "contains the supervisor's words": ("echo 'say fail ? cwd'", 0, "say fail ? cwd\n"),
}


@pytest.mark.parametrize("name", BATTERY)
def test_shell_syntax_battery(workspace, name):
    script, code, stdout = BATTERY[name]
    ran = workspace.exec(script, timeout=20)
    assert ran.exit_code == code
    assert not ran.timed_out
    if stdout is not None:
        assert ran.stdout == stdout
    after = workspace.exec("echo still-$((40+2))", timeout=20)
    assert (after.exit_code, after.stdout) == (0, "still-42\n")


def test_all_scripts_at_once(workspace):
    with ThreadPoolExecutor(len(BATTERY)) as threads:
        ran = dict(
            zip(BATTERY, threads.map(lambda name: workspace.exec(BATTERY[name][0], timeout=60), BATTERY), strict=True)
        )
    for name, (_, code, stdout) in BATTERY.items():
        assert ran[name].exit_code == code, name
        assert stdout is None or ran[name].stdout == stdout, name


def test_streams_are_apart(workspace):
    ran = workspace.exec("echo out; echo err >&2; exit 3")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (3, "out\n", "err\n")


@pytest.mark.parametrize(
    "script",
    [
        "sleep 31401 & echo up",
        "(sleep 31402 >/dev/null 2>&1 &); echo up",
        "while true; do sleep 1; echo t; done & echo up",
    ],
)
def test_a_background_child_does_not_hold_the_call(workspace, script):
    """workspace-children-that-outlive-the-command a, b, c."""
    ran = workspace.exec(script, timeout=30)
    assert (ran.exit_code, ran.stdout, ran.timed_out) == (0, "up\n", False)
    workspace.kill_all()


def test_a_background_server_lives_on(workspace):
    """A child that keeps writing to a finished command's output is neither blocked nor killed by a closed pipe."""
    workspace.exec(
        "rm -f log; (while :; do head -c 100000 /dev/zero; echo tick >> log; sleep 0.02; done) & echo up", timeout=30
    )
    grew = workspace.exec("until [ $(cat log | wc -l) -ge 30 ]; do sleep 0.1; done", timeout=60)
    assert grew.exit_code == 0
    workspace.kill_all()


def test_a_timeout_kills_the_whole_tree(workspace):
    """workspace-children-that-outlive-the-command d: setsid and double forks included, and nothing else."""
    workspace.exec("sleep 31407 >/dev/null 2>&1 & echo other", timeout=30)
    ran = workspace.exec(
        "setsid nohup sh -c 'sleep 31403' >/dev/null 2>&1 & (setsid sh -c '(sleep 31404 &) ; sleep 31405' &) ; echo before; sleep 31406",
        timeout=1,
    )
    assert ran.timed_out
    assert ran.exit_code == 137
    assert ran.stdout == "before\n"
    assert workspace.exec("ps -eo args | grep -cE '[s]leep 3140[3456]'").stdout == "0\n"
    assert workspace.exec("ps -eo args | grep -cE '[s]leep 31407'").stdout == "1\n"
    workspace.kill_all()
    assert workspace.exec("ps -eo args | grep -cE '[s]leep 314'").stdout == "0\n"


def test_a_stubborn_command_is_killed(workspace):
    ran = workspace.exec("trap '' TERM INT HUP; echo stubborn; while :; do :; done", timeout=1)
    assert (ran.timed_out, ran.stdout) == (True, "stubborn\n")


def test_a_child_that_cleared_its_environment_dies_with_its_session(workspace):
    ran = workspace.exec("env -i sleep 31408", timeout=1)
    assert ran.timed_out
    assert workspace.exec("ps -eo args | grep -cE '[s]leep 31408'").stdout == "0\n"


def test_a_command_that_kills_what_watches_it_still_ends(workspace):
    ran = workspace.exec("kill -9 $PPID; sleep 31409")
    assert ran.exit_code == 137
    assert workspace.exec("echo alive", timeout=20).stdout == "alive\n"


def test_bytes_and_text(workspace):
    """workspace-output-bytes-and-size."""
    binary = workspace.exec(r"printf '\377\376\000\200A\303'")
    assert (binary.stdout.count("A"), binary.stdout_bytes.hex(), binary.stdout_total) == (1, "fffe008041c3", 6)
    latin = workspace.exec(r"printf 'caf\351\n' >&2; exit 3")
    assert (latin.exit_code, latin.stderr, latin.stderr_bytes.hex()) == (3, "caf�\n", "636166e90a")
    assert workspace.exec(r"printf '\360\237'; sleep 0.3; printf '\231\202\n'").stdout == "🙂\n"
    assert (
        workspace.exec(r"printf '\033]0;title\007\033[2J[red]x[/red]\n'").stdout
        == "\x1b]0;title\x07\x1b[2J[red]x[/red]\n"
    )
    long = workspace.exec("head -c 70000 /dev/zero | tr '\\0' y")
    assert (long.stdout, long.truncated, long.stdout_total) == ("y" * 70000, False, 70000)
    assert workspace.exec("printf 1; printf 22 >&2").undecoded is None


def test_both_streams_full_of_short_writes(workspace):
    ran = workspace.exec(
        "for i in $(seq 1 20000); do printf 'out%08d' $i; printf 'err%08d' $i >&2; done; echo", timeout=120
    )
    assert (len(ran.stdout), len(ran.stderr), ran.truncated) == (220001, 220000, False)
    assert ran.stdout.startswith("out00000001out00000002") and ran.stdout.endswith("out00020000\n")


def test_huge_output_keeps_head_and_tail_within_little_memory(docker_workspace):
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    tracemalloc.start()
    ran = docker_workspace.exec("echo first; head -c 300000000 /dev/zero | tr '\\0' x; echo; echo last", timeout=240)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (ran.exit_code, ran.truncated, ran.timed_out) == (0, True, False)
    assert len(ran.stdout) <= 1 << 20
    assert ran.stdout.startswith("first\nxx") and ran.stdout.endswith("xx\nlast\n")
    mark = ran.stdout.partition("[... ")[2].partition(" bytes dropped")[0]
    assert int(mark) + len(ran.stdout.replace(f"\n[... {mark} bytes dropped ...]\n", "")) == 300_000_012
    assert ran.stdout_total == 300_000_012
    assert peak < 64 << 20
    assert _memory("VmHWM") - before < 64 << 20


def _memory(name: str) -> int:
    """Return what the kernel says of this process's memory, bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


@given(kept=st.binary(max_size=400), lost=st.integers(0, 1000), limit=st.integers(80, 300))
def test_clipped_output_is_bounded_and_says_so(kept, lost, limit):
    text, truncated = clip(kept, lost, limit)
    assert len(text) <= limit or not truncated
    assert truncated == (lost > 0 or len(kept) > limit)
    assert (b"dropped" in text) or not truncated


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=200))
def test_any_text_survives_a_round_trip(docker_workspace, content):
    ran = docker_workspace.exec('printf %s "$A"; cat', env={"A": content}, input=content.encode())
    assert ran.stdout == content * 2


def test_start_errors_are_not_tool_output(workspace):
    """workspace-start-errors-are-not-tool-output."""
    with pytest.raises(WorkspaceError, match="no/such/dir"):
        workspace.exec("pwd", cwd="no/such/dir")
    with pytest.raises(WorkspaceError, match="nobody-like-this"):
        workspace.exec("id", user="nobody-like-this")
    missing = workspace.exec("no-such-cmd-xyz")
    assert (missing.exit_code, missing.stdout) == (127, "")
    assert workspace.exec("mkdir -p 'dé r'; cd 'dé r'; pwd").exit_code == 0
    assert workspace.exec("echo in", cwd="dé r").stdout == "in\n"
    values = {"A": "two\nlines", "B": "q'\"$(echo no)`"}
    assert workspace.exec('printf "%s|%s" "$A" "$B"', env=values).stdout == "two\nlines|q'\"$(echo no)`"
    with pytest.raises(WorkspaceError, match="a-b"):
        workspace.exec("true", env={"a-b": "1"})


def test_variables_of_any_name_are_the_commands_own(workspace):
    """Also of the names that what runs commands has for its own, and of those that a shell does not let go."""
    names = [
        "N",
        "D",
        "L",
        "P",
        "W",
        "T",
        "B",
        "CAP",
        "HOW",
        "MEMORY",
        "SETSID",
        "f",
        "k",
        "c",
        "l",
        "st",
        "kills",
        "status",
    ]
    values = {name: f"{name} 7;'x" for name in names} | {"UID": "5", "PPID": "6", "IFS": "/"}
    quoted = " ".join(f'"${name}"' for name in names)
    script = f"printf '%s|' {quoted}; exit 3"
    expected = "".join(f"{values[name]}|" for name in names)
    ran = workspace.exec(script, env=values, timeout=30)
    assert (ran.exit_code, ran.stdout, ran.timed_out) == (3, expected, False)
    with workspace.start(script, env=values) as process:
        assert (process.wait(30), process.read(30)) == (3, expected)


def test_an_environment_that_no_command_can_have_is_said(workspace):
    largest = "x" * (131_071 - len("A="))
    assert workspace.exec("echo ${#A}", env={"A": largest}, timeout=60).stdout == f"{len(largest)}\n"
    for env in ({"A": f"{largest}x"}, {f"A{number}": "x" * 100_000 for number in range(11)}):
        with pytest.raises(WorkspaceError, match=r"'A.*pass it as input, or in a file"):
            workspace.exec("true", env=env)


def test_long_scripts_arguments_and_input(workspace):
    assert workspace.exec(f"x='{'a' * 200000}'; echo ${{#x}}", timeout=60).stdout == "200000\n"
    argument = workspace.exec(f"x='{'a' * 200000}'; /bin/ls \"$x\"", timeout=60)
    assert argument.exit_code != 0
    assert "too long" in argument.stderr
    assert workspace.exec("wc -c", input=b"z" * 5_000_000, timeout=60).stdout.strip() == "5000000"


def test_commands_run_at_the_same_time(workspace):
    """One waits for a file that the other one makes."""
    got = []
    waiter = threading.Thread(
        target=lambda: got.append(workspace.exec("until [ -e meet ]; do sleep 0.05; done; echo met", timeout=60))
    )
    waiter.start()
    workspace.exec("touch meet")
    waiter.join()
    assert got[0].stdout == "met\n"


def test_files(workspace, tmp_path):
    data = bytes(range(256)) * 100
    workspace.write("deep/er/x y.bin", data)
    assert workspace.read("deep/er/x y.bin") == data
    workspace.write("run.sh", "#!/bin/sh\necho ran\n", mode=0o755)
    assert workspace.exec("./run.sh").stdout == "ran\n"
    with pytest.raises(WorkspaceError, match="nothing/here"):
        workspace.read("nothing/here")
    workspace.exec("mkfifo pipe; mkdir -p folder")
    for path in ("pipe", "folder"):
        with pytest.raises(WorkspaceError, match="not a regular file"):
            workspace.read(path)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "sub" / "b.bin").write_bytes(data)
    workspace.upload(source, "up")
    workspace.upload(str(source / "a.txt"), "up/c.txt")
    workspace.download("up", tmp_path / "down")
    assert (tmp_path / "down" / "sub" / "b.bin").read_bytes() == data
    assert (tmp_path / "down" / "c.txt").read_text() == "a"
    workspace.download("up/a.txt", str(tmp_path / "one.txt"))
    assert (tmp_path / "one.txt").read_text() == "a"
    with pytest.raises(WorkspaceError, match="no such file"):
        workspace.download("nothing", tmp_path / "nothing")


def test_a_link_that_leads_outside_is_not_downloaded(workspace, tmp_path):
    workspace.exec("mkdir -p trap; ln -s /etc/passwd trap/link; ln -s ../../../up trap/up")
    with pytest.raises(WorkspaceError, match="outside"):
        workspace.download("trap", tmp_path / "trap")


def test_a_closed_workspace_says_so(docker_client, base_image):
    from gyre_sdk.harness.task import Task
    from gyre_sdk.harness.workspace import DockerWorkspace

    workspace = DockerWorkspace(Task(instruction="x"), docker_client)
    workspace.close()
    workspace.close()
    with pytest.raises(WorkspaceUnavailable, match="closed"):
        workspace.exec("true")


def test_check_raises_with_the_result(workspace):
    assert workspace.exec("true", check=True).exit_code == 0
    with pytest.raises(CommandFailed, match="exit code 3: why") as failed:
        workspace.exec("echo out; echo why >&2; exit 3", check=True)
    assert (failed.value.result.exit_code, failed.value.result.stdout) == (3, "out\n")
    assert not isinstance(failed.value, WorkspaceError)
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)


def test_how_long_a_command_took_is_in_its_result(workspace):
    assert workspace.exec("sleep 0.05").duration_s >= 0.05
    assert workspace.exec("sleep 30", timeout=0.05).duration_s >= 0.05


def test_input_as_text_is_utf8(workspace):
    assert workspace.exec("cat", input="für 🙂").stdout == "für 🙂"


class LateNews(ProcessChannel):
    """What a supervisor tells by itself comes later than its answers: they take ways of their own."""

    def open(self, sink: Sink) -> None:
        def late(kind: int, data: bytes) -> None:
            if kind == 2:
                time.sleep(0.6)
            sink(kind, data)

        super().open(late)


@pytest.mark.parametrize("seconds", [1.1, 1.3, 1.5])
def test_an_end_that_is_told_late_is_no_kill(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Where nothing is heard of a command its wrapper is looked for; one that has just ended is not taken for killed."""
    monkeypatch.setattr(local, "ProcessChannel", LateNews)
    with LocalWorkspace(Task(instruction="x")) as workspace:
        done = workspace.exec(f"sleep {seconds}; echo it ended; exit 3")
        assert (done.exit_code, done.stdout, done.truncated) == (3, "it ended\n", False)
