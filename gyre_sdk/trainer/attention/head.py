"""The language-model head, a few targets at a time: the logits of a long path never exist at once.

Shapes: K targets, C of them at a time, D hidden size, V vocabulary, T tokens.

An objective that is a sum over targets gives the gradient of a chunk's logits as soon as they are there. So each chunk
is projected, scored, differentiated and forgotten, and only the gradient of the hidden states is kept: every logit is
computed once, as if all had been kept, and the head's weights get their gradient on the way.

Some models do more than a matrix product: they cap logits (Gemma), scale them (Cohere, Granite, Falcon-H1) or the
hidden states (MiniCPM). What a head does is found by asking it: a forward pass of the model whose head is made to
answer with known numbers shows what is done before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective

After = Callable[[Tensor], Tensor]
"""What a model does to the logits that its head gave."""
_HALF = (torch.bfloat16, torch.float16)
_PROBE_TOKENS = 4


class Head:
    """Turns hidden states at which targets were sampled into log-probs, entropies and gradients."""

    def __init__(self, project: Callable[[Tensor], Tensor], width: int, budget: Budget) -> None:
        """Keep how to project.

        Args:
            project: hidden states (C, D) -> logits (C, V); differentiable.
            width: logits of a target, V.
            budget: its `logits` sets the size of a chunk.
        """
        self._project = project
        self._budget = budget
        self._at_once = max(1, budget.logits // width)

    def scores(self, hidden_KD: Tensor, label_K: Tensor, temperature_K: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `(logp_K, entropy_K)` in nats, without gradient.

        Args:
            hidden_KD: last hidden state at the position that predicts each target.
            label_K: token id of each target.
            temperature_K: divides the logits of each target; None for 1 everywhere.
        """
        with torch.no_grad(), self._budget.precision(hidden_KD.device):
            parts = [
                self._score(self._project(hidden_KD[part]), label_K[part], temperature_K, part)
                for part in self._parts(label_K)
            ]
        return _joined(parts, hidden_KD)

    def gradients(
        self,
        hidden_KD: Tensor,
        label_K: Tensor,
        temperature_K: Tensor | None,
        index_K: Tensor,
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(logp_K, entropy_K, gradient_KD)`; add the gradient of the head's own weights into their `.grad`.

        Args:
            hidden_KD: as in `scores`; its graph is not touched: hand `gradient_KD` on to it, once.
            index_K: place of each target among the row-order targets, for the objective.
        """
        gradient_KD = torch.empty_like(hidden_KD)
        parts: list[tuple[Tensor, Tensor]] = []
        with torch.enable_grad(), self._budget.precision(hidden_KD.device):
            for part in self._parts(label_K):
                hidden_CD = hidden_KD[part].detach().requires_grad_()
                logits_CV = self._project(hidden_CD)
                with torch.autocast(hidden_KD.device.type, enabled=False):
                    logp_C, entropy_C = self._score(logits_CV, label_K[part], temperature_K, part)
                    loss = objective(logp_C, entropy_C, index_K[part])
                    if loss.requires_grad:
                        loss.backward()
                gradient_KD[part] = 0 if hidden_CD.grad is None else hidden_CD.grad
                parts.append((logp_C.detach(), entropy_C.detach()))
        logp_K, entropy_K = _joined(parts, hidden_KD)
        return logp_K, entropy_K, gradient_KD

    def _parts(self, label_K: Tensor) -> list[slice]:
        return [slice(start, start + self._at_once) for start in range(0, len(label_K), self._at_once)]

    @staticmethod
    def _score(logits_CV: Tensor, label_C: Tensor, temperature_K: Tensor | None, part: slice) -> tuple[Tensor, Tensor]:
        return score(logits_CV, label_C, None if temperature_K is None else temperature_K[part])


def score(logits_CV: Tensor, label_C: Tensor, temperature_C: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return `(logp_C, entropy_C)` of `logits / temperature` in nats, both differentiable.

    Half-precision logits are widened first. A few buffers of their size exist while this runs.
    """
    found: tuple[Tensor, Tensor] = _Score.apply(logits_CV, label_C, temperature_C)
    return found


class _Score(torch.autograd.Function):
    """Log-prob of a label and entropy, from one softmax. With p the probabilities and H their entropy::

    d logp_label / d z = onehot(label) - p          d H / d z = -p (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, label_C: Tensor, temperature_C: Tensor | None) -> tuple[Tensor, Tensor]:
        z_CV = logits_CV.float() if logits_CV.dtype in _HALF else logits_CV
        if temperature_C is not None:
            z_CV = z_CV / temperature_C[:, None].to(z_CV.dtype)
        logp_CV = z_CV.log_softmax(-1)
        p_CV = logp_CV.exp()
        logp_C = logp_CV.gather(-1, label_C[:, None]).squeeze(-1)
        # a token that is ruled out has p = 0 and log p = -inf: it adds nothing to the entropy
        entropy_C = -torch.linalg.vecdot(p_CV, logp_CV.clamp_(min=torch.finfo(logp_CV.dtype).min))
        ctx.save_for_backward(p_CV, logp_CV, entropy_C, label_C, *(() if temperature_C is None else (temperature_C,)))
        ctx.dtype = logits_CV.dtype
        ctx.set_materialize_grads(False)
        return logp_C, entropy_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_C: Tensor | None, entropy_slope_C: Tensor | None) -> tuple[Tensor | None, None, None]:
        p_CV, logp_CV, entropy_C, label_C, *rest = ctx.saved_tensors
        if slope_C is None and entropy_slope_C is None:
            return None, None, None
        slope_C = torch.zeros_like(entropy_C) if slope_C is None else slope_C
        if entropy_slope_C is None:
            gradient_CV = p_CV * -slope_C[:, None]
        else:
            gradient_CV = (logp_CV + entropy_C[:, None]).mul_(entropy_slope_C[:, None]).add_(slope_C[:, None])
            gradient_CV.mul_(p_CV).neg_()
        gradient_CV.scatter_add_(-1, label_C[:, None], slope_C[:, None])
        if rest:
            gradient_CV.div_(rest[0][:, None])
        return gradient_CV.to(ctx.dtype), None, None


def separated(model: Any) -> tuple[Any, After] | None:
    """Return a causal LM's backbone and what it does to its head's logits; None where the two cannot be told apart.

    The model is run once on a few tokens, with its head answering a ramp of numbers, so that what it does to them is
    seen whatever its weights are.
    """
    head = model.get_output_embeddings()
    if head is None:
        return None
    found: list[tuple[Any, Tensor]] = []
    seen: dict[str, Tensor] = {}

    def after_module(module: Any, args: Any, output: Any) -> None:
        hidden_BTD = getattr(output, "last_hidden_state", None)
        if module is not model and isinstance(hidden_BTD, Tensor):
            found.append((module, hidden_BTD))

    def instead_of_head(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        seen["into"] = args[0]
        ramp_V = torch.linspace(-60, 60, output.shape[-1], device=output.device).to(output.dtype)
        seen["ramp"] = ramp_V.expand(output.shape).clone()
        return seen["ramp"].clone()

    hooks = [module.register_forward_hook(after_module) for module in model.modules()]
    hooks.append(head.register_forward_hook(instead_of_head))
    device = next(model.parameters()).device
    try:
        with torch.no_grad():
            ids_BT = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=device)
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    # the outermost module that gives what the head takes: it is called last
    backbone = next((module for module, hidden in reversed(found) if torch.equal(hidden, seen["into"])), None)
    if backbone is None:
        return None
    for after in _known(model.config.get_text_config()):
        if torch.equal(after(seen["ramp"]).to(logits_BTV.dtype), logits_BTV):
            return backbone, after
    return None


def _known(text: Any) -> list[After]:
    """Return what transformers' models do to logits, with the numbers of a config."""
    found: list[After] = [lambda logits: logits, lambda logits: logits.float()]
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        if isinstance(cap := getattr(text, name, None), float | int):
            found.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)  # type: ignore[misc]
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        if isinstance(scale := getattr(text, name, None), float | int):
            found.append(lambda logits, scale=scale: logits * scale)  # type: ignore[misc]
    if isinstance(scale := getattr(text, "logits_scaling", None), float | int):
        found.append(lambda logits, scale=scale: logits / scale)  # type: ignore[misc]
        found.append(lambda logits, scale=scale: logits * scale)  # type: ignore[misc]
    return found


def _joined(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> tuple[Tensor, Tensor]:
    if not parts:
        nothing = torch.empty(0, device=like.device, dtype=torch.float32 if like.dtype in _HALF else like.dtype)
        return nothing, nothing.clone()
    return torch.cat([logp for logp, _ in parts]), torch.cat([entropy for _, entropy in parts])
