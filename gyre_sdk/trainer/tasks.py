"""The user's code that a config names: the tasks and the agent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.task import Task
from gyre_sdk.trainer.config import AgentConfig, TasksConfig


def load_tasks(config: TasksConfig, base: Path) -> list[Task]:
    """Return the tasks of a config, in a fixed order.

    Args:
        base: folder of the config file: modules next to it can be named.

    Raises:
        SettingsError: there are none, or two have one name.
        TaskError: a task folder is wrong.
    """
    if config.folder is not None:
        root = Path(config.folder.anchor)
        folders = sorted(root.glob(str(config.folder.relative_to(root))))
        folders = [folder for folder in folders if (folder / "task.toml").is_file()]
        found: Sequence[Task] = [Task.load(folder) for folder in folders]
        source = f"tasks.folder = {str(config.folder)!r}"
    else:
        assert config.loader is not None
        found = list(resolve(config.loader, "tasks.loader", base)(**config.options))
        source = f"tasks.loader = {config.loader!r}"
    if not found:
        raise SettingsError(f"{source} gives no tasks; check the path or the loader's options")
    names = [task.name for task in found]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise SettingsError(f"{source} gives two tasks named {twice!r}; give each its own name")
    return list(found)


def load_agent(config: AgentConfig, base: Path) -> Callable[..., Any]:
    """Return the agent function: it is called as `function(agent, **options)`, and what an async one comes to is waited for."""
    return resolve(config.function, "agent.function", base)


def resolve(reference: str, key: str, base: Path) -> Callable[..., Any]:
    """Return what `module:function` names.

    Raises:
        SettingsError: naming the key, when there is no such thing.
    """
    module_name, _, name = reference.partition(":")
    if str(base) not in sys.path:
        sys.path.insert(0, str(base))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise SettingsError(
            f"{key} = {reference!r}: there is no module {error.name!r}; name one that is installed or lies in {base}"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise SettingsError(f"{key} = {reference!r}: {module.__file__} has no function {name!r}")
    return found  # type: ignore[no-any-return]
