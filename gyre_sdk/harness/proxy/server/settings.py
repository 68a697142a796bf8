"""Settings of the proxy, read once."""

from __future__ import annotations

import secrets
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server.budgets import Prices


class HistoryPolicy(StrEnum):
    """What a recorded turn becomes in the next prompt. Recorded with every call."""

    BRIDGE = "bridge"
    """Its exact ids, thinking included, even where the template would drop the thinking."""
    AS_TEMPLATE = "as_template"
    """What the model's template shows; exact ids as long as the template keeps them."""


class SamplingPolicy(StrEnum):
    """What happens to calls of a group's runs whose distribution a trainer cannot compute (`Sampling.irreproducible`)."""

    UNTRAINED = "untrained"
    """They are served and recorded; training leaves them out and counts them."""
    REFUSE = "refuse"
    """They are refused, with what to change."""


class ProxySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the proxy runs. Paths may be given as strings, replicas as addresses.

    Raises:
        SettingsError: a value cannot be meant; the message names it.
    """

    store: Path
    """SQLite file; made when missing."""
    model: Path | None = None
    """Model folder of the policy, with `tokenizer.json`; None serves hosted models only."""
    hosted: tuple[str, ...] = ()
    """Hosted models by litellm's names; a request that names one goes there. Without a policy all requests go to a
    hosted model: to the one that they name, else to the first."""
    renderer: str = "auto"
    """Family in the `renderers` package, `template` (the model's own chat template), or `auto`: what fits the model."""
    renderer_options: dict[str, Any] = {}
    """Of that family's configuration, for example `enable_thinking`."""
    history: HistoryPolicy = HistoryPolicy.BRIDGE
    histories: dict[str, HistoryPolicy] = {}
    """By role of the lane; other roles use `history`."""
    sampling: SamplingPolicy = SamplingPolicy.UNTRAINED
    """For runs whose rewards are compared (those of a group)."""
    model_name: str = "policy"
    """What `/v1/models` lists. Requests may name any model."""
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    public_url: str | None = None
    """Address that agents are given; None gives `http://host:port`."""
    replicas: tuple[ReplicaSpec, ...] = ()
    replica_token: str | None = None
    """Bearer token for the replicas."""
    service_key: str = ""
    """Guards `/gyre/v1`; empty makes a random one."""
    version_labels: dict[str, int] = msgspec.field(default_factory=lambda: {"default": 0})
    """Versions of engine labels that are not numbers."""
    max_tokens: int = 1024
    """Limit on sampled tokens for requests that give none."""
    context: int | None = None
    """Longest prompt + answer in tokens; None takes the model's own limit."""
    max_body: int = 64 << 20
    """Largest request body, decompressed, in bytes."""
    patience: float = 120.0
    """Seconds that a call waits for a replica that serves."""
    retry_pause: float = 0.05
    """Seconds before a replica is asked again that broke off without a token; four times as long after each further
    one, and after the sixth the call fails."""
    heartbeat: float = 10.0
    """Seconds of silence after which a streaming agent gets a comment."""
    flush: float = 0.2
    """Seconds between writes of sampled tokens that no agent waits for."""
    gather: int = 8
    """Tokens per chunk that an engine may gather for answers that are not streamed; 1 turns it off."""
    client_patience: float = 300.0
    """Seconds that an agent may leave an answer unread, or a request unfinished, before its connection is closed."""
    head_patience: float = 30.0
    """Seconds that the head of a request may take, from a connection's start, before the connection is closed."""
    body_patience: float = 30.0
    """Seconds without a byte of a request's body, after which the request is refused."""
    prices: Prices = Prices()
    """What calls cost their run's budget."""
    idle: float = 3600.0
    """Seconds without a request after which an open run leaves the memory; its next request reads it back from the store."""
    grace: float = 10.0
    """Seconds that SIGTERM gives calls in flight."""
    classifier: str = ""
    """For runs that name none: preset or import path that tells the lanes of an agent with one key for everything."""
    shard: int = 0
    """Number of this worker."""
    shards: int = 1
    """Workers of the service; each has the runs of its shard."""

    def __post_init__(self) -> None:
        made = (ReplicaSpec(replica) if isinstance(replica, str) else replica for replica in self.replicas)
        msgspec.structs.force_setattr(self, "replicas", tuple(made))
        msgspec.structs.force_setattr(self, "store", Path(self.store))
        msgspec.structs.force_setattr(self, "model", None if self.model is None else Path(self.model))
        _in_range("port", self.port, 0, 65_535)
        _in_range("max_tokens", self.max_tokens, 1)
        if self.context is not None:
            _in_range("context", self.context, 2)
        for name in ("patience", "heartbeat", "flush", "retry_pause", "idle", "grace"):
            _in_range(name, getattr(self, name), 0)
        for name, price in (("price of the prompt", self.prices.prompt), ("price of samples", self.prices.sampled)):
            _in_range(name, price, 0)
        _web_address("replica", *(replica.url for replica in self.replicas))
        _web_address("public_url", *([] if self.public_url is None else [self.public_url]))

    def hosted_model(self, name: str) -> str | None:
        """Return the hosted model that a request naming `name` goes to; None for the policy."""
        if name in self.hosted:
            return name
        return self.hosted[0] if self.model is None and self.hosted else None

    def policy(self, role: str) -> HistoryPolicy:
        """Return the history policy of a role."""
        return self.histories.get(role, self.history)


def _in_range(name: str, value: float, least: float, most: float = sys.float_info.max) -> None:
    if not least <= value <= most:
        limits = f"{least} or more" if most == sys.float_info.max else f"{least} to {most}"
        raise SettingsError(f"{name} of the service is {value!r}; give {limits}")


def _web_address(name: str, *urls: str) -> None:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"{name} {url!r} is no address; write http://HOST:PORT")


def new_key() -> str:
    """Return a fresh capability key: 256 random bits."""
    return f"gy-{secrets.token_urlsafe(32)}"
