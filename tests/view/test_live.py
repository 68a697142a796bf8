"""Promise 10: an observer can never block or fail a run."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios
import threading
import time

import pytest
from rich.console import Console

from gyre_sdk.events import Event, PhaseStarted, RunEnded, RunStarted, StepTaken
from gyre_sdk.records import RunStatus
from gyre_sdk.view import LiveView


def run(number: int) -> list[Event]:
    return [
        RunStarted(100.0 + number, f"r{number}", f"task-{number}", None),
        RunEnded(101.0 + number, f"r{number}", RunStatus.COMPLETED, 0.5, 1.0),
    ]


class Broken(io.StringIO):
    """A stream whose disk is full."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


class Stuck(io.StringIO):
    """A terminal that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(30)
        return len(text)


def test_plain_lines_off_a_terminal():
    out = io.StringIO()
    with LiveView(Console(file=out)) as view:
        for event in run(0):
            view(event)
    assert out.getvalue().splitlines() == [
        "[   0:00] run r0 of task-0 started",
        "[   0:01] run r0 ended: completed, reward 0.50, 0:01",
    ]


def test_nothing_is_lost_when_it_ends_at_once():
    out = io.StringIO()
    with LiveView(Console(file=out)) as view:
        for number in range(500):
            for event in run(number):
                view(event)
    assert len(out.getvalue().splitlines()) == 1000 and view.dropped == 0


def test_a_total_can_be_given_up_front():
    with LiveView(Console(file=io.StringIO()), total=7, clock=lambda: 5.0) as view:
        pass
    assert view.state.phase is not None and view.state.phase.total == 7


def test_a_full_queue_drops_and_counts():
    view = LiveView(Console(file=io.StringIO()), capacity=10)
    for number in range(20):
        view(run(number)[0])
    assert view.dropped == 10
    with view:
        pass
    assert "10 events not shown" in view._console.file.getvalue()


def test_a_broken_terminal_fails_nobody():
    with LiveView(Console(file=Broken())) as view:
        for event in run(0):
            view(event)
        deadline = time.monotonic() + 60
        while view.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
        view(run(1)[0])
    assert isinstance(view.failure, OSError) and view.dropped == 1


def test_a_stuck_terminal_blocks_nobody(monkeypatch):
    monkeypatch.setattr("gyre_sdk.view.live._CLOSE", 0.2)
    stuck = Stuck()
    with LiveView(Console(file=stuck), capacity=100) as view:
        view(run(0)[0])
        time.sleep(0.3)
        for number in range(5000):
            view(run(number)[0])
    assert view.dropped >= 4800
    stuck.free.set()  # only now


def test_an_event_that_is_none_does_not_reach_the_caller():
    with LiveView(Console(file=io.StringIO())) as view:
        view(None)  # type: ignore[arg-type]
        view(run(0)[0])


def test_many_threads():
    view = LiveView(Console(file=io.StringIO()), capacity=100_000)
    with view:
        threads = [
            threading.Thread(target=lambda base=base: [view(event) for n in range(200) for event in run(base + n)])
            for base in range(0, 2000, 200)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert view.state.ended.total() == 2000 and not view.state.active


def test_errors_of_the_block_pass_through():
    with pytest.raises(KeyError):
        with LiveView(Console(file=io.StringIO())):
            raise KeyError("x")


def in_terminal(term: str, width: int = 100, height: int = 30) -> str:
    """Run a short training in front of a real pseudo-terminal and return what it was sent."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        try:
            while block := os.read(main, 65536):
                found.append(block)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(side, "w", encoding="utf-8") as file:
        console = Console(file=file, _environ={"TERM": term, "COLUMNS": str(width), "LINES": str(height)})
        with LiveView(console, clock=lambda: 200.0) as view:
            view(PhaseStarted(100.0, "train", 4))
            for number in range(40):
                view(RunStarted(100.0, f"r{number}", f"task-{number}", "g"))
            view(StepTaken(150.0, 1, 4, 0.5, 1.0, 10, 8, 0.5, 0.25))
            time.sleep(1.2)
        assert view.failure is None
    reader.join(5)
    os.close(main)
    return b"".join(found).decode()


def unstyled(sent: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", sent)


def test_a_terminal_gets_a_page_at_most_four_times_a_second():
    sent = unstyled(in_terminal("xterm-256color"))
    assert "╭─ runs" in sent and "1/4" in sent
    assert ("\x1b[?25l" in sent and sent.rstrip().endswith("\x1b[?25h")) or "\x1b[?25h" in sent, "the cursor is back"
    assert 2 <= sent.count("╭─ runs") <= 9, "1.2 s at 4 frames a second, and the first and last frame"


def test_a_dumb_terminal_gets_lines():
    sent = in_terminal("dumb")
    assert "\x1b" not in sent and "step 1/4" in sent
