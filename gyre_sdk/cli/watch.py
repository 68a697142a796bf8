"""`gyre view`: follow a store in the terminal."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gyre_sdk.cli.follow import Follower
from gyre_sdk.cli.store import Store, open_store
from gyre_sdk.view import LiveView

_POLL = 0.5
"""Seconds between two looks at the store."""


def view(
    store: Store,
    once: Annotated[bool, typer.Option("--once", help="Show what is there now, and end.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines, also in a terminal.")] = False,
) -> None:
    """Watch the runs of a store, live; Ctrl-C ends the view and nothing else."""
    with open_store(store) as journal, LiveView(plain=plain) as live:
        follower = Follower(journal)
        try:
            while True:
                for event in follower.poll():
                    live(event)
                if once:
                    return
                time.sleep(_POLL)
        except KeyboardInterrupt:
            return
