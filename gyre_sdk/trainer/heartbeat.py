"""A watcher, a process of its own, that ends this one when none of its threads gets Python's lock any more.

    python -m gyre_sdk.trainer.heartbeat PID SECONDS

A thread that only beats writes to the watcher's stdin. Something that hangs and keeps the lock holds that thread up too, as
it does every other watch inside of the process. Time in which the process was stopped does not count: who stops a trainer by
hand means it. Before the watcher kills, it has the process say where its threads are (`faulthandler`, which needs no lock).
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["is_stopped", "silent_for", "watched_from_outside"]

_BEAT_S = 1.0
"""Seconds between two beats, and between two looks."""
_TOLD_S = 2.0
"""Seconds that saying where it hangs may take."""


@contextmanager
def watched_from_outside(seconds: float) -> Iterator[Callable[[], None]]:
    """End this process by SIGKILL when it gets nothing done for `seconds`; give what ends the watch before.

    Where the kernel cannot name a process for good (before Linux 5.3, or no Linux) nobody watches.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        yield lambda: None
        return
    faulthandler.register(_tells_where(), file=2, all_threads=True)
    command = [sys.executable, "-m", __name__, str(os.getpid()), str(seconds)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    stopping = threading.Event()
    heart = threading.Thread(target=_beat, args=(watcher, stopping), name="heartbeat", daemon=True)
    heart.start()

    def end() -> None:
        stopping.set()
        watcher.kill()
        watcher.wait()
        heart.join()
        watcher.stdin.close()  # type: ignore[union-attr]

    try:
        yield end
    finally:
        end()


def _beat(watcher: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    assert watcher.stdin is not None
    with suppress(OSError):  # it ended
        while not stopping.wait(_BEAT_S):
            os.write(watcher.stdin.fileno(), b".")


def _tells_where() -> int:
    """Return the signal that has a process say where its threads are; of the last that the system has, which nobody sends."""
    return signal.SIGRTMAX - 1


def main() -> int:
    """Watch; return when the process has ended, or was."""
    pid, seconds = int(sys.argv[1]), float(sys.argv[2])
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return 0
    if os.getppid() != pid:
        return 0  # it ended before
    poll = select.poll()
    for descriptor in (0, process):
        poll.register(descriptor, select.POLLIN)
    silent, before = 0.0, time.monotonic()
    while silent < seconds:
        ready = [descriptor for descriptor, _ in poll.poll(1000 * _BEAT_S)]
        now = time.monotonic()
        passed, before = now - before, now
        if process in ready or (0 in ready and not os.read(0, 4096)):
            return 0
        silent = 0.0 if 0 in ready else silent_for(silent, passed, stopped=is_stopped(pid))
    os.write(
        2,
        f"gyre-train: TrainerError: no thread of process {pid} got Python's lock for {silent:.0f} s: something hangs and keeps"
        " it. It is ended; look at where it hangs, below, and at the devices, then run the same command again: it"
        " resumes\n".encode(),
    )
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, _tells_where())
        poll.unregister(0)
        poll.poll(1000 * _TOLD_S)
        signal.pidfd_send_signal(process, signal.SIGKILL)
    return 0


def silent_for(silent: float, passed: float, *, stopped: bool) -> float:
    """Return the seconds for which a process that could have beaten has not.

    Args:
        silent: until the look before this one.
        passed: seconds since then; of more than a few beats the watcher stood still too.
        stopped: whether the process is.
    """
    return silent if stopped else silent + min(passed, 4 * _BEAT_S)


def is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped, by a signal or by who debugs it."""
    try:
        said = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] in ("T", "t")


if __name__ == "__main__":
    sys.exit(main())
