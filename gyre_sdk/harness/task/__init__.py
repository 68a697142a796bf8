"""Tasks: built in code, loaded from Harbor folders, made of benchmark rows, gathered in sets."""

from __future__ import annotations

from gyre_sdk.harness.task.model import Scorer, Task, contents, read_folder
from gyre_sdk.harness.task.parts import Artifact, Files, Healthcheck, Network, Service, Step
from gyre_sdk.harness.task.prepare import await_healthy, begin_step
from gyre_sdk.harness.task.sets import TaskSet
from gyre_sdk.harness.task.steps import below, combine
from gyre_sdk.harness.task.swebench import SwebenchOptions, swebench_task

__all__ = [
    "Artifact",
    "Files",
    "Healthcheck",
    "Network",
    "Scorer",
    "Service",
    "Step",
    "SwebenchOptions",
    "Task",
    "TaskSet",
    "await_healthy",
    "begin_step",
    "below",
    "combine",
    "contents",
    "read_folder",
    "swebench_task",
]
