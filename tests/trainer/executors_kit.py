"""Rows in the shapes of trees, and what separate sequences give for them: the truth that executors are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from tiny_policy import VOCAB
from torch import Tensor
from torch.nn import functional

from gyre_sdk.trainer.attention.executor import Executor, Objective, Scores
from gyre_sdk.trainer.units import Row


@contextmanager
def nothing_narrowed() -> Iterator[None]:
    """Leave float64 as it is where transformers casts to float32, in whatever model."""
    to, to_type, to_float, softmax = torch.Tensor.to, torch.Tensor.type, torch.Tensor.float, functional.softmax

    def keeping(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wanted = kwargs.get("dtype", args[0] if args else None)
        return self if self.dtype == torch.float64 and wanted == torch.float32 else to(self, *args, **kwargs)

    def keeping_type(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 and dtype == torch.float32 else to_type(self, dtype, **kwargs)

    def wide(x: Tensor, dim: int | None = None, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", keeping)
        patch.setattr(torch.Tensor, "type", keeping_type)
        patch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else to_float(self))
        patch.setattr(functional, "softmax", wide)
        yield


def row(
    ids: Sequence[int] | np.ndarray,
    targets: Sequence[int] | np.ndarray,
    *,
    run: str = "run",
    weight: float = 1.0,
    advantage: float = 1.0,
    temperature: float = 1.0,
) -> Row:
    count = len(targets)
    return Row(
        run=run,
        leaf=f"{run}/{len(ids)}",
        role="main",
        ids=np.asarray(ids, np.int32),
        targets=np.asarray(targets, np.int32),
        weights=np.full(count, weight),
        logprobs=np.full(count, -3.0),
        versions=np.zeros(count, np.int32),
        advantage=advantage,
        temperatures=np.full(count, temperature),
    )


@st.composite
def forests(draw: st.DrawFn, most: int = 7, vocab: int = VOCAB) -> list[Row]:
    """Rows that begin like one another more often than not: branches, equal rows, rows within rows, several roots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found: list[Row] = []
    for place in range(draw(st.integers(1, most))):
        head = np.empty(0, np.int64)
        if found and rng.random() < 0.8:
            above = found[rng.integers(len(found))].ids
            head = above[: rng.integers(0, len(above) + 1)]
        ids = np.concatenate([head, rng.integers(0, vocab, rng.integers(2, 24))])
        targets = np.flatnonzero(rng.random(len(ids) - 1) < rng.choice([0.1, 0.5, 1.0])) + 1
        weight, advantage, temperature = rng.random(), rng.normal(), rng.choice([0.7, 1.0])
        found.append(
            row(ids, targets, run=f"r{place % 3}", weight=weight, advantage=advantage, temperature=temperature)
        )
    return found


def agent_rows(seed: int = 0, *, system: int = 20, turns: int = 5, turn: int = 9, side: int = 6) -> list[Row]:
    """Two runs: a history that grows with a side call at each turn, a compaction half-way, sub-agents of their own.

    All begin with one system prompt; a row trains what it sampled, and weights sum to 1 over a run.
    """
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(3, VOCAB, count)

    prompt = tokens(system)
    found: list[Row] = []
    for run in ("a", "b"):
        history, sampled = np.concatenate([prompt, tokens(4)]), []
        rows: list[tuple[np.ndarray, np.ndarray]] = []
        for number in range(turns):
            rows.append((np.concatenate([history, tokens(side)]), np.arange(len(history) + 1, len(history) + side)))
            sampled.append(np.arange(len(history) + 2, len(history) + turn))  # what a tool said is not a target
            history = np.concatenate([history, tokens(turn)])
            if number == (turns - 1) // 2:
                rows.append((history, np.concatenate(sampled)))
                history, sampled = np.concatenate([prompt, tokens(7)]), []
        if sampled:
            rows.append((history, np.concatenate(sampled)))
        agent = np.concatenate([prompt, tokens(11)])
        rows.append((agent, np.arange(system + 3, len(agent))))
        count = sum(len(targets) for _, targets in rows)
        advantage = 1.0 if run == "a" else -0.6
        found += [row(ids, targets, run=run, weight=1 / count, advantage=advantage) for ids, targets in rows]
    return found


