"""Processes that train together on gloo, started from one that has the heavy imports done."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

_HEAVY = [
    *("torch", "accelerate", "transformers", "trl.trainer.grpo_config", "trl.trainer.base_trainer", "peft"),
    *("transformers.models.qwen3.modeling_qwen3", "gyre_sdk.trainer.main", "gyre_sdk.trainer.stack"),
    *("gyre_sdk.trainer.team", "gyre_sdk.trainer.evaluation", "gyre_sdk.trainer.training", "gyre_sdk.view"),
]
_HERE = str(Path(__file__).parent)


def forking() -> Any:
    """Return multiprocessing's context whose processes begin with the heavy imports done, and nothing run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    forkserver.ensure_running()
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(size: int, function: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """Run a module-level function in `size` processes of one group; return what each returned, in the order of ranks."""
    context, port = forking(), free_port()
    answers = context.Queue()
    processes = [
        context.Process(target=_member, args=(rank, size, port, answers, function, arguments)) for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        for _ in processes:
            rank, value, error = answers.get(timeout=seconds)
            assert error is None, f"rank {rank}:\n{error}"
            found[rank] = pickle.loads(value)
        for process in processes:
            process.join(seconds)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(size)]


def _member(rank: int, size: int, port: int, answers: Any, function: Callable[..., Any], arguments: Any) -> None:
    sys.path.insert(0, _HERE)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    try:
        answers.put(
            (rank, pickle.dumps(function(*arguments)), None)
        )  # torch would share memory with a process that ends
    except BaseException:
        answers.put((rank, b"", traceback.format_exc()))
        raise
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
