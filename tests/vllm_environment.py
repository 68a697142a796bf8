"""Where the suite finds real vLLM: an environment of its own, made by `make vllm`."""

from __future__ import annotations

import os
from pathlib import Path

VLLM_PYTHON = Path(os.environ.get("GYRE_VLLM_PYTHON", Path(__file__).parent.parent / ".venv-vllm" / "bin" / "python"))
IN_ONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""The engine computes in its own process, as it does on one GPU, with one thread, on whichever core is free. On CPUs vLLM
starts a further process for that otherwise."""


def environment() -> dict[str, str]:
    """Return the environment that a vLLM server on CPU is started with."""
    if not VLLM_PYTHON.is_file():
        raise FileNotFoundError(f"{VLLM_PYTHON} is missing: run `make vllm`")
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