def comb(prefix: int, branches: int, branch: int, vocab: int = VOCAB) -> list[Row]:
    rng = np.random.default_rng(0)
    head = rng.integers(0, vocab, prefix)
    return [
        row(
            np.concatenate([head, rng.integers(0, vocab, branch)]),
            np.arange(prefix, prefix + branch),
            run=f"r{place}",
            weight=1 / branch,
            advantage=place - (branches - 1) / 2,
        )
        for place in range(branches)
    ]


def two_level(rows: Sequence[Row]) -> Objective:
    """A clipped surrogate with the weights of the rows, and some entropy: not linear in either."""
    weight_K, advantage_K, behaviour_K = (
        torch.from_numpy(np.concatenate(parts))
        for parts in (
            [row.weights for row in rows],
            [row.advantages for row in rows],
            [row.logprobs for row in rows],
        )
    )

    def objective(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        ratio_C = (0.1 * (logp_C - behaviour_K[index_C].to(logp_C))).exp()
        advantage_C = advantage_K[index_C].to(logp_C)
        gain_C = torch.min(ratio_C * advantage_C, ratio_C.clamp(0.9, 1.1) * advantage_C)
        return -((gain_C + 0.05 * entropy_C.square()) * weight_K[index_C].to(logp_C)).sum()

    return objective


def cut_row(one: Row, at: Sequence[int]) -> list[Row]:
    """Spread a row's targets over several rows with the same path."""
    names = ("targets", "weights", "logprobs", "versions", "calls", "advantages", "temperatures")
    bounds = [0, *sorted(at), len(one.targets)]
    return [
        replace(one, leaf=f"{one.leaf}-{start}", **{name: getattr(one, name)[start:stop] for name in names})
        for start, stop in pairwise(bounds)
        if stop > start
    ]


Loss = Callable[[Tensor, Tensor], Tensor]
Found = tuple[Tensor, Scores, dict[str, Tensor]]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def separately(model: Any, rows: Sequence[Row], loss: Loss) -> Found:
    """Loss, scores and gradients where every row is a sequence of its own, run by the model as it is."""
    model.zero_grad()
    logps, entropies = [], []
    for one in rows:
        if not len(one.targets):
            continue
        logits_TV = model(input_ids=torch.from_numpy(one.ids.astype(np.int64))[None], use_cache=False).logits[0]
        z_KV = logits_TV[one.targets - 1].to(torch.promote_types(logits_TV.dtype, torch.float32))
        logp_KV = (z_KV / torch.from_numpy(one.temperatures).to(z_KV)[:, None]).log_softmax(-1)
        logps.append(logp_KV.gather(-1, torch.from_numpy(one.ids[one.targets].astype(np.int64))[:, None])[:, 0])
        entropies.append(-(logp_KV.exp() * logp_KV).sum(-1))
    logp_K, entropy_K = torch.cat(logps), torch.cat(entropies)
    value = loss(logp_K, entropy_K)
    value.backward()
    return value.detach(), Scores(logp_K.detach(), entropy_K.detach()), gradients(model)


def everywhere(objective: Objective) -> Loss:
    """An objective as a loss of all targets."""
    return lambda logp_K, entropy_K: objective(logp_K, entropy_K, torch.arange(len(logp_K)))


def shared(executor: Executor, model: Any, rows: Sequence[Row], objective: Objective) -> Found:
    """The same by an executor."""
    model.zero_grad()
    values = []

    def noting(logp_C: Tensor, entropy_C: Tensor, index_C: Tensor) -> Tensor:
        value = objective(logp_C, entropy_C, index_C)
        values.append(value.detach())
        return value

    scores = executor.forward_backward(rows, noting)
    return torch.stack(values).sum(), scores, gradients(model)


def difference(found: Found, wanted: Found) -> float:
    """The largest relative difference: of the loss, the scores, and each parameter's gradient."""
    assert found[2].keys() == wanted[2].keys()
    pairs = [
        (found[0], wanted[0]),
        (found[1].logp_K, wanted[1].logp_K),
        (found[1].entropy_K, wanted[1].entropy_K),
        *((found[2][name], wanted[2][name]) for name in wanted[2]),
    ]
    # a gradient that is all cancellation (a bias that softmax ignores) is measured against the others
    least = 1e-3 * max(float(gradient.norm()) for gradient in wanted[2].values())
    return max(float((one - other).norm()) / max(float(other.norm()), least) for one, other in pairs)
