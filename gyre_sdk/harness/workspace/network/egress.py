"""An HTTP proxy that lets a workspace reach the hosts of its allow list, and nothing else.

It takes `CONNECT host:port` and requests in absolute form (https://www.rfc-editor.org/rfc/rfc9112#section-3.2.2). Names are
resolved here, never inside, and the connection goes to an address that was checked: a name whose next answer is another
address gains nothing. It cannot see into a tunnel: with a host that many sites share (a content network), the allow list
names the network, not the site.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
from aiohttp import web
from yarl import URL

from gyre_sdk.harness.workspace.network.addresses import (
    Address,
    AllowList,
    canonical,
    literal,
    split_authority,
)
from gyre_sdk.harness.workspace.network.connections import Connections
from gyre_sdk.harness.workspace.network.forwarding import forward, open_client, passed_on
from gyre_sdk.harness.workspace.network.serving import Service
from gyre_sdk.harness.workspace.network.tunnel import Tunnel

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives the addresses of a host name (and port), best first; raises OSError when there are none."""
Check = Callable[[Address], str | None]
"""Gives why an address must not be connected to, or None."""

log = logging.getLogger(__name__)
_RESOLVE_S, _CONNECT_S = 10.0, 10.0
_TRIED = 3
"""Addresses of a name that are tried."""
_REMEMBERED = 100
"""Refused hosts whose counts are kept."""
_NOT_FORWARDED = frozenset(("host", "proxy-authorization"))


class Refused(PermissionError):
    """The allow list says no. Internal; the message is for whoever asked."""


class Egress(Service):
    """Connects a workspace to allowed hosts.

    Args:
        allowed: host names, `*.` and one, addresses, CIDR ranges, in lower case.
        resolve: how names are resolved; None asks this machine's resolver.
        check: decides about addresses; None is the list's own rule (`AllowList.refuses`), and never this machine's.
    """

    def __init__(self, allowed: Sequence[str], *, resolve: Resolve | None = None, check: Check | None = None) -> None:
        self._allowed = AllowList.of(allowed)
        self._listed = ", ".join(allowed) or "nothing"
        self._resolve = resolve or _ask_this_machine
        self._check = check or self._refuses
        self.refused: Counter[str] = Counter()
        """Host -> times it was refused: what to add to the list, or to worry about."""
        self._client: aiohttp.ClientSession | None = None
        self._server: Connections | None = None
        self._tunnels: set[Tunnel] = set()

    async def start(self) -> None:
        """See `Service`."""
        self._client = open_client(_CONNECT_S)
        self._server = Connections(self._answer, _said)

    def connection(self) -> asyncio.Protocol:
        """See `Service`."""
        assert self._server is not None
        return Tunnel(self._server, self.reach, self._tunnels)

    @property
    def connections(self) -> int:
        """See `Service`."""
        return len(self._tunnels)

    async def stop(self) -> None:
        """See `Service`."""
        for tunnel in list(self._tunnels):
            tunnel.abort()
        if self._server is not None:
            await self._server.shutdown(0.1)
        if self._client is not None:
            await self._client.close()

    async def reach(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host that may be connected to, best first.

        Raises:
            Refused: none, and why.
            OSError: the name does not resolve.
        """
        try:
            return await self._reach(host, port)
        except Refused as error:
            if host in self.refused or len(self.refused) < _REMEMBERED:
                self.refused[host] += 1
            log.info("egress refused: %s", error)
            raise

    async def _reach(self, host: str, port: int) -> list[str]:
        try:
            written = literal(host)
        except ValueError as error:
            raise Refused(f"{error}; ask for a host by its name") from None
        if written is not None:
            if not self._allowed.lists(written):
                raise Refused(f"{host} is an address; ask for a host by its name, or list the address ({self._listed})")
            found = [str(written)]
        else:
            if not self._allowed.names_it(host):
                raise Refused(f"{host} is not among the task's allowed hosts ({self._listed})")
            async with asyncio.timeout(_RESOLVE_S):
                found = list(await self._resolve(canonical(host), port))
        reasons = {text: self._check(address) for text in found if (address := literal(text)) is not None}
        permitted = [text for text, reason in reasons.items() if reason is None]
        if not permitted:
            why = "; ".join(f"{text} {reason}" for text, reason in reasons.items()) or "it has no address"
            raise Refused(f"{host} is not connected to: {why}")
        return permitted[:_TRIED]

    def _refuses(self, address: Address) -> str | None:
        return self._allowed.refuses(address) or ("is this machine" if is_own(address) else None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request in absolute form."""
        try:
            url = URL(request.raw_path, encoded=True)
            if url.scheme != "http" or not url.raw_host or url.user:
                raise ValueError
            host, port = split_authority(url.raw_authority, 80)
        except ValueError:
            return _said(400, "this is an egress proxy: ask http://host/path, or CONNECT host:port")
        try:
            addresses = await self.reach(host, port)
        except Refused as error:
            return _said(403, str(error))
        except (OSError, TimeoutError) as error:
            return _said(502, f"{host} does not resolve: {error or 'no answer'}")
        assert self._client is not None
        headers = [*passed_on(request.headers, _NOT_FORWARDED), ("Host", url.raw_authority)]
        places = [url.with_host(address) for address in addresses]

        def failed(error: Exception) -> web.Response:
            return _said(502, f"{host} cannot be reached: {error}")

        return await forward(request, self._client, places, headers, failed)


def _said(status: int, message: str) -> web.Response:
    return web.Response(status=status, text=message + "\n")


async def _ask_this_machine(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own(address: Address) -> bool:
    """Tell whether an address is one of this machine's: to reach it, the machine would send from it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))  # sends nothing
            return str(probe.getsockname()[0]).partition("%")[0] == str(address)
    except OSError:
        return False  # no way there at all
