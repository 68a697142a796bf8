"""Starts proxies for tests and talks to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from gyre_sdk.harness.proxy.render import Template
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.proxy.server import ProxyServer, ProxySettings
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallRecord

SHARED = Path(__file__).resolve().parents[4] / "shared"


class Proxy:
    """A running proxy, and clients for it."""

    def __init__(self, url: str, service_key: str, store: Path) -> None:
        self.url, self.store, self.service_key = url, store, service_key
        self.control = httpx.Client(
            base_url=f"{url}/gyre/v1", headers={"Authorization": f"Bearer {service_key}"}, timeout=30
        )
        self.http = httpx.Client(base_url=url, timeout=60)

    def run(self, **body: Any) -> dict[str, Any]:
        """Open a run; give its access."""
        answer = self.control.post("/runs", json={"task": "t", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def lane(self, run: str, **body: Any) -> dict[str, Any]:
        """Open a lane."""
        answer = self.control.post(f"/runs/{run}/lanes", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, access: dict[str, Any], body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        """Send a chat request as plain HTTP."""
        data = body if isinstance(body, bytes) else json.dumps({"model": "policy", **body}).encode()
        return self.http.post(
            "/v1/chat/completions",
            content=data,
            headers={"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json", **headers},
        )

    def openai(self, access: dict[str, Any], **options: Any) -> openai.OpenAI:
        """Return an SDK client."""
        return openai.OpenAI(base_url=access["base_url"], api_key=access["api_key"], **{"max_retries": 0, **options})

    def calls(self, run: str | None = None) -> list[CallRecord]:
        """Read what is recorded, through a connection of our own."""
        with Journal(self.store, "r") as journal:
            return list(journal.calls(run))

    def journal(self) -> Journal:
        """Open the store for reading."""
        return Journal(self.store, "r")


@contextmanager
def running(
    model: Path | None,
    store: Path,
    *urls: str,
    template: Template | None = None,
    versions: dict[str, int] | None = None,
    **more: Any,
) -> Iterator[Proxy]:
    """Run a proxy in a thread; `template` replaces the model's own."""
    specs = tuple(ReplicaSpec(url, (versions or {}).get(url, 0)) for url in urls)
    server = ProxyServer(ProxySettings(store=store, model=model, replicas=specs, **{"grace": 0.2, **more}), template)
    server.start_in_thread()
    try:
        yield Proxy(server.url, server.service_key, store)
    finally:
        server.stop()


def arguments(model: Path, store: Path, *urls: str, port: int = 0, **more: str) -> list[str]:
    """Return the command line of `gyre serve`."""
    replicas = [part for url in urls for part in ("--replica", url)]
    options = [part for name, value in more.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["--store", str(store), "--model", str(model), "--port", str(port), *replicas, *options]


class ProxyProcess:
    """`gyre serve` as a process of its own, to be killed."""

    def __init__(self, model: Path, store: Path, *urls: str, port: int = 0, **more: str) -> None:
        code = "import sys; from gyre_sdk.harness.proxy.server import main; sys.exit(main(sys.argv[1:]))"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments(model, store, *urls, port=port, **more)],
            env={**os.environ, "GYRE_SERVICE_KEY": "the-service-key"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert self.line.startswith("ready http://"), self.line
        self.proxy = Proxy(self.line.split()[1], "the-service-key", store)

    @property
    def port(self) -> int:
        return int(self.proxy.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM; give the exit status."""
        self.process.terminate()
        return self.process.wait(30)

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def sse(text: str) -> list[Any]:
    """Return a stream's payloads; `[DONE]` as it is."""
    data = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def content_of(events: list[Any], index: int = 0) -> str:
    """Return the text of a stream's choice."""
    parts = [
        choice["delta"].get("content") or ""
        for event in events
        if event != "[DONE]"
        for choice in event.get("choices", ())
        if choice["index"] == index
    ]
    return "".join(parts)
