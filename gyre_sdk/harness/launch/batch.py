"""Several runs of one plan, some at a time; stopped by signals without leaving anything behind.

A first stop cancels what runs and starts nothing more; evaluations that are under way get some seconds. A second one, or
the end of these seconds, records the rest as cancelled and leaves.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from gyre_sdk.errors import GyreError, ServiceError
from gyre_sdk.harness.launch.attempt import Attempt, Plan, attempt
from gyre_sdk.harness.launch.outlet import Outlet
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.records import RunStatus

_GRACE_SECONDS = 6.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(GyreError):
    """A signal ended the runs.

    Attributes:
        exit_status: 128 and the signal's number, as shells have it.
    """

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


class Batch:
    """The runs of a plan.

    Args:
        members: which runs of the group are made.
        concurrency: how many at a time.
        outlet: gets the programs' output.
        say: gets messages for the user.
        done: is told of each run that ended.
    """

    def __init__(
        self,
        plan: Plan,
        service: ServiceClient,
        members: Sequence[int],
        *,
        concurrency: int,
        outlet: Outlet,
        say: Callable[[str], None],
        done: Callable[[Attempt], None],
    ) -> None:
        self._plan, self._service = plan, service
        self._waiting = list(members)
        self._open: dict[int, str | None] = {}
        """Member that is being made -> its run, once that is on record."""
        self._outlet, self._say, self._done = outlet, say, done
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._signals: list[int] = []
        self._failure: BaseException | None = None
        self._workers = min(concurrency, len(members))

    def run(self) -> None:
        """Make the runs. To be called from the main thread: signals are taken while it runs.

        Raises:
            Stopped: a signal came.
            Exception: what a run's thread raised that was none of gyre's errors.
        """
        with self._taking_signals():
            for number in range(self._workers):
                threading.Thread(target=self._work, name=f"gyre run {number}", daemon=True).start()
            self._wait(lambda: bool(self._signals) or (not self._waiting and not self._open) or bool(self._failure))
            if self._signals:
                self._stop()
            elif self._failure is not None:
                self._stopping.set()
                self._wait(lambda: not self._open, _GRACE_SECONDS)
                raise self._failure

    # -- inside ------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        number = self._signals[0]
        self._stopping.set()
        with self._changed:
            dropped, self._waiting = len(self._waiting), []
            ending = len(self._open)
        name = signal.Signals(number).name
        self._say(
            f"{name}: ending {ending} run{'' if ending == 1 else 's'}, {dropped} not started; once more leaves at once"
        )
        self._wait(lambda: not self._open or len(self._signals) > 1, _GRACE_SECONDS)
        with self._changed:
            left = [run for run in self._open.values() if run is not None]
        for run in left:
            with contextlib.suppress(ServiceError):
                self._service.end_run(
                    run, RunStatus.CANCELLED, reward=None, parts={}, error=f"{name} while it ran", placeholder=False
                )
        self._say(f"{name}: all runs are on record" + (f", {len(left)} cut off" if left else ""))
        raise Stopped(number, f"stopped by {name}")

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._stopping.is_set():
                    return
                member = self._waiting.pop(0)
                self._open[member] = None
            try:
                made = attempt(
                    self._plan,
                    member,
                    self._service,
                    self._outlet.of(str(member)),
                    self._check,
                    lambda run, member=member: self._open.__setitem__(member, run),  # type: ignore[misc]
                )
                self._done(made)
            except BaseException as error:  # boundary: top of a thread; the main thread raises it
                self._failure = error
            with self._changed:
                del self._open[member]
                self._changed.notify_all()

    def _check(self) -> None:
        if self._stopping.is_set():
            raise KeyboardInterrupt

    def _wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        give_up = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while not until() and (give_up is None or time.monotonic() < give_up):
                self._changed.wait(0.1)  # signal handlers run in between

    @contextlib.contextmanager
    def _taking_signals(self) -> Iterator[None]:
        def taken(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        before = {number: signal.signal(number, taken) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
