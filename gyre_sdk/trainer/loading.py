"""Loading what is large: torch, transformers, TRL."""

from __future__ import annotations

import gc
import importlib

__all__ = ["load"]


def load(module: str) -> None:
    """Import a module and all that it takes, without collecting garbage meanwhile: what an import makes stays, and each
    collection would look at all of it again, a fifth of the processor time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
    finally:
        if collecting:
            gc.enable()
