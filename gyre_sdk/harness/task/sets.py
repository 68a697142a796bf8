"""Sets of tasks: read from folders, rows or Python, filtered, split the same way every time."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import importlib
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task.model import Task
from gyre_sdk.harness.task.rows import read_rows, row_task
from gyre_sdk.harness.task.swebench import SwebenchOptions

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_ROWS = (".jsonl", ".ndjson")


class TaskSet(Sequence[Task]):
    """Tasks with names of their own, in a fixed order. Every selection is a new set; nothing depends on the order of a file.

    Raises:
        TaskError: two tasks have one name.
    """

    def __init__(self, tasks: Iterable[Task], *, source: str = "tasks") -> None:
        self._tasks = tuple(tasks)
        self._by_name = {task.name: task for task in self._tasks}
        self.source = source
        if len(self._by_name) < len(self._tasks):
            names = [task.name for task in self._tasks]
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise TaskError(f"{source} has two tasks named {twice!r}; give each its own name")

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        swebench: SwebenchOptions | None = None,
        variables: dict[str, str] | None = None,
        **options: Any,
    ) -> TaskSet:
        """Read tasks.

        Args:
            source: a task folder; a folder of task folders, at any depth; a glob of task folders; a file of rows (`.jsonl`);
                or `module:attribute`, a task, an iterable of tasks or a function that returns one, called with `options`.
            swebench: how rows of that kind run.
            variables: values for `${NAME}` in task folders.

        Raises:
            TaskError: there are no tasks, or one of them is wrong.
        """
        text = str(source)
        path = Path(source)
        if path.is_dir():
            found: Iterable[Task] = [Task.load(folder, variables=variables) for folder in task_folders(path)]
        elif path.is_file() and path.suffix in _ROWS:
            chosen = swebench or SwebenchOptions()
            found = [row_task(row, place, folder=path.parent, swebench=chosen) for place, row in read_rows(path)]
        elif _REFERENCE.fullmatch(text) and not path.exists():
            found = _from_python(text, options)
        elif any(sign in text for sign in "*?["):
            root = Path(path.anchor)
            matches = sorted(root.glob(str(path.relative_to(root)) if path.anchor else text))
            found = [Task.load(folder, variables=variables) for folder in matches if (folder / "task.toml").is_file()]
        else:
            raise TaskError(
                f"{text!r} is neither a folder, a .jsonl file, a glob nor module:attribute; check the path, or write rows as JSON lines"
            )
        made = cls(found, source=text)
        if not made:
            raise TaskError(f"{text!r} has no tasks; a task folder has a task.toml")
        return made

    def filter(
        self,
        *,
        names: Iterable[str] = (),
        exclude: Iterable[str] = (),
        tags: Iterable[str] = (),
        difficulty: Iterable[str] = (),
        matching: str | None = None,
        where: Callable[[Task], bool] | None = None,
    ) -> TaskSet:
        """Return the tasks that every given condition allows.

        Args:
            names: globs of names, of which one must match; a name without `*`, `?` and `[` must be there.
            exclude: globs of names, of which none may match.
            tags: words of which the task must have one.
            difficulty: values of `difficulty` in the task's metadata, of which one must be its.
            matching: regular expression that is found in the name or the instruction.
            where: any other condition.

        Raises:
            TaskError: a plain name is no task's, or the expression is malformed.
        """
        wanted, unwanted, tagged, hard = tuple(names), tuple(exclude), set(tags), {str(item) for item in difficulty}
        for name in wanted:
            if not set(name) & set("*?[") and name not in self._by_name:
                raise self._absent(name)
        try:
            pattern = re.compile(matching) if matching is not None else None
        except re.error as error:
            raise TaskError(f"matching = {matching!r} is not a regular expression ({error}); correct it") from None

        def keep(task: Task) -> bool:
            return (
                (not wanted or any(fnmatch.fnmatchcase(task.name, glob) for glob in wanted))
                and not any(fnmatch.fnmatchcase(task.name, glob) for glob in unwanted)
                and (not tagged or bool(tagged & set(task.tags)))
                and (not hard or str(task.metadata.get("difficulty")) in hard)
                and (pattern is None or bool(pattern.search(task.name) or pattern.search(task.instruction)))
                and (where is None or where(task))
            )

        return TaskSet((task for task in self if keep(task)), source=self.source)

    def split(self, *, train: float = 0.8, seed: int = 0) -> tuple[TaskSet, TaskSet]:
        """Return (train, test): a task's side depends on its name and the seed alone, never on the other tasks.

        Args:
            train: share of all possible names that is for training; a small set comes only near to it.

        Raises:
            TaskError: the share is not between 0 and 1.
        """
        if not 0 <= train <= 1:
            raise TaskError(f"train = {train!r}; give a share from 0 to 1")
        sides: tuple[list[Task], list[Task]] = ([], [])
        for task in self:
            sides[_place(task.name, seed) >= train].append(task)
        return TaskSet(sides[0], source=f"{self.source} (train)"), TaskSet(sides[1], source=f"{self.source} (test)")

    def shuffled(self, seed: int = 0) -> TaskSet:
        """Return the tasks in an order that the seed and the names decide, whatever order they have now."""
        ordered = sorted(self, key=lambda task: task.name)
        random.Random(seed).shuffle(ordered)
        return TaskSet(ordered, source=self.source)

    def sample(self, count: int, *, seed: int = 0) -> TaskSet:
        """Return `count` of the tasks (all, when there are fewer), chosen by the seed; a larger sample has the smaller in it."""
        return TaskSet(self.shuffled(seed)[: max(0, count)], source=self.source)

    def replace(self, **changes: Any) -> TaskSet:
        """Return the tasks with some fields of each replaced, `network="full"` for example."""
        return TaskSet((dataclasses.replace(task, **changes) for task in self), source=self.source)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks, in order."""
        return tuple(self._by_name)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    @overload
    def __getitem__(self, at: int | str) -> Task: ...
    @overload
    def __getitem__(self, at: slice) -> TaskSet: ...
    def __getitem__(self, at: int | str | slice) -> Task | TaskSet:
        """Return a task by place or name, or the set of a slice."""
        if isinstance(at, str):
            if at not in self._by_name:
                raise self._absent(at)
            return self._by_name[at]
        return TaskSet(self._tasks[at], source=self.source) if isinstance(at, slice) else self._tasks[at]

    def _absent(self, name: str) -> TaskError:
        some = ", ".join(list(self._by_name)[:8])
        return TaskError(f"{self.source} has no task named {name!r}; it has {some}{' ...' if len(self) > 8 else ''}")

    def __repr__(self) -> str:
        return f"TaskSet({self.source!r}, {len(self)} tasks)"


def task_folders(folder: Path) -> list[Path]:
    """Return the task folders at or below a folder, sorted; a task folder's own folders are not searched."""
    if (folder / "task.toml").is_file():
        return [folder]
    found = []
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.name.startswith("."):
            found += task_folders(child)
    return found


def _place(name: str, seed: int) -> float:
    """Return a number in [0, 1) that name and seed decide."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") / 2**64


def _from_python(reference: str, options: dict[str, Any]) -> Iterable[Task]:
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise TaskError(
            f"{reference!r}: there is no module {error.name!r}; name one that is installed or lies here"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise TaskError(f"{reference!r}: {module_name} has no {part!r}; name a task, tasks or a function")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, Task):
        found = found(**options)
    found = [found] if isinstance(found, Task) else found
    if not isinstance(found, Iterable) or isinstance(found, str | bytes):
        raise TaskError(f"{reference!r} is {type(found).__name__}; name a task, tasks or a function that returns them")
    tasks = list(found)
    wrong = next((item for item in tasks if not isinstance(item, Task)), None)
    if wrong is not None:
        raise TaskError(f"{reference!r} has {wrong!r} in it, which is no Task; give tasks only")
    return tasks
