"""Supervised children: ready, restarted on the same port, ended with their parent even after kill -9."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import ProcessRestarted
from gyre_sdk.trainer import processes
from gyre_sdk.trainer.processes import Child, ChildSpec, answers_within

SERVER = """
import http.server, subprocess, sys, threading
if "--fail" in sys.argv:
    print("no model here", file=sys.stderr); sys.exit(3)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
print(f"helper {helper.pid}", flush=True)
print(f"toy ready on http://127.0.0.1:{server.server_port} extra", flush=True)
server.serve_forever()
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Child]]:
    (tmp_path / "toy_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    children: list[Child] = []

    def make(
        *arguments: str, observer: Any = lambda event: None, on_ready: Any = lambda url: None, **more: Any
    ) -> Child:
        spec = ChildSpec(
            "toy",
            lambda port: ["toy_server", str(port), *arguments],
            "toy ready on",
            tmp_path / "toy.log",
            on_ready=on_ready,
            **more,
        )
        children.append(Child(spec, observer))
        return children[-1]

    yield make
    for child in children:
        child.stop()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def helper_pid(log: Path) -> int:
    return int(log.read_text().rsplit("helper ", 1)[1].split()[0])


def test_a_child_is_ready_then_stopped_with_all_it_started(toy: Callable[..., Child], tmp_path: Path) -> None:
    child = toy()
    child.begin()
    assert child.wait().startswith("http://127.0.0.1:")
    pid, helper = child.pid, helper_pid(tmp_path / "toy.log")
    assert alive(pid) and alive(helper)
    child.stop()
    child.stop()
    eventually(lambda: not alive(pid) and not alive(helper))


def test_a_killed_child_comes_back_on_the_same_port(toy: Callable[..., Child], tmp_path: Path) -> None:
    seen: list[Any] = []
    readied: list[str] = []
    child = toy(observer=seen.append, on_ready=readied.append)
    child.begin()
    url = child.wait()
    pid, helper = child.pid, helper_pid(tmp_path / "toy.log")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: bool(seen))
    assert child.url == url and child.pid != pid and readied == [url]
    assert isinstance(seen[0], ProcessRestarted) and seen[0].reason == "signal SIGKILL"
    eventually(lambda: not alive(helper))
    child.check()


def test_a_child_that_hangs_is_replaced_once(toy: Callable[..., Child]) -> None:
    """Stopped, so that it answers to nothing; who asks for the end of a process that is gone already ends nothing."""
    seen: list[ProcessRestarted] = []
    child = toy(observer=seen.append)
    child.begin()
    url, first = child.wait(), child.pid
    os.kill(first, signal.SIGSTOP)
    child.replace(first, "no answer")
    eventually(lambda: len(seen) == 1)
    second = child.pid
    assert (child.url, seen[0].reason) == (url, "no answer") and second != first and not alive(first)
    child.replace(first, "no answer, again")
    os.kill(second, signal.SIGKILL)
    eventually(lambda: len(seen) == 2)
    assert seen[1].reason == "signal SIGKILL" and alive(child.pid)


def test_a_child_that_answers_no_more_is_replaced(toy: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped: the kernel accepts its connections. One that is silent for a while only goes on."""
    monkeypatch.setattr(processes, "_LOOK", 0.1)
    seen: list[ProcessRestarted] = []
    answered: list[bool] = []

    def answers(url: str) -> bool:
        answered.append(answers_within(url, 0.5))
        return answered[-1]

    child = toy(observer=seen.append, answers=answers, silence=0.35)
    child.begin()
    url, first = child.wait(), child.pid
    eventually(lambda: answered[-2:] == [True, True])
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: not all(answered))
    os.kill(first, signal.SIGCONT)
    eventually(lambda: answered[-2:] == [True, True])
    assert not seen and child.pid == first
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: len(seen) == 1)
    assert seen[0].reason.startswith("no answer for") and child.url == url and not alive(first)
    eventually(lambda: answered[-2:] == [True, True])


def test_a_child_that_does_not_start_says_why(toy: Callable[..., Child], tmp_path: Path) -> None:
    child = toy("--fail")
    child.begin()
    with pytest.raises(
        TrainerError, match=r"toy did not start: it ended with exit status 3.*toy\.log:\n.*no model here"
    ):
        child.wait()


def test_a_child_that_keeps_dying_is_given_up(toy: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_sdk.trainer.processes.RESTARTS", 3)
    monkeypatch.setattr("gyre_sdk.trainer.processes.WINDOW", 600.0)
    child = toy()
    child.begin()
    child.wait()

    def kill_until_given_up() -> bool:
        try:
            child.check()
        except TrainerError as error:
            return "died 3 times" in str(error)
        if pid := child.pid:
            with contextlib.suppress(ProcessLookupError):  # it may have been told dead at this moment
                os.kill(pid, signal.SIGKILL)
        return False

    eventually(kill_until_given_up, 60.0)


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_do_not_outlive_a_parent_killed_with_9(
    tmp_path: Path, toy: Callable[..., Child], stubborn: bool
) -> None:
    if stubborn:  # holds the interpreter: no thread of it could notice
        (tmp_path / "toy_server.py").write_text(
            SERVER.replace("server.serve_forever()", "hash('x' * 2 ** 20) ** 10 ** 9")
        )
    parent = tmp_path / "parent.py"
    parent.write_text(
        textwrap.dedent(f"""
        import time
        from pathlib import Path
        from gyre_sdk.trainer.processes import Child, ChildSpec
        child = Child(ChildSpec("toy", lambda port: ["toy_server", str(port)], "toy ready on",
                                Path({str(tmp_path / "toy.log")!r})), lambda event: None)
        child.begin()
        child.wait()
        print(child.pid, flush=True)
        time.sleep(600)
        """)
    )
    process = subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.wait()
    eventually(lambda: not alive(pid))
    eventually(lambda: not alive(helper_pid(tmp_path / "toy.log")))
