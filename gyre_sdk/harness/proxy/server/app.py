"""The proxy as a server: in the foreground (`gyre serve`) or in a thread of the process that uses it."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

from aiohttp import web

from gyre_sdk.errors import GyreError, JournalError, ProtocolError, ServiceError
from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.harness.proxy.server import openapi
from gyre_sdk.harness.proxy.server.agents import Agents
from gyre_sdk.harness.proxy.server.bodies import PATIENCE, BodyPatience
from gyre_sdk.harness.proxy.server.conduct import Services
from gyre_sdk.harness.proxy.server.connections import Runner, listen, origin
from gyre_sdk.harness.proxy.server.control import Control
from gyre_sdk.harness.proxy.server.fleet import Fleet
from gyre_sdk.harness.proxy.server.metrics import Metrics, MetricsPage, loopback
from gyre_sdk.harness.proxy.server.provider import PROVIDER_ERROR, ProviderRefusal, load_litellm, require_litellm
from gyre_sdk.harness.proxy.server.refusals import of_status, refusal
from gyre_sdk.harness.proxy.server.registry import Registry
from gyre_sdk.harness.proxy.server.settings import ProxySettings, new_key
from gyre_sdk.harness.proxy.server.templates import Templates
from gyre_sdk.harness.proxy.upstream import Upstream
from gyre_sdk.journal import Journal

log = logging.getLogger(__name__)
_START_LIMIT = 60.0
_METRICS = web.AppKey("metrics", Metrics)


class ProxyServer:
    """One proxy: a store, a model's template, replicas, and an HTTP server.

    Args:
        settings: what to serve.
        template: takes the place of the model's own, for models that no renderer covers.

    Raises:
        SettingsError: the model folder or the renderer is wrong (on construction).
        JournalError: the store cannot be opened (on start).
    """

    def __init__(self, settings: ProxySettings, template: Template | None = None) -> None:
        self.settings = settings
        self.service_key = settings.service_key or new_key()
        self.url = ""
        """`http://host:port` once started."""
        self.routes: frozenset[tuple[str, str]] = frozenset()
        """Method and path of everything that is served, once started."""
        if settings.hosted:
            require_litellm()
        self._templates = Templates(settings, template)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def serve(
        self, started: Callable[[str], None] = lambda url: None, listening: socket.socket | None = None
    ) -> None:
        """Serve until `stop` is called or the task is cancelled.

        Args:
            started: gets the address.
            listening: where connections come in, which this closes; None listens as the settings say.

        Raises:
            ServiceError: the port is taken; nothing has been made then.
        """
        with closing(listening or listen(self.settings.host, self.settings.port)) as connections:
            await self._serve(started, connections)

    async def _serve(self, started: Callable[[str], None], listening: socket.socket) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        upstream = Upstream(versions=self.settings.version_labels, token=self.settings.replica_token)
        journal = await asyncio.to_thread(Journal, self.settings.store)
        journal.join_loop(self._loop)
        await upstream.open()
        fleet = Fleet(upstream, self.settings.replicas)
        tasks: set[asyncio.Task[None]] = set()

        def spawn(work: Any) -> asyncio.Task[None]:
            task: asyncio.Task[None] = asyncio.create_task(work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            return task

        services = Services(self.settings, journal, self._templates, fleet, spawn)
        registry = Registry(journal, self.settings)
        control = Control(services, registry, self.service_key)
        guard = None if loopback(self.settings.host) else control.guarded
        metrics = MetricsPage(services.metrics, fleet.routes, registry.calls_in_flight, guard)
        app = _application(services, Agents(services, registry), control, metrics)
        self.routes = _served(app)
        runner = Runner(
            app,
            self.settings.head_patience,
            auto_decompress=False,
            lingering_time=1.0,
            shutdown_timeout=1.0,
        )
        try:
            await runner.setup()
            self.url = origin(self.settings.host, listening.getsockname()[1])
            control.url = (self.settings.public_url or self.url).rstrip("/")
            site = web.SockSite(runner, listening, backlog=1024)
            await site.start()
            spawn(fleet.watch())
            spawn(registry.release(fleet.routes.forget))
            if self.settings.hosted:
                spawn(asyncio.to_thread(load_litellm))  # takes seconds: not in the first call
            started(self.url)
            await self._stop.wait()
            await site.stop()
            await self._drain(registry)
        finally:
            await runner.cleanup()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await fleet.close()
            await upstream.close()
            journal.leave_loop()
            await asyncio.to_thread(journal.close)

    def stop(self) -> None:
        """Stop serving: calls in flight get the settings' grace, then their durable tokens wait for the next start."""
        if self._loop is not None and self._stop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join()

    def start_in_thread(self) -> ProxyServer:
        """Serve in a thread of this process; return when the address is known.

        Raises:
            GyreError: what kept the server from starting.
        """
        ready = threading.Event()
        problems: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(self.serve(lambda url: ready.set()))
            except BaseException as error:  # boundary: the thread's caller gets it
                problems.append(error)
            finally:
                ready.set()

        self._thread = threading.Thread(target=run, name="gyre proxy", daemon=True)
        self._thread.start()
        if not ready.wait(_START_LIMIT):
            raise ServiceError(f"the proxy did not start within {_START_LIMIT:.0f} s")
        if problems:
            problem = problems[0]
            raise problem if isinstance(problem, GyreError) else ServiceError(f"the proxy did not start: {problem}")
        return self

    async def _drain(self, registry: Registry) -> None:
        live = [call for run in registry.runs for call in run.live]
        try:
            async with asyncio.timeout(self.settings.grace):
                for call in live:
                    await call.stopped()
        except TimeoutError:
            log.warning("stopped with calls in flight; their durable tokens are in the store")


