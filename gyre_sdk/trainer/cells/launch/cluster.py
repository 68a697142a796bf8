"""A Ray cluster on this machine: `python -m gyre_sdk.trainer.cells.launch.cluster`. It ends with this process.

A process of its own, so that it outlives a trainer that was killed as other children do.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["NAME", "READY"]

NAME = "ray"
"""Of the process."""
READY = "gyre-ray ready on"
"""What the address follows, on stdout."""
_CPUS = 64
"""What the cluster says it has at least: cells there share the cores, as they do without Ray."""
_STORE = 80 << 20
"""Bytes of its object store: nothing is passed through it."""


def main() -> None:
    """Start the cluster with nothing that cells do not need; say its address; wait for the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # a cell that reserves no GPU sees all, as without Ray
    import ray

    ray.init(
        "local",
        num_cpus=max(_CPUS, os.cpu_count() or 1),
        include_dashboard=False,
        object_store_memory=_STORE,
        log_to_driver=False,
        configure_logging=False,
        _system_config={
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            "worker_niceness": 0,  # 15 otherwise, also for what the actors start
        },
    )
    # who ends this process kills its group, where all of the cluster's are: their own way to end takes many seconds
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.write(f"{READY} {ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
