"""The model: load it, run packed steps, exchange its weights. Used by one thread only.

Shapes: T packed tokens, B rows that sample, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from gyre_sdk.errors import EngineError
from gyre_sdk.trainer.engines.attention import ATTENTION, SlotCache, StepPlan
from gyre_sdk.trainer.engines.weights import Weights, place

__all__ = ["Chunk", "ModelLimits", "ModelRunner"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a loaded model can serve."""

    vocab: int
    max_model_len: int
    """Prompt and sampled tokens together."""
    slots: int
    """Rows of the KV cache."""
    eos_ids: tuple[int, ...]
    """From generation_config.json, the primary one first."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one row adds in one step."""

    slot: int
    start: int
    """Position of the first one; everything before it is in the cache."""
    ids: Seq[int]
    samples: bool
    """Whether these reach the end of the sequence, so that the row samples."""


class ModelRunner:
    """A causal LM with its KV cache."""

    def __init__(
        self, folder: Path, *, device: str, dtype: str, max_batch: int, max_model_len: int | None, kv_gib: float
    ) -> None:
        """Load the model and check on two short sequences that packed steps equal the plain forward pass.

        Raises:
            EngineError: the folder is no model, the cache does not fit, or the architecture cannot be served exactly.
        """
        if not (folder / "config.json").is_file():
            raise EngineError(f"{folder} has no config.json; --model takes a Hugging Face model folder")
        transformers_logging.disable_progress_bar()
        self.device = torch.device(device)
        self._dtype = getattr(torch, dtype)
        config = AutoConfig.from_pretrained(folder).get_text_config()
        _refuse_unsupported(config)
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self._dtype, attn_implementation="sdpa"
            )
        except (OSError, ValueError, ImportError) as err:
            raise EngineError(f"cannot load a causal LM from {folder}: {err}") from err
        self.model.requires_grad_(False).eval().to(self.device)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        length = min(config.max_position_embeddings, max_model_len or config.max_position_embeddings)
        per_slot = 2 * config.num_hidden_layers * heads * head_dim * self._dtype.itemsize * (length + 8)
        slots = min(2 * max_batch, int(kv_gib * 2**30 // per_slot))
        if slots < 1:
            raise EngineError(
                f"one sequence of {length} tokens needs {per_slot / 2**30:.2f} GiB of KV cache, --kv-gib "
                f"is {kv_gib}; raise it or pass a smaller --max-model-len"
            )
        self.limits = ModelLimits(config.vocab_size, length, slots, _eos_ids(folder, config))
        self.cache = SlotCache(
            layers=config.num_hidden_layers,
            slots=slots,
            positions=length,
            heads=heads,
            head_dim=head_dim,
            dtype=self._dtype,
            device=self.device,
        )
        self._self_check()

    def forward(self, chunks: Seq[Chunk]) -> torch.Tensor:
        """Run one packed step and return logits [B, V] of the sampling rows, in the order of `chunks`.

        Rows with one token (decode) come first, in the order of their slots.
        """
        ids_T = np.fromiter((token for chunk in chunks for token in chunk.ids), np.int64)
        sizes = np.fromiter((len(chunk.ids) for chunk in chunks), np.int64)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64)
        slots = np.fromiter((chunk.slot for chunk in chunks), np.int64)
        ends = sizes.cumsum()
        positions_T = np.arange(len(ids_T)) + np.repeat(starts - (ends - sizes), sizes)
        heads_K1 = np.arange(self.cache.heads)[:, None]
        write = (np.repeat(slots * self.cache.heads, sizes) + heads_K1) * self.cache.positions + positions_T
        samples = np.fromiter((chunk.samples for chunk in chunks), bool)
        plan = self._plan(sizes, starts, slots, ends, write.reshape(-1))
        with torch.inference_mode():
            out = self.model(
                input_ids=self._tensor(ids_T)[None],
                position_ids=self._tensor(positions_T)[None],
                use_cache=False,
                logits_to_keep=self._tensor(ends[samples] - 1),
                gyre_plan=plan,
            )
            logits_BV: torch.Tensor = out.logits[0]
            return logits_BV

    def apply(self, weights: Weights) -> None:
        """Copy a validated set into the live model. The caller forgets the KV cache."""
        place(self.model, weights)

    def _plan(self, sizes: Any, starts: Any, slots: Any, ends: Any, write: Any) -> StepPlan:
        decodes = int(np.searchsorted(sizes > 1, True))
        rows = int(slots[:decodes].max()) + 1 if decodes else 0
        lengths_R = np.ones(rows, np.int64)
        lengths_R[slots[:decodes]] = starts[:decodes] + 1
        dense = rows == decodes
        gather_R = np.zeros(rows, np.int64)
        gather_R[slots[:decodes]] = np.arange(decodes)
        lengths = starts + sizes
        return StepPlan(
            cache=self.cache,
            write=self._tensor(write),
            decodes=decodes,
            gather=None if dense else self._tensor(gather_R),
            scatter=None if dense else self._tensor(slots[:decodes]),
            lengths=self._tensor(lengths_R),
            longest=int(lengths_R.max()) if rows else 0,
            prefills=[
                (int(ends[i] - sizes[i]), int(ends[i]), int(slots[i]), int(lengths[i]))
                for i in range(decodes, len(sizes))
            ],
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _self_check(self) -> None:
        """Exact or refused: compare a packed prefill and decode of two rows with the plain forward pass."""
        length = min(24, self.limits.max_model_len)
        slots = min(2, self.limits.slots)
        rows = [[(7 * i + 3 + row) % self.limits.vocab for i in range(length - row)] for row in range(slots)]
        with torch.inference_mode():
            plain = [
                self.model(input_ids=torch.tensor([row], device=self.device), use_cache=False).logits[0, -1]
                for row in rows
            ]
        self.model.set_attn_implementation(ATTENTION)
        try:
            self.forward([Chunk(i, 0, row[:-1], False) for i, row in enumerate(rows)])
            packed = self.forward([Chunk(i, len(row) - 1, row[-1:], True) for i, row in enumerate(rows)])
        except (TypeError, RuntimeError, AttributeError, IndexError) as err:
            raise EngineError(
                f"{type(self.model).__name__} cannot run in packed steps ({err}); serve it with vLLM"
            ) from err
        expected = torch.stack(plain).float().log_softmax(-1)
        error = (packed.float().log_softmax(-1) - expected).abs().max().item()
        if not error < (1e-3 if self._dtype == torch.float32 else 0.2):
            raise EngineError(
                f"{type(self.model).__name__}: log-probs of packed steps differ from the plain forward pass by "
                f"{error:.2g}; the embedded engine cannot serve this architecture exactly, use vLLM"
            )
        self.cache.wipe(list(range(slots)))
        log.info("self-check: packed steps differ from the plain forward pass by %.1e", error)


def _refuse_unsupported(config: Any) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        raise EngineError(f"rope type {kind!r} makes one row depend on the others' lengths; serve this model with vLLM")


def _eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """Return the ids that end a sequence: generation_config.json's, else config.json's."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = getattr(config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (int(found),)
