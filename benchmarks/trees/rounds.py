"""The clock of every system that is compared: a child process that builds one run's tree when told to, and says how long.

Runs with the python of a peer's environment. Arguments: `SHAPE TOKENS CALLS ANSWER`. Commands on standard input, JSON values
on standard output: `round`, or a word that the system itself knows.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trees.histories import History, history

Work = Callable[[], Mapping[str, Any]]
"""Builds a run's tree and tells what it found: `unique` tokens, and more."""


def serve(prepare: Callable[[History], Work], others: Mapping[str, Callable[[History], Any]] | None = None) -> None:
    """Answer until standard input ends.

    Args:
        prepare: makes what the system starts from, which is not timed.
        others: further commands.
    """
    shape, *sizes = sys.argv[1:]
    run = history(shape, *map(int, sizes))
    work = prepare(run)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "round":
            gc.collect()
            gc.disable()  # the collector visits what others hold: not the work itself
            started, used = time.perf_counter(), time.process_time()
            told = work()
            seconds, cpu = time.perf_counter() - started, time.process_time() - used
            gc.enable()
            print(json.dumps({"seconds": seconds, "cpu": cpu, **told}), flush=True)
        else:
            print(json.dumps((others or {})[word](run)), flush=True)
