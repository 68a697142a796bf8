"""Which hosts a workspace with an allow list may talk to: by name before resolution, by address after it. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Range = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16",
        "fe80::/10",
        "fd00:ec2::254/128",
        "100.100.100.200/32",
        "168.63.129.16/32",
        "192.0.0.192/32",
    )
)
"""Where clouds keep credentials for their machines: link-local, and the ones of AWS (IPv6), Alibaba, Azure and Oracle."""
PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "198.18.0.0/15")
)
"""IPv4 ranges that lead to this machine, its neighbours or other containers, never to the internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NUMBER = re.compile(r"\d+|0[xX][0-9a-fA-F]*")


def literal(host: str) -> Address | None:
    """Return the address that a host is written as, or None for a name.

    Raises:
        ValueError: it ends in a number and is no plain address: `127.1`, `2130706433` and `0x7f.0.0.1` are addresses to
            some resolvers (https://url.spec.whatwg.org/#ends-in-a-number-checker).
    """
    bare = host.removeprefix("[").removesuffix("]").partition("%")[0]
    try:
        return ipaddress.ip_address(bare)
    except ValueError:
        if ":" in bare or _NUMBER.fullmatch(bare.rstrip(".").rpartition(".")[2]):
            raise ValueError(f"{host!r} is an odd way to write an address") from None
        return None


def plain(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        teredo = address.teredo
        return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else address)
    return address


@dataclass(frozen=True, slots=True)
class AllowList:
    """The hosts of a task's `allowed_hosts`."""

    names: frozenset[str]
    suffixes: tuple[str, ...]
    """Of `*.example.org`: `.example.org`. The name after `*.` itself is not among them."""
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, entries: Iterable[str]) -> AllowList:
        """Read entries: host names, `*.` and one, addresses, CIDR ranges; in lower case (see `Task.allowed_hosts`)."""
        names, suffixes, ranges = set(), [], []
        for entry in entries:
            if entry.startswith("*."):
                suffixes.append(entry[1:])
                continue
            try:
                ranges.append(ipaddress.ip_network(entry))
            except ValueError:
                names.add(entry)
        return cls(frozenset(names), tuple(suffixes), tuple(ranges))

    def names_it(self, host: str) -> bool:
        """Tell whether a host name is on the list."""
        name = canonical(host)
        return name in self.names or name.endswith(self.suffixes)

    def lists(self, address: Address) -> bool:
        """Tell whether an address is on the list as such, or in a range on it."""
        return any(address.version == one.version and address in one for one in self.ranges)

    def refuses(self, address: Address) -> str | None:
        """Return why an address must not be connected to, or None: it is public, or listed itself.

        This machine and the places where clouds keep credentials are refused even when listed.
        """
        real = plain(address)
        if real.is_loopback or real.is_unspecified:
            return "is this machine"
        if real.is_link_local or any(real.version == one.version and real in one for one in METADATA):
            return "is link-local, or where a cloud keeps credentials"
        if self.lists(address) or self.lists(real):
            return None
        if real.is_multicast or not real.is_global:
            return "is not a public address; list it, or its range, if it is meant"
        return None


def canonical(host: str) -> str:
    """Return a host name as names are compared: in lower case, in ASCII, without the final dot."""
    name = host.lower().removesuffix(".")
    if name.isascii():
        return name
    try:
        return name.encode("idna").decode()
    except UnicodeError:
        return name


def split_authority(authority: str, default_port: int) -> tuple[str, int]:
    """Return (host, port) of `host`, `host:port` or `[address]:port`.

    Raises:
        ValueError: it is none of these.
    """
    found = re.fullmatch(r"(\[[^\[\]@/]+\]|[^\[\]:@/\s]+)(?::(\d{1,5}))?", authority)
    if found is None or not 0 < (port := int(found[2] or default_port)) < 65536:
        raise ValueError(f"{authority!r} is not host:port")
    return found[1], port
