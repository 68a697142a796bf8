"""Child processes of the service: started, watched, started again on the same port when they die, ended with it.

A child prints a line that ends in its address when it serves. Its stdin stays open as long as this process lives: a
child takes its end as the order to stop, so that none outlives a service that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from gyre_sdk.errors import ServiceError

log = logging.getLogger(__name__)
_DEATHS, _WINDOW = 5, 60.0
"""A child that dies so many times in so many seconds is given up."""
_POLL = 0.02
"""Seconds between looks at whether a child lives."""
_READY = 180.0
"""Seconds that a child has to get ready."""


async def _nothing(url: str) -> None:
    return None


class Child:
    """One supervised process.

    Args:
        name: for messages.
        command: arguments of Python, by port; 0 is any free one.
        mark: begins the line that tells the address.
        port: of the first start.
        feed: gives what the child reads first from stdin, by port.
        grace: seconds between SIGTERM and SIGKILL.
        on_restart: called with the address after every start but the first, before the child counts as ready.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], list[str]],
        mark: str,
        *,
        port: int = 0,
        feed: Callable[[int], bytes] = lambda port: b"",
        grace: float = 10.0,
        on_restart: Callable[[str], Awaitable[None]] = _nothing,
    ) -> None:
        self.name = name
        self.url = ""
        self.ready = asyncio.Event()
        """Set while the child serves."""
        self._command = command
        self._mark = mark
        self._port = port
        self._feed = feed
        self._grace = grace
        self._on_restart = on_restart
        self._process: asyncio.subprocess.Process | None = None
        self._echo: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Process id of the child that runs now, or 0."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> str:
        """Start the child; return its address when it serves.

        Raises:
            ServiceError: it ended before, or took too long.
        """
        self.url = await self._launch()
        self._port = int(self.url.rsplit(":", 1)[1])
        self.ready.set()
        return self.url

    async def watch(self) -> None:
        """Start the child again whenever it dies, until cancelled.

        Raises:
            ServiceError: it died too often.
        """
        loop = asyncio.get_running_loop()
        deaths: deque[float] = deque(maxlen=_DEATHS)
        while True:
            assert self._process is not None
            status = await _ended(self._process)
            self.ready.clear()
            self._let_go()
            deaths.append(loop.time())
            if len(deaths) == _DEATHS and deaths[-1] - deaths[0] < _WINDOW:
                raise ServiceError(f"the {self.name} died {_DEATHS} times within {_WINDOW:.0f} s, last with {status}")
            log.warning("the %s ended with %s and is started again", self.name, status)
            try:
                await self._on_restart(await self._launch())
            except ServiceError as error:
                log.warning("%s", error)
                continue
            self.ready.set()

    async def stop(self) -> None:
        """End the child: SIGTERM, and SIGKILL after the grace."""
        self.ready.clear()
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._grace):
                    await _ended(process)
            except TimeoutError:
                log.warning("the %s did not end in %.0f s and is killed", self.name, self._grace)
                process.kill()
                await _ended(process)
        self._let_go()

    async def _launch(self) -> str:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command(self._port),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(self._feed(self._port))
        try:
            async with asyncio.timeout(_READY):
                while line := await process.stdout.readline():
                    text = line.decode("utf-8", "replace")
                    if text.startswith(self._mark):
                        self._echo = asyncio.create_task(_pass_on(process.stdout))
                        return text[len(self._mark) :].split()[0].rstrip("/")
                    sys.stderr.write(text)
                status = await _ended(process)
        except TimeoutError:
            process.kill()
            raise ServiceError(f"the {self.name} was not ready after {_READY:.0f} s") from None
        raise ServiceError(f"the {self.name} did not start: it ended with {status}; its own message is above")

    def _let_go(self) -> None:
        """Close what is left of an ended process; a watcher that it left behind ends with that."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._echo is not None:
            self._echo.cancel()


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process; `Process.wait` would wait for those too that it left behind with its pipes."""
    while process.returncode is None:  # noqa: ASYNC110 (asyncio has no event for it)
        await asyncio.sleep(_POLL)
    return process.returncode


async def supervise(children: Sequence[Child], stop: asyncio.Event) -> None:
    """Keep children running until `stop` is set.

    Raises:
        ServiceError: one of them died too often.
    """
    stopping = asyncio.create_task(stop.wait())
    watching = [asyncio.create_task(child.watch()) for child in children]
    try:
        done, _ = await asyncio.wait([stopping, *watching], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (stopping, *watching):
            task.cancel()
        await asyncio.gather(stopping, *watching, return_exceptions=True)


async def _pass_on(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        sys.stderr.write(line.decode("utf-8", "replace"))
