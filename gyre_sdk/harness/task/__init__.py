"""Tasks: built in code, loaded from Harbor folders, made of benchmark rows, gathered in sets."""

from __future__ import annotations

from gyre_sdk.harness.task.model import Scorer, Task, contents, read_folder
from gyre_sdk.harness.task.parts import Artifact, Files, Healthcheck, Network, Step

__all__ = ["Artifact", "Files", "Healthcheck", "Network", "Scorer", "Step", "Task", "contents", "read_folder"]
