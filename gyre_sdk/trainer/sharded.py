"""A policy that is sharded over the ranks with FSDP2: running it, and putting its weights together.

Every forward and backward pass gathers parameters and scatters gradients by collectives, so all ranks must make as many
passes, in the same order. `ShardedExecutor` is `flat` under that rule: micro-steps that do nothing fill up the ranks that
have fewer. What makes a number of passes that depends on the rows' shape (`gather`, `dfs`) cannot be used.

accelerate shards on accelerators only; `prepare_sharding` lets it do the same on CPUs, over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.attention.budget import Budget
from gyre_sdk.trainer.attention.executor import Objective, Scores
from gyre_sdk.trainer.attention.flat import MicroBatch, collate, plan
from gyre_sdk.trainer.attention.head import score
from gyre_sdk.trainer.ranks import Ranks
from gyre_sdk.trainer.units import Row


def prepare_sharding(accelerator: Accelerator, plugin_settings: dict[str, Any] | None) -> None:
    """Set up sharding where it is asked for: on CPUs too, and with checkpoints in shards.

    Args:
        plugin_settings: of accelerate's plugin, from the training arguments; None where FSDP can only be asked for by
            `accelerate launch`.

    Raises:
        SettingsError: FSDP1 is asked for.
    """
    wanted = plugin_settings is not None or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if wanted and accelerator.distributed_type is DistributedType.MULTI_CPU:
        state = accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**(plugin_settings or {}))
        state.distributed_type = DistributedType.FSDP
        if accelerator.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise SettingsError("FSDP1 averages gradients by itself: use FSDP2 (accelerate launch --fsdp_version 2)")
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type("SHARDED_STATE_DICT")  # a whole one cannot be loaded again over gloo


def is_sharded(model: Any) -> bool:
    """Tell whether a model's weights lie on several ranks."""
    return isinstance(model, FSDPModule)


def sum_gradients(model: Any) -> None:
    """Let FSDP2 sum what the ranks found: by itself it takes their mean."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction with a factor


def whole_weights(model: Any, *, keep: bool) -> dict[str, Tensor]:
    """Put the weights together on the CPU, tied ones once; every rank has to call this. Empty where not `keep`."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            found[name] = whole.detach().to("cpu")
    return found


def shard(model: Any, device: torch.device, size: int) -> None:
    """Shard a model over all ranks, layer by layer, in place; no device holds more than a layer of it whole.

    Parameters are gathered and gradients are summed in the type that they have; the executor's precision is autocast.

    Args:
        device: where this rank computes.
        size: number of ranks.
    """
    mesh = init_device_mesh(device.type, (size,))
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = set(plain._no_split_modules or ())
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sum_gradients(model)


