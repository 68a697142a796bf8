"""Children that outlive a trainer killed with -9: taken over by its successor as they are, or ended after a while."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gyre_sdk.errors import TrainerError
from gyre_sdk.events import ProcessRestarted
from gyre_sdk.trainer.lingering import UNKNOWN, Linger
from gyre_sdk.trainer.processes import Child, ChildSpec

SERVER = """
import http.server, os, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
print(f"helper {helper.pid}", flush=True)
if "--never" not in sys.argv: print(f"toy ready on http://127.0.0.1:{server.server_port} extra", flush=True)
if "--busy" in sys.argv: hash("x" * 2 ** 20) ** 10 ** 9
server.serve_forever()
"""
TRAINER = """
import os, sys, time
from pathlib import Path
from gyre_sdk.trainer.lingering import Linger
from gyre_sdk.trainer.processes import Child, ChildSpec
folder, seconds, held = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "held"
child = Child(ChildSpec("toy", lambda port: ["toy_server", str(port), *sys.argv[4:]], "toy ready on", folder / "toy.log",
                        linger=Linger(folder / "run", seconds)), lambda event: None)
child.begin()
if "--never" not in sys.argv: child.wait()
while not child.pid: time.sleep(0.01)
if held and not os.fork(): time.sleep(600)
print(child.pid, child.adopted, flush=True)
if sys.stdin.readline(): child.stop()
"""


def eventually(condition: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"it did not happen: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def refused(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


@dataclass
class Stage:
    """A toy trainer as a process of its own, and its successor in this one."""

    folder: Path
    seen: list[Any] = field(default_factory=list)
    trainers: list[subprocess.Popen[str]] = field(default_factory=list)
    successors: list[Child] = field(default_factory=list)

    def trainer(self, *arguments: str, seconds: float = 300.0, held: bool = False) -> tuple[int, bool]:
        """Start a trainer; return the process id of its child, and whether it took that over."""
        process = subprocess.Popen(
            [
                sys.executable,
                self.folder.parent / "trainer.py",
                self.folder,
                str(seconds),
                "held" if held else "",
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.trainers.append(process)
        assert process.stdout is not None
        pid, adopted = process.stdout.readline().split()
        return int(pid), adopted == "True"

    def killed(self, *arguments: str, seconds: float = 300.0) -> int:
        """Start a trainer and kill it; return the process id of its child."""
        pid, _ = self.trainer(*arguments, seconds=seconds)
        self.trainers[-1].kill()
        self.trainers[-1].wait()
        return pid

    def successor(self, *arguments: str, seconds: float = 300.0, **changes: Any) -> Child:
        spec = ChildSpec(
            "toy",
            lambda port: ["toy_server", str(port), *arguments],
            "toy ready on",
            self.folder / "toy.log",
            **{"linger": Linger(self.folder / "run", seconds)} | changes,
        )
        self.successors.append(Child(spec, self.seen.append))
        self.successors[-1].begin()
        self.successors[-1].wait()
        return self.successors[-1]

    def helper(self) -> int:
        return int((self.folder / "toy.log").read_text().rsplit("helper ", 1)[1].split()[0])

    def gone(self, *pids: int) -> None:
        eventually(lambda: not any(map(alive, pids)), "the processes have ended")

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run").iterdir())


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    (tmp_path / "toy_server.py").write_text(SERVER)
    (tmp_path / "trainer.py").write_text(textwrap.dedent(TRAINER))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = Stage(tmp_path / ("a folder whose path is longer than the address of a socket may be, " * 2)[:120])
    found.folder.mkdir()
    yield found
    for child in found.successors:
        child.stop()
    for process in found.trainers:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    found.successor("--last").stop()  # ends whatever lingers


def test_the_successor_takes_over_the_same_process(stage: Stage) -> None:
    pid = stage.killed()
    helper = stage.helper()
    child = stage.successor()
    assert (child.pid, child.adopted, child.pids()) == (pid, True, {"toy": pid})
    assert stage.helper() == helper and alive(helper)
    with urllib.request.urlopen(child.url, timeout=60) as answer:
        assert answer.status == 200
    folder = stage.folder / "run"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / "toy.json").stat().st_mode & 0o777 == 0o600
    child.stop()
    child.stop()
    stage.gone(pid, helper)
    assert stage.left() == [] and stage.seen == []


def test_a_successor_that_is_killed_has_a_successor(stage: Stage) -> None:
    pid = stage.killed()
    assert stage.trainer() == (pid, True)
    stage.trainers[-1].kill()
    stage.trainers[-1].wait()
    assert stage.trainer() == (pid, True)
    stage.trainers[-1].communicate("stop\n")
    stage.gone(pid, stage.helper())


def test_a_polite_end_leaves_nothing(stage: Stage) -> None:
    pid, adopted = stage.trainer()
    helper = stage.helper()
    assert not adopted
    stage.trainers[-1].communicate("stop\n")
    assert not alive(pid)
    stage.gone(helper)
    assert stage.left() == []


@pytest.mark.parametrize("arguments", [(), ("--busy",)])
def test_nobody_comes(stage: Stage, arguments: tuple[str, ...]) -> None:
    """It ends after its time, whatever it does: `--busy` holds the interpreter."""
    pid = stage.killed(*arguments, seconds=0.2)
    stage.gone(pid, stage.helper())
    eventually(lambda: not stage.left(), "its place is empty")


def test_something_that_the_trainer_forked_holds_its_end_of_the_pipe(stage: Stage) -> None:
    pid, _ = stage.trainer(held=True, seconds=0.2)
    stage.trainers[-1].kill()
    stage.trainers[-1].wait()
    stage.gone(pid, stage.helper())
    os.killpg(stage.trainers[-1].pid, signal.SIGKILL)


def test_who_was_started_differently_is_replaced(stage: Stage) -> None:
    pid = stage.killed()
    helper = stage.helper()
    child = stage.successor("--other")
    assert child.pid != pid and not child.adopted
    assert not alive(pid)  # before another one was started
    stage.gone(helper)
    child.stop()
    for change in ({"about": "other settings"}, {"environment": {"A": "1"}}, {"seconds": 0.0}):
        pid = stage.killed()
        child = stage.successor(**change)
        assert child.pid != pid and not alive(pid) and not child.adopted
        child.stop()


def test_who_was_not_ready_or_is_not_fit_is_replaced(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = stage.killed("--never")
    child = stage.successor()
    assert child.pid != pid and not alive(pid)
    child.stop()
    monkeypatch.setattr("gyre_sdk.trainer.processes._FIT_TIMEOUT", 0.1)
    pid = stage.killed()
    asked: list[str] = []
    child = stage.successor(fit=lambda url: bool(asked.append(url)))
    assert child.pid != pid and not alive(pid) and asked


def test_who_died_alone_is_started_again(stage: Stage) -> None:
    pid = stage.killed()
    helper = stage.helper()
    os.kill(pid, signal.SIGKILL)
    stage.gone(pid, helper)
    assert stage.successor().pid != pid


def test_who_was_taken_over_and_dies_comes_back_on_its_port(stage: Stage) -> None:
    pid = stage.killed()
    helper = stage.helper()
    deaths: list[str] = []
    child = stage.successor(on_death=deaths.append)
    url = child.url
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: stage.seen, "it is started again")
    assert [(type(event), event.reason) for event in stage.seen] == [(ProcessRestarted, UNKNOWN)]
    assert child.url == url and child.pid != pid and deaths == [url] and not child.adopted
    stage.gone(helper)


@pytest.mark.parametrize("state", ["held", "alone", "taken over"])
def test_a_child_ends_with_its_watcher(stage: Stage, state: str) -> None:
    pid = stage.killed() if state != "held" else 0
    child = stage.successor() if state != "alone" else None
    pid = child.pid if child is not None else pid
    helper = stage.helper()
    (watcher,) = [other for other in children(pid) if other != helper]
    os.kill(watcher, signal.SIGKILL)
    stage.gone(pid, helper)
    if child is not None:
        eventually(lambda: stage.seen, "it is started again")


def test_an_orphan_without_its_record_ends(stage: Stage) -> None:
    """Nobody could find it: a user who removes the folder starts from nothing."""
    pid = stage.killed()
    (stage.folder / "run" / "toy.json").unlink()
    stage.gone(pid, stage.helper())


def test_who_has_no_key_gets_nothing(stage: Stage) -> None:
    pid = stage.killed()
    folder = os.open(stage.folder / "run", os.O_RDONLY)
    for said in (b"\n", b"guessed\n", b"x" * 300):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(f"/proc/self/fd/{folder}/toy.sock")
            line.sendall(said)
            assert refused(line)
    os.close(folder)
    assert stage.successor().pid == pid


def test_a_watcher_that_does_not_answer_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_sdk.trainer.lingering._ANSWER", 0.2)
    pid = stage.killed()
    (watcher,) = [other for other in children(pid) if other != stage.helper()]
    os.kill(watcher, signal.SIGSTOP)
    with pytest.raises(TrainerError, match=r"a toy of an earlier start is there and does not answer at .*toy\.sock"):
        stage.successor()
    os.kill(watcher, signal.SIGCONT)
    monkeypatch.setattr("gyre_sdk.trainer.lingering._ANSWER", 60.0)


@pytest.mark.parametrize("wanted", [True, False])
def test_who_is_held_waits_as_long_as_it_takes(stage: Stage, wanted: bool) -> None:
    """The successor calls while the trainer still lives, so that it is never too late; then the clock stands."""
    pid, _ = stage.trainer(seconds=0.1)
    linger = Linger(stage.folder / "run", 0.1)
    calling = threading.Thread(target=linger.hold, args=({"toy"},))
    calling.start()
    stage.trainers[-1].kill()
    calling.join()
    with pytest.raises(subprocess.TimeoutExpired):  # it outlives its time
        subprocess.run(["tail", f"--pid={pid}", "-f", "/dev/null"], timeout=1.0)
    if wanted:
        child = stage.successor(linger=linger)
        linger.let_go()
        assert child.pid == pid and child.adopted and alive(pid)
    else:
        linger.let_go()
        stage.gone(pid, stage.helper())


def test_what_is_not_needed_any_more_is_ended(stage: Stage) -> None:
    pid = stage.killed()
    Linger(stage.folder / "run", 60.0).hold({"other"})
    assert not alive(pid) and stage.left() == []


def test_one_that_shall_not_linger_finds_what_did(stage: Stage) -> None:
    pid = stage.killed()
    child = stage.successor(lingers=False)
    assert child.pid != pid and not alive(pid) and stage.left() == []
