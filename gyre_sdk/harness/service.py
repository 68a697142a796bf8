"""Client of the recording service's control API: open runs and lanes, close them, end them.

The service is the proxy process. Agents' model calls go to it with their own SDK and a capability key; this client
carries the service key, which never leaves the process that opens sessions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from gyre_sdk.errors import ServiceError, SettingsError
from gyre_sdk.harness.limits import Limits
from gyre_sdk.records import CallStatus, RunStatus

T = TypeVar("T")


class OpenedRun(msgspec.Struct, frozen=True):
    """A run that is on record, with its main lane."""

    run: str
    lane: str
    api_key: str
    """Capability key: names the run and the lane to the proxy. A secret of the agent."""
    base_url: str
    """OpenAI base URL, ending in `/v1`."""
    version: int
    """Policy version being served."""


class OpenedLane(msgspec.Struct, frozen=True):
    """A further lane of a run."""

    lane: str
    api_key: str
    base_url: str


class ClosedRun(msgspec.Struct, frozen=True):
    """What a run has used once no further call is accepted."""

    calls: int
    sampled_tokens: int


class _ShownLane(msgspec.Struct, frozen=True):
    lane: str
    parent: str | None = None


class _ShownBudget(msgspec.Struct, frozen=True):
    spent: str | None = None
    limit: str | None = None


class _ShownRun(msgspec.Struct, frozen=True):
    lanes: list[_ShownLane]
    budgets: dict[str, _ShownBudget] = {}


class SpentBudget(msgspec.Struct, frozen=True):
    """A lane's budget that ran out."""

    limit: str
    """The field of `Limits`."""
    what: str
    """How much it was, in words."""


class MeteredCall(msgspec.Struct, frozen=True):
    """What is on record of a call, for budgets."""

    seq: int
    """Position in the store."""
    call: str
    lane: str
    status: CallStatus
    prompt_tokens: int
    sampled_tokens: int


class _MeteredCalls(msgspec.Struct, frozen=True):
    calls: list[MeteredCall]


class _Told(msgspec.Struct, frozen=True):
    message: str
    code: str


class _Refusal(msgspec.Struct, frozen=True):
    error: _Told


class _Ended(msgspec.Struct, frozen=True):
    status: RunStatus


class Drained(msgspec.Struct, frozen=True):
    """What came of the requests that a drained replica had."""

    finished: int = 0
    """Ended there."""
    moved: int = 0
    """Cut, to go on elsewhere."""


_FIELDS = {"seconds": "wall_s", "cost": "cost_usd"}
"""Of `Limits`, where the service has other names."""
_CUT = 15.0
"""Seconds that the service may take to cut what runs on a replica; it needs half of that where an engine is deaf."""
_CONNECT = 5.0
"""Seconds that a connection may take to be made."""