def put_together(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Put shards together on the CPU, one tensor at a time; every rank has to call this. Empty where not `keep`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        one = tensor.detach()
        one = one.full_tensor() if isinstance(one, DTensor) else one
        if keep:
            found[name] = one.to("cpu", copy=True)
    return found


def parts(like: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's part of rank 0's tensors, one at a time; every rank has to go through all of them.

    Args:
        like: tensors of the same names, shapes and types, the same on every rank: where one is a shard, the part is that
            shard, else it is all.
        whole: by name, wherever they are; None on the other ranks.
    """
    for name, target in like.items():
        if whole is None:
            source = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        else:
            source = whole[name].detach().to(target.device, target.dtype).contiguous()
        if isinstance(target, DTensor):
            yield name, distribute_tensor(source, target.device_mesh, target.placements)
        else:
            dist.broadcast(source, src=0)
            yield name, source


def fill(targets: Mapping[str, Tensor], whole: Mapping[str, Tensor] | None) -> None:
    """Fill tensors with this rank's part of rank 0's. Every rank has to call this; arguments as of `parts`."""
    for name, part in parts(targets, whole):
        target = targets[name].detach()
        if isinstance(target, DTensor):
            target.to_local().copy_(part.to_local())  # type: ignore[attr-defined]
        else:
            target.copy_(part)


class ShardedExecutor:
    """Runs every row by itself, through the forward method that FSDP2 has its hooks on."""

    name = "flat"

    def __init__(self, model: Any, budget: Budget, ranks: Ranks) -> None:
        """`model` is what accelerate prepared."""
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._model = model
        self._head = plain.get_output_embeddings()
        self._budget = budget
        self._ranks = ranks
        self._at_once = max(1, budget.logits // int(plain.config.get_text_config().vocab_size))
        if self._head is None:
            raise TrainerError(f"{type(plain).__name__} has no output embeddings; train it without FSDP")

    def forward(self, rows: Sequence[Row]) -> Scores:
        """Score the targets without a gradient. Every rank has to call this, if only with no rows."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        with torch.no_grad():
            for batch in self._micro_steps(rows):
                logp_K, entropy_K = self._scores(batch)
                found.append((batch.index_K, logp_K, entropy_K))
        return _in_row_order(found)

    def forward_backward(self, rows: Sequence[Row], objective: Objective) -> Scores:
        """Score the targets and add the gradient of the summed objective. Every rank has to call this."""
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for batch in self._micro_steps(rows):
            with torch.enable_grad():
                logp_K, entropy_K = self._scores(batch)
                loss = 0.0 * logp_K.sum()  # whatever the objective is, the backward pass reaches every layer
                if len(batch.index_K):
                    loss = loss + objective(logp_K, entropy_K, batch.index_K)
            loss.backward()
            found.append((batch.index_K, logp_K.detach(), entropy_K.detach()))
        return _in_row_order(found)

    def _micro_steps(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Return the micro-steps of rows, then empty ones: as many in all as the rank with most has."""
        device = next(self._model.parameters()).device
        rows = [row for row in rows if len(row.targets)]
        found: list[MicroBatch] = []
        for order in plan([int(row.targets[-1]) for row in rows], self._budget.tokens):
            found += _parts(collate(rows, order, device), self._at_once)
        most = int(self._ranks.most(torch.tensor(len(found))))
        return found + [_idle(device)] * (most - len(found))

    def _scores(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._budget.precision(batch.ids_BT.device), _only(self._head, batch.row_K, batch.pos_K):
            logits_KV = self._model(input_ids=batch.ids_BT, use_cache=False).logits
        return score(logits_KV, batch.label_K, batch.temperature_K)


@contextmanager
def _only(head: Any, row_K: Tensor, pos_K: Tensor) -> Iterator[None]:
    """Let the head see the positions that predict a target, and no others: (B, T, D) becomes (K, D)."""
    hook = head.register_forward_pre_hook(lambda module, args: (args[0][row_K, pos_K], *args[1:]))
    try:
        yield
    finally:
        hook.remove()


def _parts(batch: MicroBatch, at_once: int) -> Iterator[MicroBatch]:
    """Yield a micro-batch in parts of at most so many targets, each with the whole context."""
    for start in range(0, len(batch.index_K), at_once):
        part = slice(start, start + at_once)
        yield replace(
            batch,
            row_K=batch.row_K[part],
            pos_K=batch.pos_K[part],
            label_K=batch.label_K[part],
            temperature_K=None if batch.temperature_K is None else batch.temperature_K[part],
            index_K=batch.index_K[part],
        )


def _idle(device: torch.device) -> MicroBatch:
    """Return a pass over one token, whose score is nobody's."""
    zero_K = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(zero_K[None], zero_K, zero_K, zero_K, temperature_K=None, index_K=zero_K[:0])


def _in_row_order(found: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Scores:
    """Put the `(index_K, logp_K, entropy_K)` of micro-steps where they belong."""
    real = [part for part in found if len(part[0])]
    if not real:
        return Scores(torch.empty(0), torch.empty(0))
    order_K = torch.cat([index_K for index_K, _, _ in real]).argsort()
    logp_K, entropy_K = torch.cat([logp for _, logp, _ in real]), torch.cat([entropy for _, _, entropy in real])
    return Scores(logp_K[order_K], entropy_K[order_K])
