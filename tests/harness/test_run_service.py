"""The service that `gyre run --model` starts: what keeps it from coming up is said at once, in its own words."""

from __future__ import annotations

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


async def test_a_child_that_ends_before_it_serves_is_not_waited_for() -> None:
    child = Child("engine", lambda port: ["-m", "gyre_sdk.trainer.leash", "py_compile", "/no/file"], "ready ")
    with pytest.raises(ServiceError, match="the engine did not start: it ended with 1"):
        await child.start()
    await child.stop()
