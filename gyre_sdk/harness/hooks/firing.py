"""Hooks at work: those of one run, called event by event, and the pairs of start and stop that are open.

A hook that raises is loud: `HookError` names it, and fails the block like any other code in it. Of an event that may be
denied, the first refusal or failure is the last hook that is called; of all others every hook is called, whatever the ones
before it did.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from gyre_sdk.errors import HookError
from gyre_sdk.harness.hooks.payloads import DENIABLE, EDITABLE, Deny, Edit, LaneInfo
from gyre_sdk.harness.hooks.registry import Hooks, Registered

_log = logging.getLogger("gyre.hooks")
P = TypeVar("P", bound=LaneInfo)


class RunHooks:
    """The hooks of one run. Thread-safe.

    Every start that is told has one stop: whoever ends what was begun asks `ended` first, and tells it only when that
    says so. What is still open when the run ends is abandoned, the newest first.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._by_event = hooks.by_event()
        self._open: dict[int, Callable[[], None]] = {}
        """By key, in order of beginning: how to tell that it was abandoned."""
        self._lock = threading.Lock()

    def began(self, key: object, abandon: Callable[[], None]) -> None:
        """Remember that a start is told."""
        with self._lock:
            self._open[id(key)] = abandon

    def ended(self, key: object) -> bool:
        """Tell whether a stop is due, once."""
        with self._lock:
            return self._open.pop(id(key), None) is not None

    def abandon(self) -> None:
        """Tell the stops of all that is still open."""
        while True:
            with self._lock:
                if not self._open:
                    return
                last = self._open[next(reversed(self._open))]
            last()

    def fire(self, payload: P) -> tuple[P, Deny | None]:
        """Call the hooks of a payload's event, in order, each with the edits of those before it.

        Returns:
            The payload with all edits, and a refusal if there was one.

        Raises:
            HookError: a hook raised, or answered what the event cannot take; names it.
        """
        firing = _Firing(payload)
        for hook in firing.hooks(self._by_event):
            try:
                answer = wait_for(hook.function(firing.payload))
            except Exception as error:  # boundary: a hook may raise anything; it is named
                firing.failed(hook, error)
            else:
                firing.answered(hook, answer)
        return firing.done()

    async def afire(self, payload: P) -> tuple[P, Deny | None]:
        """Do as `fire` does, awaiting async hooks on the running event loop."""
        firing = _Firing(payload)
        for hook in firing.hooks(self._by_event):
            try:
                answer = hook.function(firing.payload)
                if inspect.isawaitable(answer):
                    answer = await answer
            except Exception as error:  # boundary: a hook may raise anything; it is named
                firing.failed(hook, error)
            else:
                firing.answered(hook, answer)
        return firing.done()


@contextmanager
def telling(error: BaseException | None) -> Iterator[None]:
    """Tell a stop: what fails in the block is raised, unless a cancellation, `error`, is on its way; that goes on."""
    try:
        yield
    except HookError as failure:
        if error is None or isinstance(error, Exception):
            raise
        error.add_note(str(failure))
        _log.error("%s", failure, exc_info=failure)


def wait_for(value: Any) -> Any:
    """Return a value; what an awaitable comes to is waited for, on an event loop in a thread of its own."""
    return _in_thread(_awaited(value)) if inspect.isawaitable(value) else value


class _Firing:
    """One event on its way through its hooks: collects edits, a refusal, failures. Calls nothing itself."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self._event = type(payload).__name__
        self._denied: Deny | None = None
        self._failure: HookError | None = None

    def hooks(self, registered: Mapping[str, tuple[Registered, ...]]) -> Iterator[Registered]:
        for hook in registered.get(self._event, ()):
            if hook.tool is not None and not hook.tool.fullmatch(self.payload.tool):
                continue
            yield hook
            if self._event in DENIABLE and (self._denied is not None or self._failure is not None):
                return

    def answered(self, hook: Registered, answer: Any) -> None:
        field = EDITABLE.get(self._event)
        if answer is None:
            return
        if isinstance(answer, Deny) and self._event in DENIABLE:
            self._denied = answer
        elif isinstance(answer, Edit) and field is not None and _only(answer, field):
            self.payload = msgspec.structs.replace(self.payload, **{field: getattr(answer, field)})
        else:
            fine = ["None"]
            if self._event in DENIABLE:
                fine.append("Deny(reason)")
            if field is not None:
                fine.append(f"Edit({field}=...)")
            self._keep(HookError(f"{hook} answered {answer!r}; it may answer {' or '.join(fine)}"))

    def failed(self, hook: Registered, error: Exception) -> None:
        failure = HookError(f"{hook} raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._keep(failure)

    def _keep(self, failure: HookError) -> None:
        if self._failure is None:
            self._failure = failure
        else:
            self._failure.add_note(str(failure))

    def done(self) -> tuple[Any, Deny | None]:
        if self._failure is not None:
            raise self._failure
        return self.payload, self._denied


def _only(edit: Edit, field: str) -> bool:
    """Tell whether an edit changes this field and no other."""
    return [name for name in edit.__struct_fields__ if getattr(edit, name) is not None] == [field]


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


_loop: asyncio.AbstractEventLoop | None = None
_making = threading.Lock()


def _in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine for a sync caller, on an event loop that lives in a thread of its own.

    A hook that is running there and makes sync code fire another async hook gets a loop beside it: it blocks its own.
    """
    global _loop
    with _making:
        if _loop is None or asyncio._get_running_loop() is _loop:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="gyre hooks", daemon=True).start()
            _loop = _loop or loop
        else:
            loop = _loop
    running = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return running.result()
    except BaseException:
        running.cancel()
        raise
