"""The service that `gyre run --model` starts: what keeps it from coming up is said at once, in its own words."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from gyre_sdk.errors import ServiceError
from gyre_sdk.harness.launch.serving import served
from gyre_sdk.harness.proxy.server.children import Child


def test_a_service_that_ends_at_once_is_not_waited_for(tmp_path: Path) -> None:
    said = "did not come up .exit status 1.: gyre serve: 'local:/no/model' is not a model folder here"
    with pytest.raises(ServiceError, match=said):
        with served(["--model", "local:/no/model", "--store", str(tmp_path / "store")]):
            pass


def test_what_the_service_warns_of_is_passed_on(model: Path, tmp_path: Path) -> None:
    """Before it is up, and later."""
    heard: queue.Queue[str] = queue.Queue()
    away = "http://127.0.0.1:9"
    arguments = ["--model", str(model), "--replica", away, "--store", str(tmp_path / "store"), "--host", "0.0.0.0"]
    with served(arguments, heard.put):
        assert heard.get(timeout=60).startswith("gyre serve: listening on 0.0.0.0: ")
        assert heard.get(timeout=60).startswith(f"replica {away} ")


async def test_a_child_that_ends_before_it_serves_is_not_waited_for() -> None:
    child = Child("engine", lambda port: ["-m", "gyre_sdk.trainer.leash", "py_compile", "/no/file"], "ready ")
    with pytest.raises(ServiceError, match="the engine did not start: it ended with 1"):
        await child.start()
    await child.stop()