def _application(services: Services, agents: Agents, control: Control, metrics: MetricsPage) -> web.Application:
    app = web.Application(client_max_size=services.settings.max_body, middlewares=[_errors])
    app[_METRICS] = services.metrics
    app[PATIENCE] = BodyPatience(services.settings.body_patience, services.settings.client_patience)
    own = [web.head("/", _there), web.get("/health", _health), openapi.page()]
    app.add_routes([*own, *agents.routes(), *control.routes(), *metrics.pages()])
    return app


def _served(app: web.Application) -> frozenset[tuple[str, str]]:
    """Return what an application serves; HEAD only where it is not GET without the body."""
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    return frozenset(item for item in routes if item[0] != "HEAD" or ("GET", item[1]) not in routes)


async def _there(request: web.Request) -> web.Response:
    """Answer programs that ask, without a key, whether anything listens here."""
    return web.Response()


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ProtocolError as error:
        return _refused(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        problem = of_status(f"{request.method} {request.path}", error.status, error.reason)
        return _refused(request, problem)
    except ConnectionError:
        raise
    except JournalError as error:
        log.error("%s %s failed: %s", request.method, request.path, error)
        return _refused(request, ProtocolError(str(error), status=500, code="store_failed", retryable=True))
    except Exception:  # boundary: a defect of ours is an error of one request, not of the server
        log.exception("%s %s failed", request.method, request.path)
        problem = ProtocolError("internal error", status=500, code="internal_error", retryable=True)
        return _refused(request, problem)


def _refused(request: web.Request, error: ProtocolError) -> web.Response:
    """Return the answer that tells of an error.

    Raises:
        ConnectionError: another answer has begun: the connection ends, so that it does not look whole.
    """
    if request.writer.output_size > 0:
        raise ConnectionResetError("an answer has begun; another one cannot take its place")
    code = PROVIDER_ERROR if isinstance(error, ProviderRefusal) else error.code  # one of ours: labels are few
    request.app[_METRICS].refusals.add(str(error.status), code)
    return refusal(request.path, request.headers, error)
