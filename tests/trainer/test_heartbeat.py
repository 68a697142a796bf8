"""A process that hangs and keeps Python's lock is ended from outside; time in which it was stopped does not count."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from gyre_sdk.trainer.heartbeat import is_stopped, silent_for

SECONDS = 120.0
PROGRAM = """
import ctypes, io, os, sys
from gyre_sdk.trainer.heartbeat import watched_from_outside

def hangs_here():
    while True:
        ctypes.PyDLL(None).sleep(600)  # keeps the lock

sys.stderr = io.StringIO()  # as what captures it may
with watched_from_outside(600.0) as end:
    children = open(f"/proc/self/task/{os.getpid()}/children")
    assert len(children.read().split()) == 1
    end()
    children.seek(0)
    assert not children.read(), "nobody watches any more"
with watched_from_outside(1.0):
    print("begun", flush=True)
    hangs_here()
"""


def test_what_hangs_with_the_lock_says_where_and_is_ended() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL and out == "begun\n", err
    assert f"no thread of process {process.pid} got Python's lock for" in err and "run the same command again" in err
    assert err.index("got Python's lock") < err.index("hangs_here")


def test_only_time_in_which_it_could_have_beaten_counts() -> None:
    assert silent_for(5.0, 1.0, stopped=False) == 6.0
    assert silent_for(5.0, 3600.0, stopped=True) == 5.0
    assert silent_for(0.0, 3600.0, stopped=False) < 10.0, "the watcher stood still too"
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
        os.kill(process.pid, signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert not is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)
