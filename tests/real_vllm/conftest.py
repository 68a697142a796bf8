"""Real vLLM (its CPU build) that serves the demo's policy, and a proxy over it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from vllm_environment import IN_ONE, VLLM_PYTHON, environment

import gyre_sdk as gyre
from gyre_sdk.harness.proxy.routing import ReplicaSpec

RENDERER = {"enable_thinking": True, "thinking_retention": "all"}


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="session")
def vllm(demo_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server that compiles its model, started once for the suite."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("vllm")
    command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(demo_policy)]
    command += ["--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", "1024"]
    command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, cwd=folder, env={**environment(), **IN_ONE}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        if server.poll() is None:
            os.killpg(server.pid, 15)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)


@pytest.fixture
def service(vllm: str, demo_policy: Path, tmp_path: Path) -> Iterator[gyre.ServiceClient]:
    """A proxy over it; the store is `s.db` in the folder of the test."""
    settings = gyre.ProxySettings(
        store=tmp_path / "s.db", model=demo_policy, renderer_options=RENDERER, replicas=(ReplicaSpec(vllm, 0),)
    )
    with gyre.serve(settings) as client:
        yield client
