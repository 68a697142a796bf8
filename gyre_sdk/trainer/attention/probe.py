"""What a model does between its tokens, found by running it on a few of them.

Executors that share prefixes replace a model's attention function. They are right only if tokens meet nowhere else, and
if that function is told all there is to attention. A config tells a part of it; the rest is observed:

* a recording attention function sees with what each layer calls it;
* when attention gives every token its own value back, no token may notice that another one was changed.

Shapes: B rows, T tokens, H heads, J K/V heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from gyre_sdk.trainer.attention.attend import attending, window_for_mask
from gyre_sdk.trainer.attention.noise import rates
from gyre_sdk.trainer.attention.policy import supports

_NAME = "gyre_recording"
_TOKENS = 6
_COMMON = {
    "dropout", "is_causal", "scaling", "softcap", "position_ids", "cache_position", "use_cache", "output_router_logits",
}  # fmt: skip
"""Arguments of attention that are known to every executor or mean nothing to it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the attention function."""

    layer: int | None
    window: int | None
    """Positions that a token sees, its own included; None for all."""
    extras: frozenset[str]
    """Arguments beside those that every attention has."""
    reached: bool
    """Whether a keyword given to the model arrived."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a model was seen to do."""

    calls: tuple[Call, ...]
    mixes: bool
    """Whether tokens meet outside of attention: a convolution, a recurrent state, a shift."""


def obstacles(model: Any) -> list[str]:
    """Return why the tokens of several rows of a causal LM must not share prefixes; empty if they may."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if (reason := supports(model)) is not None:
        return [reason]
    text = model.config.get_text_config()
    found = []
    if noisy := rates(model):
        name, rate = max(noisy.items(), key=lambda item: item[1])
        found.append(f"its passes differ by chance ({name} = {rate:g})")
    if getattr(text, "output_router_logits", False):
        found.append("its config asks for the routers' auxiliary loss, a mean over the tokens of a forward pass")
    try:
        seen = observe(model)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        return [*found, f"it could not be looked at ({type(error).__name__}: {error})"]
    return found + judged(seen, tuple(getattr(text, "layer_types", None) or ()), getattr(text, "sliding_window", None))


def judged(seen: Observed, layers: tuple[str, ...], window: int | None) -> list[str]:
    """Return what speaks against sharing prefixes in what was seen.

    Args:
        seen: the observation.
        layers: layer types of the config, where it has them.
        window: sliding window of the config.
    """
    found = []
    if seen.mixes:
        found.append("its tokens meet outside of attention")
    if not seen.calls or not all(call.reached for call in seen.calls):
        found.append("it does not hand keywords on to its attention")
    if extras := sorted(frozenset().union(*(call.extras for call in seen.calls))):
        found.append(f"its attention takes {', '.join(extras)}")
    numbers = [call.layer for call in seen.calls]
    if None in numbers or len(set(numbers)) < len(numbers):
        found.append("a layer attends more than once")
    wanted = sum(layer == "sliding_attention" for layer in layers) if layers else len(numbers) * (window is not None)
    if sum(call.window is not None for call in seen.calls) < wanted:
        found.append("its attention is not told of its sliding windows")
    return found


def observe(model: Any) -> Observed:
    """Run a model on a few tokens without gradient; its mode and weights stay as they are."""
    device = next(model.parameters()).device
    ids_BT = (torch.arange(_TOKENS, device=device) % 2)[None]
    changed_BT = ids_BT.clone()
    changed_BT[0, 0] = 1
    record = _Record()
    with torch.no_grad(), _resting(model), attending(model, _NAME), _written(record):
        inputs = {"use_cache": False, "gyre_record": record}
        plain_TV = model(input_ids=ids_BT, **inputs).logits[0].double()
        calls = tuple(record.calls)
        other_TV = model(input_ids=changed_BT, **inputs).logits[0].double()
    moved = float((plain_TV - other_TV)[1:].abs().max())
    noise = 16 * torch.finfo(next(model.parameters()).dtype).eps * float(plain_TV.abs().max())
    return Observed(calls, moved > noise)


@dataclass(slots=True)
class _Record:
    calls: list[Call] = field(default_factory=list)


_reading: list[_Record] = []
"""The records that are being written, the innermost last: a model that hands no keywords on is recorded all the same."""


def _own_value(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None = None,
    gyre_record: _Record | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Note the call; give each token of values (B, J, T, D) its own one back as (B, T, H, D)."""
    window = sliding_window if attention_mask is None else int(attention_mask)
    off = (name for name, given in extra.items() if given is None or given is False)
    strange = frozenset(extra) - frozenset(off) - _COMMON
    layer = getattr(module, "layer_idx", None)
    _reading[-1].calls.append(Call(layer, window, strange, gyre_record is _reading[-1]))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _own_value)
AttentionMaskInterface.register(_NAME, window_for_mask)


@contextmanager
def _written(record: _Record) -> Iterator[None]:
    """Have the recording function write here."""
    _reading.append(record)
    try:
        yield
    finally:
        _reading.pop()


@contextmanager
def _resting(model: Any) -> Iterator[None]:
    """Put a model in evaluation mode for a while: no dropout, no checkpointing."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
