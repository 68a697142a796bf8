"""A client for replicas: asks them to sample, to stop, and how they are.

Only the paths named here are ever asked for, so a replica's other endpoints cannot be reached through the proxy.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Collection, Sequence
from enum import StrEnum
from functools import partial

import aiohttp
import msgspec

from gyre_sdk.errors import ReplicaError
from gyre_sdk.harness.proxy.generate import Piece, Reading, refusal, request_body
from gyre_sdk.harness.proxy.wire import Reply, Wire, without_password
from gyre_sdk.records import Sampling

ABORT_PREFIX = "generate-tokens-"
"""What vLLM puts before the request id that it was given."""

_LARGE = 1 << 20
"""Prompts of more bytes of JSON are put into their request in a thread."""


class _Paused(msgspec.Struct):
    is_paused: bool = False


_USAGE_SECONDS = 1.0
"""How long an engine may take from an answer's last token to its usage, which comes at once where it comes."""
_GATHER_SECONDS = 0.02
"""How long events of an answer that nobody watches may wait for each other."""
_decode_paused = msgspec.json.Decoder(_Paused).decode


class Probe(StrEnum):
    """What came of asking a replica for its health."""

    LIVE = "live"
    PAUSED = "paused"
    """It answers, but queues requests until it is resumed."""
    SILENT = "silent"
    """Nothing came in time."""
    REFUSED = "refused"
    """It cannot be connected to, or broke the connection."""
    UNWELL = "unwell"
    """It answers that it is not well."""
    UNASKED = "unasked"
    """This process could open no connection: it has too many files open."""


class Upstream:
    """A client for replicas. `versions` maps labels that are not numbers, such as vLLM's `default`."""

    def __init__(self, *, versions: dict[str, int], token: str | None = None) -> None:
        self._versions = versions
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._wire = Wire(self._headers)
        self._silent: set[str] = set()
        """Replicas whose usage tells nothing of cached tokens: they are asked for none over connections that are open.

        One that was started again, with other flags maybe, is met over a new connection.
        """

    async def open(self) -> None:
        """Make the connection pool; its idle connections close before vLLM closes them (5 s)."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, read_bufsize=1 << 18, trust_env=False
        )

    def keep(self, urls: Collection[str]) -> None:
        """Forget all other replicas than these."""
        self._silent.intersection_update(urls)
        self._wire.keep(urls)

    async def close(self) -> None:
        """Close the connections."""
        self._wire.close()
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        url: str,
        *,
        request_id: str,
        prompt: bytes,
        sampled: Sequence[int] = (),
        sampling: Sampling,
        stop_ids: Sequence[int],
        max_tokens: int,
        salt: str,
        version: int,
        model: str | None = None,
        interval: int = 1,
        candidates: int = 0,
    ) -> AsyncGenerator[Piece, None]:
        """Sample; yield what comes as it comes. A piece with `finish` is the last.

        Args:
            url: the replica.
            request_id: unique for this attempt.
            prompt: ids of the prompt as JSON, without brackets.
            sampled: what the call has sampled already.
            sampling: of the call.
            stop_ids: tokens that end a turn.
            max_tokens: left for this attempt.
            salt: keeps cached keys and values of one version to that version.
            version: stands for a label that cannot be read.
            model: what the request names, where the replica serves adapters; None: nothing.
            interval: tokens per chunk that the engine may gather when nobody watches.
            candidates: likeliest tokens to tell at each place.

        Raises:
            Refused: the request itself is wrong for the engine.
            ReplicaError: the stream broke off; what was yielded before stays true.
        """
        told = url not in self._silent or not self._wire.connected(url)
        asked = partial(
            request_body,
            request_id,
            prompt,
            sampled,
            sampling,
            stop_ids,
            max_tokens,
            salt,
            model,
            interval,
            candidates,
            told,
        )
        body = await asyncio.to_thread(asked) if len(prompt) > _LARGE else asked()
        name = without_password(url)
        reading = Reading(name, self._versions, version, candidates > 0)
        try:
            reply, finished = await self._wire.post(url, "/inference/v1/generate", body, request_id), False
            try:
                if reply.status != 200:
                    raise refusal(name, reply.status, await reply.read())
                while chunk := await reply.read_any(_GATHER_SECONDS if interval > 1 else 0.0):
                    piece = reading.take(chunk)
                    if piece is not None:
                        finished = piece.finish is not None
                        if finished and told:
                            piece = await self._with_usage(url, reply, reading, piece)
                        yield piece
                        if finished:
                            return
            finally:
                reply.close(nearly_over=finished)
        except (TimeoutError, OSError) as error:
            raise ReplicaError(f"replica {name} broke off: {type(error).__name__}: {error}") from error
        raise ReplicaError(f"replica {name} ended the stream without a finish reason")

    async def abort(self, url: str, request_id: str) -> None:
        """Ask a replica to stop a request; failures do not matter, the answer would be thrown away."""
        try:
            async with asyncio.timeout(5.0):
                async with self._open_session.post(
                    f"{url}/inference/v1/abort_requests", json={"request_ids": [f"{ABORT_PREFIX}{request_id}"]}
                ) as response:
                    await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return

    async def probe(self, url: str, timeout: float) -> Probe:
        """Ask a replica for its health, and whether it is paused where it can tell (vLLM in dev mode)."""
        try:
            async with asyncio.timeout(timeout):
                async with self._open_session.get(f"{url}/health") as response:
                    if response.status != 200:
                        return Probe.UNWELL
                async with self._open_session.get(f"{url}/is_paused") as response:
                    if response.status != 200:
                        return Probe.LIVE
                    paused = _decode_paused(await response.read()).is_paused
                    return Probe.PAUSED if paused else Probe.LIVE
        except msgspec.DecodeError:
            return Probe.LIVE
        except TimeoutError:
            return Probe.SILENT
        except (aiohttp.ClientError, OSError) as error:
            own = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            return Probe.UNASKED if own else Probe.REFUSED

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ReplicaError("the upstream client is not open")
        return self._session

    async def _with_usage(self, url: str, reply: Reply, reading: Reading, last: Piece) -> Piece:
        """Return an answer's last piece with what the usage behind it says of cached tokens."""
        cached = last.cached
        try:
            async with asyncio.timeout(_USAGE_SECONDS):
                while cached is None and (data := await reply.read_any()):
                    cached = reading.cached(data)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                return last  # it is whole
        if cached is None:
            self._silent.add(url)
            return last
        self._silent.discard(url)
        return msgspec.structs.replace(last, cached=cached)
