"""Draw one token per row and report its log-prob under the distribution it was drawn from.

The order of operations is vLLM's (`vllm/v1/sample/sampler.py`): ids held back by min_tokens, logit bias, penalties,
temperature, min-p, top-k, top-p, renormalisation. Greedy rows take the argmax after the penalties and report the
log-softmax at temperature 1. All in float32.

Shapes: B rows, V vocabulary, N candidates reported.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gyre_sdk.trainer.engines.sequence import Sequence
from gyre_sdk.trainer.engines.wire import LogProb, LogProbContent

__all__ = ["Draw", "Sampler"]

_MISSING = -9999.0
"""What vLLM writes for a log-prob of minus infinity."""


class Draw(NamedTuple):
    """One sampled token."""

    token: int
    logprob: float
    """In nats; NaN when the model's logits were not finite, and then `token` means nothing."""
    content: LogProbContent | None
    """None when the request wants no log-probs."""


class Sampler:
    """Owns the engine's generator; a request with a seed brings its own."""

    def __init__(self, seed: int | None, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def draw(self, logits_BV: torch.Tensor, rows: list[Sequence]) -> list[Draw]:
        """Sample every row."""
        logits_BV = self._edit(logits_BV.float(), rows)
        params = [row.params for row in rows]
        greedy = [p.greedy for p in params]
        logits_BV = self._shape(logits_BV, rows)
        logp_BV = logits_BV.log_softmax(-1)
        if all(greedy):
            tokens_B = logp_BV.argmax(-1)
        else:
            tokens_B = self._pick(logp_BV, rows)
            if any(greedy):
                tokens_B = torch.where(torch.tensor(greedy, device=self._device), logp_BV.argmax(-1), tokens_B)
        picked_B = logp_BV.gather(1, tokens_B[:, None])
        tokens, picked = tokens_B.tolist(), picked_B[:, 0].tolist()
        wanted = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        if wanted is None:
            return [Draw(t, lp, None) for t, lp in zip(tokens, picked, strict=True)]
        ranks = (logp_BV >= picked_B).sum(-1).tolist()
        top_values, top_ids = ([], []) if not wanted else (x.tolist() for x in logp_BV.topk(wanted))
        out = []
        for i, (token, logprob, rank) in enumerate(zip(tokens, picked, ranks, strict=True)):
            count = params[i].logprobs
            if count is None:
                out.append(Draw(token, logprob, None))
                continue
            best = [LogProb(token, logprob, rank)]
            for place in range(count):
                if top_ids[i][place] != token:
                    best.append(LogProb(top_ids[i][place], max(top_values[i][place], _MISSING), place + 1))
            out.append(Draw(token, logprob, LogProbContent(token, logprob, rank, best[: max(count, 1)])))
        return out

    def _edit(self, logits_BV: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
        """Apply what greedy sampling sees too."""
        edited = False
        for i, row in enumerate(rows):
            p = row.params
            held = row.never_yet if p.min_tokens else []
            penalised = p.repetition_penalty != 1.0 or p.frequency_penalty or p.presence_penalty
            if not (held or p.logit_bias or penalised):
                continue
            if not edited:
                logits_BV, edited = logits_BV.clone(), True
            logits_V = logits_BV[i]
            if held:
                logits_V[held] = float("-inf")
            if p.logit_bias:
                ids = torch.tensor(list(p.logit_bias), device=self._device)
                logits_V[ids] += torch.tensor(list(p.logit_bias.values()), device=self._device)
            if p.repetition_penalty != 1.0:
                ids = torch.tensor(sorted({*row.prompt_ids, *row.sampled}), device=self._device)
                seen = logits_V[ids]
                logits_V[ids] = torch.where(seen > 0, seen / p.repetition_penalty, seen * p.repetition_penalty)
            if (p.frequency_penalty or p.presence_penalty) and row.sampled:
                sampled = torch.tensor(row.sampled, device=self._device)
                counts_V = torch.bincount(sampled, minlength=logits_V.shape[0]).to(logits_V.dtype)
                logits_V -= p.frequency_penalty * counts_V + p.presence_penalty * (counts_V > 0)
        return logits_BV

    def _shape(self, logits_BV: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
        """Apply temperature, min-p, top-k and top-p to the rows that are not greedy."""
        params = [row.params for row in rows]
        V = logits_BV.shape[1]
        temperature = [1.0 if p.greedy else p.temperature for p in params]
        if any(t != 1.0 for t in temperature):
            logits_BV = logits_BV / torch.tensor(temperature, device=self._device)[:, None]
        min_p = [0.0 if p.greedy else p.min_p for p in params]
        if any(min_p):
            probs_BV = logits_BV.softmax(-1)
            floor_B = probs_BV.amax(-1) * torch.tensor(min_p, device=self._device)
            logits_BV = logits_BV.masked_fill(probs_BV < floor_B[:, None], float("-inf"))
        top_k = [V if p.greedy or p.top_k <= 0 else min(p.top_k, V) for p in params]
        top_p = [1.0 if p.greedy else p.top_p for p in params]
        if all(k == V for k in top_k) and all(p == 1.0 for p in top_p):
            return logits_BV
        order_BV = logits_BV.sort(-1)
        sorted_BV = order_BV.values
        kth_B1 = sorted_BV.gather(1, V - torch.tensor(top_k, device=self._device)[:, None])
        sorted_BV = sorted_BV.masked_fill(sorted_BV < kth_B1, float("-inf"))
        tail_BV = sorted_BV.softmax(-1).cumsum(-1)
        drop_BV = tail_BV <= 1.0 - torch.tensor(top_p, device=self._device)[:, None]
        drop_BV[:, -1] = False
        return torch.empty_like(logits_BV).scatter_(1, order_BV.indices, sorted_BV.masked_fill(drop_BV, float("-inf")))

    def _pick(self, logp_BV: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
        """Draw by inverting the cumulative distribution in float64: one uniform number per row."""
        uniform_B = torch.rand(len(rows), generator=self._generator, dtype=torch.float64, device=self._device)
        for i, row in enumerate(rows):
            seed = row.params.seed
            if seed is None or seed < 0 or row.params.greedy:
                continue
            if row.generator is None:
                row.generator = torch.Generator(self._device).manual_seed(seed)
            uniform_B[i : i + 1].uniform_(generator=row.generator)
        mass_BV = logp_BV.exp().cumsum(-1, dtype=torch.float64)
        total_B1 = mass_BV[:, -1:].contiguous()
        at_B1 = torch.minimum(uniform_B[:, None] * total_B1, total_B1.nextafter(torch.zeros_like(total_B1)))
        # right=True: the first token whose mass passes the point, so never one of probability 0.
        return torch.searchsorted(mass_BV, at_B1, right=True)[:, 0].clamp_max_(logp_BV.shape[1] - 1)
