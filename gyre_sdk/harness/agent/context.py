"""What all lanes of a run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gyre_sdk.harness.agent.meter import Meter
from gyre_sdk.harness.hooks import RunHooks
from gyre_sdk.harness.ports import Clock, Observer, Workspace
from gyre_sdk.harness.service import ServiceClient
from gyre_sdk.harness.task import Task
from gyre_sdk.records import Score


@dataclass(slots=True)
class RunContext:
    """What all lanes of a run share. Internal."""

    task: Task
    run: str
    service: ServiceClient
    workspace: Workspace
    clock: Clock
    hooks: RunHooks
    observer: Observer
    meter: Meter
    score: Callable[[], Score]
    steps: Callable[[], Iterator[Task]]
