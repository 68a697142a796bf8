"""Real vLLM servers (the CPU build) with small random policies, for the benchmarks beside."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT / "tests" / "trainer")]

from training_kit import make_model  # noqa: E402
from vllm_environment import VLLM_PYTHON, environment  # noqa: E402

from gyre_sdk.trainer.config import EngineConfig  # noqa: E402
from gyre_sdk.trainer.engines import kv, vllm  # noqa: E402
from gyre_sdk.trainer.engines.kv import KvConfig  # noqa: E402
from gyre_sdk.trainer.processes import Child, ChildSpec  # noqa: E402
from gyre_sdk.trainer.weights import PolicyFiles  # noqa: E402


def make_policy(folder: Path, hidden: int, layers: int = 4) -> None:
    """Write a policy of this width, with heads of 32 as vLLM's CPU kernels want them."""
    heads = hidden // 32
    make_model(
        folder,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        head_dim=32,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=8192,
    )


@contextmanager
def servers(
    folder: Path, keys: Sequence[KvConfig | None], options: Sequence[str], batch: int = 64
) -> Iterator[list[str]]:
    """Start one server for each of these; give their addresses."""
    os.environ.update(environment())
    start = PolicyFiles(0, folder / "model", "")

    def spec(number: int, shared: KvConfig | None) -> ChildSpec:
        engine = EngineConfig(
            kind="vllm", python=VLLM_PYTHON, max_batch=batch, options=["--dtype", "float32", *options], kv=shared
        )
        return ChildSpec(
            f"replica-{number}",
            lambda port: vllm.command(engine, start, port, transport="file", shared=folder / "kv"),
            "/health",
            folder / f"log-{number}",
            python=VLLM_PYTHON,
            environment={**vllm.ENVIRONMENT, **kv.environment(shared), "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            patience=300.0,
        )

    with ExitStack() as stack:
        children = []
        for number, shared in enumerate(keys):
            child = Child(spec(number, shared), lambda event: None)
            stack.callback(child.stop)
            child.begin()
            children.append(child)
        yield [child.wait() for child in children]
