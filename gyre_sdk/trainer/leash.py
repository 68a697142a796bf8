"""Run a module as a child that cannot outlive its parent, even one that is killed with -9.

    python -m gyre_sdk.trainer.leash MODULE ARGUMENTS...

The parent keeps the write end of this process's stdin open. A watcher, a process of its own in the same group, reads the
other end: when the parent is gone it kills the group, however busy the module is. On Linux the kernel is asked to end
the module too (`PR_SET_PDEATHSIG`). The kernel means the *thread* that started this process: start it from one that lives.
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
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    if os.fork() == 0:
        _watch()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    quiet = os.open(os.devnull, os.O_RDONLY)
    os.dup2(quiet, 0)
    os.close(quiet)
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _watch() -> None:
    """Wait for the parent's end, then kill the group, this process included. Polite signals are the module's."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
