"""The HTTP face for agents: authenticate, find the turn, deliver its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gyre_sdk.harness.proxy.dialects import Dialect
from gyre_sdk.harness.proxy.dialects.messages import count_body, parse_count
from gyre_sdk.harness.proxy.server.bodies import read_body
from gyre_sdk.harness.proxy.server.conduct import Services
from gyre_sdk.harness.proxy.server.conversations import Conversations, in_progress
from gyre_sdk.harness.proxy.server.delivery import Delivery
from gyre_sdk.harness.proxy.server.intake import Asked, Intake
from gyre_sdk.harness.proxy.server.prepare import count_prompt
from gyre_sdk.harness.proxy.server.protocols import DIALECTS
from gyre_sdk.harness.proxy.server.registry import Registry
from gyre_sdk.harness.proxy.server.state import Lane

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Agents:
    """Handlers under `/v1`."""

    def __init__(self, services: Services, registry: Registry) -> None:
        self._services = services
        self._registry = registry
        self._conversations = Conversations(services.journal)
        self._intake = Intake(services, self._conversations)
        self._delivery = Delivery(services.settings.heartbeat, services.settings.client_patience)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            *(web.post(path, self._sampling(dialect)) for path, dialect in DIALECTS.items()),
            web.post("/v1/messages/count_tokens", self.count_tokens),
            web.get("/v1/responses/{response}", self.response),
            web.post("/v1/responses/{response}/cancel", self.cancel_response),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
        ]

    async def models(self, request: web.Request) -> web.Response:
        """List the policy and the hosted models, in the form of the protocol that the headers name."""
        await self._registry.lane(bearer(request))
        settings = self._services.settings
        names = [
            *([settings.model_name] if settings.model is not None or not settings.hosted else []),
            *settings.hosted,
        ]
        if "anthropic-version" in request.headers:
            data = [_anthropic_model(name) for name in names]
            return web.json_response({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})
        return web.json_response({"object": "list", "data": [_model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        """Describe a model: any name is served, by the one policy."""
        await self._registry.lane(bearer(request))
        name = request.match_info["model"]
        return web.json_response(_anthropic_model(name) if "anthropic-version" in request.headers else _model(name))

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Tell how many tokens a request's prompt would have. Nothing is recorded: nothing is sampled."""
        lane = (await self._registry.lane(bearer(request))).serving
        body = await read_body(request, self._services.settings.max_body)
        return _json(count_body(await count_prompt(self._services, lane, parse_count(body), len(body))))

    async def response(self, request: web.Request) -> web.Response:
        """Show a response of the key's run."""
        run = (await self._registry.lane(bearer(request))).run
        return _json(await self._conversations.show(run, _response_name(request)))

    async def cancel_response(self, request: web.Request) -> web.Response:
        """End a response that is in flight."""
        run = (await self._registry.lane(bearer(request))).run
        return _json(await self._conversations.cancel(run, _response_name(request)))

    def _sampling(self, dialect: Dialect) -> Handler:
        async def serve(request: web.Request) -> web.StreamResponse:
            lane = (await self._registry.lane(bearer(request))).serving
            with lane.run.asked_for():
                return await answer(request, lane)

        async def answer(request: web.Request, lane: Lane) -> web.StreamResponse:
            body = await read_body(request, self._services.settings.max_body)
            count = request.headers.get("x-stainless-retry-count", "0")
            asked = Asked(
                lane=lane,
                dialect=dialect,
                body=body,
                connection=request.transport,
                retry=count not in ("0", ""),
                key=request.headers.get("Idempotency-Key"),
                headers=request.headers,
            )
            turn = await self._intake.turn(asked)
            turn.connections.add(request.transport)
            try:
                await turn.ready.wait()
                if turn.problem is not None:
                    raise turn.problem
                if not turn.request.stream and turn.request.fields.get("background") is True:
                    return _json(in_progress(turn))
                deliver = self._delivery.streamed if turn.request.stream else self._delivery.whole
                return await deliver(request, dialect, turn)
            finally:
                turn.connections.discard(request.transport)

        return serve


def bearer(request: web.Request) -> str:
    """Return the key that a request carries, or an empty string; what is no text is no key."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key") or request.headers.get("api-key") or ""
    key = key.strip()
    return key if key.isprintable() else ""


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}


def _anthropic_model(name: str) -> dict[str, object]:
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def _response_name(request: web.Request) -> str:
    return request.match_info["response"].removeprefix("resp_")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
