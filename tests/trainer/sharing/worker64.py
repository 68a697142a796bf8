"""The satellite's worker with a policy in float64, nothing else changed: `python -m worker64 ARGUMENTS`."""

from __future__ import annotations

import sys
from typing import Any

from tiny_policy import pure64

from gyre_sdk.trainer import policy
from gyre_sdk.trainer.sharing import worker

if __name__ == "__main__":
    load = policy.load_policy

    def load64(*arguments: Any) -> Any:
        return load(*arguments).double()

    policy.load_policy = load64
    with pure64():
        sys.exit(worker.main())
