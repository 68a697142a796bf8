"""A vLLM server on a GPU and a publisher to it, for the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre_sdk.journal import Journal
from gyre_sdk.trainer.config import EngineConfig
from gyre_sdk.trainer.engines import kv, vllm
from gyre_sdk.trainer.ledger import Ledger
from gyre_sdk.trainer.processes import Child, ChildSpec
from gyre_sdk.trainer.publish import Publisher
from gyre_sdk.trainer.transports import Transport, make
from gyre_sdk.trainer.weights import PolicyFiles, WeightFolder


@contextmanager
def published(
    place: Path, base: Path, config: EngineConfig, *, rank: int = 0, gpu: str = "0"
) -> Iterator[tuple[Publisher, str, Transport]]:
    """Serve a policy's folder under a config's transport; give publisher, URL and transport.

    `rank`: of the adapters, 0 for none. `gpu`: the engine's.
    """
    name: Any = config.transport
    folder = WeightFolder(base, place / "out", 10_000_000)
    transport = make(name, folder, base, "one")
    with Journal(place / "store.db") as journal:
        publisher = Publisher(
            Ledger(journal),
            folder,
            PolicyFiles(0, base, ""),
            observer=lambda event: None,
            transport=transport,
            patience=600.0,
        )
        child = Child(
            ChildSpec(
                "engine",
                lambda port: vllm.command(
                    config, publisher.current, port, transport=name, rank=rank, shared=place / "kv"
                ),
                "/health",
                place / "engine.log",
                python=Path(sys.executable),
                environment={**vllm.ENVIRONMENT, **kv.environment(config.kv), "CUDA_VISIBLE_DEVICES": gpu},
                patience=vllm.PATIENCE,
            ),
            lambda event: None,
        )
        child.begin()
        try:
            url = child.wait()
            publisher.connect([url], None)
            publisher.start()
            yield publisher, url, transport
        finally:
            child.stop()
            folder.remove()