class ServiceClient:
    """Speaks to one recording service; waits for one that is being restarted.

    Raises (all methods): `ServiceError` when the service cannot be reached or refuses.
    """

    def __init__(
        self,
        url: str,
        service_key: str,
        *,
        timeout: float = 30.0,
        patience: float = 30.0,
        arrival: float = 2.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Connect when something is asked.

        Args:
            url: as `gyre serve` printed it.
            service_key: of its control API.
            timeout: seconds for an answer.
            patience: seconds to wait for a service that has answered before, and is away.
            arrival: seconds to wait for one that has not: at most `patience`. The address may be wrong.
            headers: of every request, beside the key.

        Raises:
            SettingsError: the address or the key cannot be one.
        """
        service_key = service_key.strip()
        if not url.startswith(("http://", "https://")):
            raise SettingsError(f"the service's address is {url!r}; write http://HOST:PORT, as `gyre serve` printed it")
        if not service_key:
            raise SettingsError("the service key is empty; give the one in the file `service-key` beside the store")
        if not (service_key.isascii() and service_key.isprintable()):
            raise SettingsError("the service key has characters that no key has; give the one that the service has")
        self.url = url.rstrip("/")
        # proxies of the environment neither reach what is near nor may read its key
        self._asks_environment = not self.url.startswith("http://")
        self._patience, self._arrival = patience, min(arrival, patience)
        self._met = False
        self._timeout = timeout
        try:
            self._http = httpx.Client(
                base_url=f"{self.url}/gyre/v1",
                headers={**(headers or {}), "authorization": f"Bearer {service_key}"},
                limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
                trust_env=self._asks_environment,
            )
        except httpx.InvalidURL as error:
            raise SettingsError(f"the service's address is {url!r}: {error}; write http://HOST:PORT") from error
        self._model_http: Any = None
        self._making = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        if self._model_http is not None:
            self._model_http.close()

    @property
    def model_http(self) -> Any:
        """Connections for the agents' OpenAI clients: shared, since each new pool costs ~10 ms to make."""
        with self._making:
            if self._model_http is None:
                import openai

                self._model_http = openai.DefaultHttpxClient(
                    timeout=openai.Timeout(600.0, connect=5.0),
                    limits=openai.DEFAULT_CONNECTION_LIMITS,
                    trust_env=self._asks_environment,
                )
        return self._model_http

    def open_run(
        self,
        *,
        task: str,
        group: str | None,
        member: int,
        owner: str,
        split: str,
        metadata: dict[str, Any],
        dispatch_version: int | None,
        limits: Limits,
        classifier: str = "",
    ) -> OpenedRun:
        """Put a run on record and open its main lane."""
        body = {
            "task": task,
            "group": group,
            "member": member,
            "owner": owner,
            "split": split,
            "metadata": metadata,
            "dispatch_version": dispatch_version,
            "limits": _enforced(limits),
            "classifier": classifier,
        }
        return self._read(OpenedRun, "POST", "/runs", body)

    def open_lane(
        self,
        run: str,
        *,
        role: str,
        name: str,
        parent: str,
        takes_over: bool = False,
        limits: Limits | None = None,
    ) -> OpenedLane:
        """Open a further lane.

        Args:
            run: that it is of.
            role: of the lane.
            name: what it is called in the record.
            parent: the lane that opens it.
            takes_over: whether calls made with the parent's key go to it until `release_lane`.
            limits: what it, and all lanes below it, may spend. All but working time is enforced by the service, for
                every client with a key of theirs.
        """
        body: dict[str, Any] = {"role": role, "name": name, "parent": parent, "takes_over": takes_over}
        if limits is not None:
            body["limits"] = _enforced(limits)
        return self._read(OpenedLane, "POST", f"/runs/{run}/lanes", body)

    def release_lane(self, run: str, lane: str) -> None:
        """Give the parent's key back to the parent lane."""
        self._send("POST", f"/runs/{run}/lanes/{lane}/release", {})

    def revoke_lane(self, run: str, lane: str) -> None:
        """Make a lane's key open nothing any more; calls in flight go on."""
        self._send("POST", f"/runs/{run}/lanes/{lane}/revoke", {})

    def calls(self, run: str, *, after: int = 0) -> list[MeteredCall]:
        """Return a run's calls with a `seq` above `after`, open ones included."""
        return self._read(_MeteredCalls, "GET", f"/calls?run={run}&after={after}").calls

    def lane_parents(self, run: str) -> dict[str, str | None]:
        """Return each lane of a run with the lane that opened it."""
        found = self._read(_ShownRun, "GET", f"/runs/{run}")
        return {lane.lane: lane.parent for lane in found.lanes}

    def spent_budget(self, run: str, lane: str) -> SpentBudget | None:
        """Return how a lane's own budget ran out; None if it did not."""
        found = self._read(_ShownRun, "GET", f"/runs/{run}").budgets.get(lane)
        if found is None or found.spent is None or found.limit is None:
            return None
        return SpentBudget(_FIELDS.get(found.limit, found.limit), found.spent)

    def close_run(self, run: str, *, seconds: float) -> ClosedRun:
        """Refuse further calls of a run; wait at most `seconds` for those in flight, then abort them."""
        return self._read(ClosedRun, "POST", f"/runs/{run}/close", {"seconds": seconds}, timeout=seconds + 30.0)

    def end_run(
        self,
        run: str,
        status: RunStatus,
        *,
        reward: float | None,
        parts: dict[str, float],
        error: str | None,
        placeholder: bool,
    ) -> RunStatus:
        """Record the run's terminal state; return it: a budget that ran out is how the run ended."""
        body = {"status": status, "reward": reward, "parts": parts, "error": error, "placeholder": placeholder}
        return self._read(_Ended, "POST", f"/runs/{run}/end", body).status

    def status(self) -> dict[str, Any]:
        """Return what the service says of itself: version, replicas, calls in flight."""
        return self._read(dict[str, Any], "GET", "/status")

    def answers(self, seconds: float = 1.0) -> bool:
        """Tell whether the service answers within these seconds; ask once."""
        try:
            return self._http.get("/status", timeout=seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def set_replicas(self, replicas: list[dict[str, Any]]) -> None:
        """Set the table of replicas: `url` and `version` each, and `model` where requests must name one."""
        self._send("PUT", "/replicas", {"replicas": replicas})

    def drain(self, url: str, *, seconds: float) -> Drained:
        """Send a replica nothing new until it is announced again; what runs there is moved after `seconds`.

        Return when nothing of ours runs there; at once for one that is in no table. A service that is away, or dies
        meanwhile, is waited for no longer than `seconds`: what it had in flight ended with it.
        """
        content = msgspec.json.encode({"url": url, "seconds": seconds})
        response = self._patiently(
            "POST", "/replicas/drain", content, timeout=seconds + _CUT, patience=min(seconds, self._patience)
        )
        if response.status_code == 404 and "no_such_replica" in response.text:
            return Drained()
        return self._read_answer(Drained, response, "POST", "/replicas/drain")

    def _read(
        self, kind: type[T], method: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> T:
        content = None if body is None else msgspec.json.encode(body)
        return self._read_answer(kind, self._patiently(method, path, content, timeout), method, path)

    def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        self._read(dict[str, Any], method, path, body)

    def _read_answer(self, kind: type[T], response: httpx.Response, method: str, path: str) -> T:
        status, refused = response.status_code, None
        try:
            if status == 200:
                return msgspec.json.decode(response.content, type=kind)
            refused = msgspec.json.decode(response.content, type=_Refusal).error
        except msgspec.DecodeError as error:
            said = " ".join(response.text[:200].split())
            raise ServiceError(
                f"what answers {method} {path} at {self.url} is no recording service ({status}: {said!r});"
                " give the address that `gyre serve` printed"
            ) from error
        raise ServiceError(
            f"recording service {self.url} refused {method} {path} ({status}): {refused.message} ({refused.code})"
        )

    def _patiently(
        self, method: str, path: str, content: bytes | None, timeout: float | None, patience: float | None = None
    ) -> httpx.Response:
        """Send, and wait out a restart of the service: a request that never arrived is sent again for a while.

        A request that may have arrived is sent again too unless it opens something: closing and ending are
        idempotent, opening is not.
        """
        patience = self._patience if patience is None else patience
        give_up = time.monotonic() + (patience if self._met else min(patience, self._arrival))
        while True:
            try:
                response = self._http.request(
                    method,
                    path,
                    content=content,
                    headers={"content-type": "application/json"},
                    timeout=httpx.Timeout(timeout or self._timeout, connect=_CONNECT),
                )
                self._met = True
                return response
            except httpx.HTTPError as error:
                unheard = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                repeatable = unheard or not path.endswith(("/runs", "/lanes"))
                if not repeatable or time.monotonic() > give_up:
                    raise ServiceError(
                        f"recording service {self.url} did not answer {method} {path}: {type(error).__name__}: {error};"
                        " is `gyre serve` running there?"
                    ) from error
            time.sleep(0.2)


def _enforced(limits: Limits) -> dict[str, Any]:
    """Return limits as the service takes them."""
    return {"turns": limits.turns, "tokens": limits.tokens, "cost": limits.cost_usd, "seconds": limits.wall_s}
