"""Trees to train on and models to train, all random and seeded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gyre_sdk.trainer.units import Row

VOCAB = 512


class Tree:
    """Makes rows that share what they are told to share; each token is a target of the first row that has it."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self.rows: list[Row] = []

    def tokens(self, count: int) -> np.ndarray:
        """Draw token ids."""
        return self._draw.integers(3, VOCAB, count).astype(np.int32)

    def leaf(self, ids: np.ndarray, owned_from: int) -> None:
        """Add a row that owns its tokens from a position on."""
        targets = np.arange(max(1, owned_from), len(ids), dtype=np.int32)
        name = f"leaf{len(self.rows)}"
        self.rows.append(
            Row(
                run="run",
                leaf=name,
                role="main",
                ids=ids,
                targets=targets,
                weights=np.full(len(targets), 1.0 / len(targets)),
                logprobs=np.full(len(targets), -6.0),
                versions=np.zeros(len(targets), np.int32),
                advantage=1.0,
            )
        )


def comb(prefix: int, branches: int, branch: int) -> list[Row]:
    """Return one long prefix with branches at its end."""
    tree = Tree()
    trunk = tree.tokens(prefix)
    for place in range(branches):
        tree.leaf(np.concatenate([trunk, tree.tokens(branch)]), prefix if place else 0)
    return tree.rows


def agent(turns: int, system: int, turn: int, side: int) -> list[Row]:
    """Return an agent's run: a branch at each turn (a retry, a sub-call), and after the last one a compacted history.

    The compaction goes on from the system prompt with two turns of its own.
    """
    tree = Tree()
    spine = tree.tokens(system)
    ends: list[np.ndarray] = []
    for _ in range(turns):
        ends.append(np.concatenate([spine, tree.tokens(side)]))
        spine = np.concatenate([spine, tree.tokens(turn)])
    tree.leaf(spine, 0)
    for end in ends:
        tree.leaf(end, len(end) - side)
    tree.leaf(np.concatenate([spine[:system], tree.tokens(2 * turn)]), system)
    return tree.rows


def short_runs(count: int, shared: int, low: int, high: int) -> list[Row]:
    """Return runs of a few messages each, as the demo has them: a system prompt, then their own tokens."""
    tree = Tree()
    system = tree.tokens(shared)
    for _ in range(count):
        tree.leaf(np.concatenate([system, tree.tokens(int(tree._draw.integers(low, high)))]), shared + 5)
    return tree.rows


def path(tokens: int) -> list[Row]:
    """Return one row; its last quarter is owned."""
    tree = Tree()
    tree.leaf(tree.tokens(tokens), tokens * 3 // 4)
    return tree.rows


def shapes(quick: bool) -> dict[str, list[Row]]:
    """Return the trees by name."""
    if quick:
        return {
            "comb": comb(256, 4, 32),
            "agent": agent(4, 64, 32, 16),
            "short runs": short_runs(4, 30, 20, 40),
        }
    return {
        "comb": comb(4096, 8, 256),
        "agent": agent(12, 512, 128, 64),
        "short runs": short_runs(16, 30, 50, 90),
    }


def model(hidden: int) -> Any:
    """Return a causal LM of 2 layers."""
    torch.manual_seed(0)
    size = 16 if hidden < 128 else 64
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // size,
        num_key_value_heads=2,
        head_dim=size,
        max_position_embeddings=1 << 18,
    )
    return Qwen3ForCausalLM(config)


def half_billion(layers: int) -> Any:
    """Return a model with the shapes of Qwen2.5-0.5B, of which it has some layers."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)
