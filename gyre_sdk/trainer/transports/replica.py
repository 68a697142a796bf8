"""One replica's weights over HTTP: the part of vLLM's interface that publication needs. The embedded engine has it too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import httpx

from gyre_sdk.errors import PublishError
from gyre_sdk.trainer.engines.fence import REFUSED
from gyre_sdk.trainer.terms import Fenced, Mandate

__all__ = ["Replica", "Unready"]

_LOADING = 600.0
"""Seconds that a load may take."""
_QUICK = 20.0
"""Seconds that anything else may take."""
_NEEDED = (
    "VLLM_SERVER_DEV_MODE=1, --weight-transfer-config, --worker-extension-cls; for adapters --enable-lora and"
    " VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)


class Unready(Exception):
    """The replica cannot do it now."""


class Replica:
    """A replica as the trainer sees it."""

    def __init__(self, url: str, version: int, mandate: Mandate | None = None) -> None:
        """Connect when something is asked.

        Args:
            version: that it is to serve; errors name it.
            mandate: of this trainer, where others may come after it: gyre's engine refuses the requests of an older one, and
                since vLLM knows none, nothing that changes a replica is sent without looking.
        """
        self.url = url.rstrip("/")
        self._version = version
        self._mandate = mandate
        plain = self.url.startswith("http://")
        # vLLM closes a connection after it answered with an error: each request has one of its own
        self._http = httpx.Client(
            base_url=self.url,
            timeout=_QUICK,
            headers={"connection": "close"} | ({} if mandate is None else mandate.headers),
            verify=not plain,  # loading certificates takes longer than all else
            trust_env=not plain,  # a proxy of the environment does not reach this machine
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def version(self) -> str | None:
        """Return the label of the weights that are served; vLLM's is `default` after a start."""
        body = self._get("/weight_info")
        label = body.get("weight_version")
        return None if label is None else str(label)

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of the weights that it computes with, under the checkpoint's names."""
        ranks: list[dict[str, str]] = self._call("gyre_fingerprints")
        return {name: value for rank in ranks for name, value in rank.items()}

    def adapters(self) -> list[dict[str, str]]:
        """Return the fingerprints of each adapter that its layers hold."""
        ranks: list[list[dict[str, str]]] = self._call("gyre_adapters")
        return ranks[0]

    def claim(self, owner: str) -> None:
        """Say who publishes here from now on."""
        self.post("/init_weight_transfer_engine", {"init_info": {"owner": owner}})

    def release(self) -> None:
        """Let another trainer publish here."""
        self.post("/shutdown_weight_transfer_engine")

    def start(self) -> None:
        """Begin a weight update; one that a dead trainer left open is ended first."""
        try:
            self.post("/start_weight_update", {})
        except (PublishError, Unready) as error:
            if "already active" not in str(error):
                raise
            self._end_session()
            raise Unready("another weight update was open") from error

    def update(self, info: dict[str, Any]) -> None:
        """Send a part of a weight update."""
        self.post("/update_weights", {"update_info": info}, timeout=_LOADING)

    def finish(self, version: str) -> None:
        """Serve the weights of the update under this label."""
        self.post("/finish_weight_update", {"weight_version": version}, timeout=_LOADING)

    def rename(self, version: str) -> None:
        """Call the weights that are served by another label."""
        self.post("/update_weight_version", {"new_version": version})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let nothing be sampled meanwhile; what is running waits, loses its cached keys, and goes on afterwards.

        A replica whose update failed stays paused: what it would sample from is not known. One that cannot be paused now,
        since keys and values are on their way into its cache, goes on, so that they arrive.
        """
        before = self.is_paused()
        try:
            self.post("/pause?mode=keep&clear_cache=true", {})
        except Unready:
            if not before:
                self.resume()
            raise
        yield
        self.resume()

    def resume(self) -> None:
        """Sample again."""
        self.post("/resume", {})

    def is_paused(self) -> bool:
        """Tell whether it samples nothing."""
        return bool(self._get("/is_paused").get("is_paused"))

    def sleep(self, level: int) -> None:
        """Abort what runs and free the devices: 1 keeps the weights in main memory, 2 drops them. Cached keys are dropped."""
        self.post(f"/sleep?level={level}&mode=abort", timeout=_LOADING)

    def wake(self, tag: str) -> None:
        """Take the devices' memory again for `weights` or `kv_cache`."""
        self.post(f"/wake_up?tags={tag}", timeout=_LOADING)

    def is_sleeping(self) -> bool:
        """Tell whether it samples nothing, be it paused or without memory."""
        return bool(self._get("/is_sleeping").get("is_sleeping"))

    def world_size(self) -> int:
        """Return the number of its workers."""
        return int(self._get("/get_world_size")["world_size"])

    @property
    def host(self) -> str:
        """Name or address of its machine."""
        return httpx.URL(self.url).host

    def models(self) -> list[str]:
        """Return the names that requests may give."""
        return [str(model["id"]) for model in self._get("/v1/models")["data"]]

    def load_adapter(self, name: str, path: str) -> None:
        """Serve an adapter under a name."""
        self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout=_LOADING)

    def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more to new requests."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def post(self, route: str, body: dict[str, Any] | None = None, *, timeout: float = _QUICK) -> httpx.Response:
        """Send a request.

        Raises:
            Unready: the replica is at fault, perhaps for a while.
            PublishError: it refused for good.
            Fenced: another trainer has taken over.
        """
        if self._mandate is not None:
            self._mandate.check()
        response = self._http.post(route, json=body, timeout=timeout)
        return self._accepted(response, route)

    def _get(self, route: str) -> dict[str, Any]:
        body: dict[str, Any] = self._accepted(self._http.get(route), route).json()
        return body

    def _call(self, method: str) -> Any:
        response = self.post("/collective_rpc", {"method": method}, timeout=_LOADING)
        return response.json()["results"]

    def _accepted(self, response: httpx.Response, route: str) -> httpx.Response:
        status, name = response.status_code, route.partition("?")[0].lstrip("/")
        if status < 400:
            return response
        text = response.text[:500]
        if status == 409 and REFUSED in text:
            raise Fenced(f"replica {self.url} refused {name}: {text}")
        if status == 404 or "has no attribute 'gyre_" in text or "Weight transfer not configured" in text:
            raise PublishError(
                f"replica {self.url} cannot be published to: {name} answered {status}: {text}; start vLLM as in the"
                f" guide's section on publication ({_NEEDED})"
            )
        if status >= 500 and REFUSED not in text:
            raise Unready(f"{name} answered {status}: {text}")
        hint = "" if REFUSED in text else "; the policy in training and the one it serves must be the same model"
        raise PublishError(f"replica {self.url} refused version {self._version} at {name} ({status}): {text}{hint}")

    def _end_session(self) -> None:
        """A file that does not exist ends an open update, whoever opened it."""
        try:
            self.update({"path": f"/nowhere/{time.time_ns()}.end-of-session"})
        except (PublishError, Unready):
            pass
