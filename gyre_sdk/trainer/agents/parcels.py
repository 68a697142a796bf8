"""Tasks as they go to the agents' process: pickled, once each."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.task import Task


class Parcels:
    """Knows what tasks are called on the line.

    Args:
        listed: the tasks of `[tasks]`: those that cannot be pickled the process loads itself.
    """

    def __init__(self, listed: Sequence[Task]) -> None:
        self._listed = {id(task): task for task in listed}
        self._keys: dict[int, tuple[Task, str]] = {}
        """By the identity of the task, which is kept so that no other gets the same."""
        self._tasks: dict[str, Task] = {}

    def key_of(self, task: Task) -> str:
        """Return what a task is called; empty for one that only the process itself can load.

        Raises:
            SettingsError: it can neither be sent nor loaded there.
        """
        if id(task) not in self._keys:
            self._keys[id(task)] = (task, self._named(task))
        return self._keys[id(task)][1]

    def packed(self, key: str) -> bytes:
        """Return a task that was named."""
        return pickle.dumps(self._tasks[key])

    def _named(self, task: Task) -> str:
        try:
            key = hashlib.sha256(pickle.dumps(task)).hexdigest()[:16]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if id(task) in self._listed:
                return ""
            raise SettingsError(
                f"task {task.name!r} cannot be sent to the agents' process: {error}; give it a scorer that is a function of"
                " a module, not a lambda or an inner function"
            ) from error
        self._tasks[key] = task
        return key
