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
"""Builds a run's tree and tells what it found: `unique` tokens, and more. What it has from the round before, its `clear`
lets go, where it has one."""


def serve(prepare: Callable[[History], Work], others: Mapping[str, Callable[[Any], Any]] | None = None) -> None:
    """Answer until standard input ends.

    Args:
        prepare: makes what the system starts from, which is not timed.
        others: further commands, on what `prepare` made.
    """
    shape, *sizes = sys.argv[1:]
    work = prepare(history(shape, *map(int, sizes)))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        word = line.strip()
        told = _timed(work) if word == "round" else (others or {})[word](work)
        print(json.dumps(told), flush=True)


def _timed(work: Work) -> dict[str, Any]:
    getattr(work, "clear", lambda: None)()
    gc.collect()
    gc.disable()  # the collector visits what others hold: not the work itself
    started, used = time.perf_counter(), time.process_time()
    told = work()
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    gc.enable()
    return {"seconds": seconds, "cpu": cpu, **told}
