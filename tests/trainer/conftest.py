"""Common to the trainer's tests."""

from __future__ import annotations

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# pytest puts `tests/` on the path; without this, trl takes the folder `tests/vllm` for the vllm package
sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]
