"""The live view: an observer that draws. It can never block or fail the run that it watches."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from gyre_sdk.events import Event, PhaseStarted
from gyre_sdk.view.escape import counted, visible
from gyre_sdk.view.plain import PlainLines
from gyre_sdk.view.render import Page, render
from gyre_sdk.view.state import State

_FRAME = 0.25
"""Seconds between two frames: 4 a second at most."""
_QUEUE = 20_000
"""Events that may wait for the next frame."""
_CLOSE = 5.0
"""Seconds that closing waits for the last frame; a terminal that takes no more output is left behind."""


class LiveView:
    """Watch events in a terminal; without one, print plain lines.

    Use it as a context manager and call it with events, from any thread::

        with LiveView() as view:
            view(event)

    Calling it takes microseconds and never raises. Events that the drawing does not keep up with are dropped and counted.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        total: int = 0,
        name: str = "train",
        plain: bool = False,
        clock: Callable[[], float] = time.time,
        capacity: int = _QUEUE,
    ) -> None:
        """Prepare the view; nothing is drawn before it is entered.

        Args:
            console: where to draw; by default standard output. `NO_COLOR` and `TERM=dumb` are respected.
            total: units of work when no `PhaseStarted` will tell (steps when `name` is `train`, else runs).
            name: name of that work.
            plain: lines even in a terminal.
            clock: seconds since the epoch.
            capacity: events that may wait for the next frame.
        """
        self._console = console or Console(highlight=False)
        self._plain = plain or not _can_draw(self._console)
        self._clock = clock
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lines = PlainLines()
        self.state = State()
        self.dropped = 0
        """Events that were not shown."""
        self.failure: Exception | None = None
        """What ended the drawing before its time, if anything did."""
        if total:
            self.state.apply(PhaseStarted(at=clock(), name=name, total=total))

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if self.failure is not None or self._queue.qsize() >= self._capacity:
            self.dropped += 1
            return
        self._queue.put(event)

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="gyre-view", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_CLOSE)
            self._thread = None

    # -- in the thread -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            if self._plain:
                self._print()
            else:
                self._draw()
        except Exception as error:  # boundary: a view that cannot draw must not fail the run
            self.failure = error
            with contextlib.suppress(Exception):
                self._write(f"the view has stopped ({visible(repr(error), 120)}); the work goes on")

    def _print(self) -> None:
        while True:
            last = self._stop.is_set()
            for event in self._waiting():
                self.state.apply(event)
                for line in self._lines.lines(event, self.state):
                    self._write(line)
            if last:
                break
            self._stop.wait(_FRAME)
        for line in self._lines.progress(self.state) if self.state.phase is not None else []:
            self._write(line)
        if self.dropped:
            self._write(f"{counted(self.dropped, 'event')} not shown: the view did not keep up")

    def _write(self, line: str) -> None:
        encoded = line.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)
        self._console.print(Text(encoded), soft_wrap=True, highlight=False, no_wrap=True)

    def _draw(self) -> None:
        with Live(console=self._console, auto_refresh=False, get_renderable=self._page) as live:
            while True:
                last = self._stop.is_set()
                for event in self._waiting():
                    self.state.apply(event)
                live.refresh()
                if last:
                    return
                self._stop.wait(_FRAME)

    def _page(self) -> RenderableType:
        size = self._console.size
        return render(self.state, self._clock(), Page(size.width, size.height), dropped=self.dropped)

    def _waiting(self) -> list[Event]:
        """Return what has come in, at most one queue full."""
        found: list[Event] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < self._capacity:
                found.append(self._queue.get_nowait())
        return found


def _can_draw(console: Console) -> bool:
    """Tell whether a console can move its cursor and show block characters."""
    moves = console.is_terminal and console.file.isatty() and not console.is_dumb_terminal
    return moves and not console.options.ascii_only
