"""Run a module as a child that cannot outlive its parent, even one that is killed with -9; or only for a while.

    python -m gyre_sdk.trainer.leash [--linger DESCRIPTOR] MODULE ARGUMENTS...

The parent keeps the write end of this process's stdin open. A watcher, a process of its own in the same group, reads the
other end: when the parent is gone it kills the group, however busy the module is. On Linux the kernel is asked to end
the module too (`PR_SET_PDEATHSIG`). The kernel means the *thread* that started this process: start it from one that lives.

With `--linger` the watcher waits for a successor of the parent at that listening socket first (`orphan.py`), and the
kernel ends the module with the watcher instead. Where the kernel cannot, nothing lingers.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Put on the leash, then be the module."""
    arguments, listening = sys.argv[1:], -1
    if arguments[0] == "--linger":
        listening, arguments = int(arguments[1]), arguments[2:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    lingers = listening >= 0 and _linger(listening)
    if not lingers:
        if os.fork() == 0:
            _watch()
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    quiet = os.open(os.devnull, os.O_RDONLY)
    os.dup2(quiet, 0)
    os.close(quiet)
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def _linger(listening: int) -> bool:
    """Fork the watcher that waits for successors; tell whether that is possible here."""
    from gyre_sdk.trainer.orphan import tie, watch

    ties = tie()
    if ties is not None:
        if os.fork() == 0:
            _ignore_polite_signals()
            watch(listening, ties)
        ties.keep_childs()
    os.close(listening)
    return ties is not None


def _watch() -> None:
    """Wait for the parent's end, then kill the group, this process included.

    It holds none of the module's outputs: who reads them sees their end when the module ends.
    """
    _ignore_polite_signals()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(nowhere, output)
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _ignore_polite_signals() -> None:
    """They are the module's."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
