"""TRL's own `GRPOTrainer` on rows: prompts padded on the left, completions on the right, one micro-batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tiny_policy import VOCAB, gradient
from trl import GRPOConfig, GRPOTrainer

from gyre_sdk.trainer.units import Row

MAX_COMPLETION = 40


def word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCAB)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), pad_token="w0", eos_token="w2"
    )


def trls(
    model: Any,
    rows: list[Row],
    folder: Path,
    tokenizer: Any,
    *,
    reference_K: torch.Tensor | None = None,
    proximal_K: torch.Tensor | None = None,
    sampled_elsewhere: bool = False,
    beta: float = 0.0,
    **options: Any,
) -> tuple[float, torch.Tensor]:
    """The loss and the gradient of TRL's `GRPOTrainer`.

    Args:
        reference_K: log-probs under the reference, in row order.
        proximal_K: log-probs under the old policy; None takes the current one, where sampling was elsewhere.
        sampled_elsewhere: take the rows' log-probs as vLLM's, as with `use_vllm`; otherwise as the old policy's.
    """
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=len(rows),
        num_generations=len(rows),
        max_completion_length=MAX_COMPLETION,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=0.0,  # with another value TRL loads a reference model from the hub
        report_to=[],
        **options,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda **_: [0.0],
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = beta
    dtype = next(model.parameters()).dtype
    if dtype == torch.float64:  # TRL's tiled LM head computes in float32
        trainer._get_per_token_logps_and_entropies = _plain_logps
    first = [int(row.targets[0]) for row in rows]
    prompt = max(first)
    shape = (len(rows), max(len(row.ids) - start for row, start in zip(rows, first, strict=True)))
    prompt_ids = torch.zeros(len(rows), prompt, dtype=torch.long)
    prompt_mask = torch.zeros_like(prompt_ids)
    completion_ids = torch.zeros(shape, dtype=torch.long)
    completion_mask, tool_mask = torch.zeros_like(completion_ids), torch.zeros_like(completion_ids)
    for place, (row, start) in enumerate(zip(rows, first, strict=True)):
        ids = torch.from_numpy(row.ids.astype(np.int64))
        prompt_ids[place, prompt - start :] = ids[:start]
        prompt_mask[place, prompt - start :] = 1
        completion_ids[place, : len(ids) - start] = ids[start:]
        completion_mask[place, : len(ids) - start] = 1
        tool_mask[place, row.targets - start] = 1

    def padded(values_K: torch.Tensor) -> torch.Tensor:
        values = torch.zeros(shape, dtype=torch.float64)
        values[tool_mask.bool()] = values_K.double()
        return values.to(dtype)

    behaviour = padded(torch.from_numpy(np.concatenate([row.logprobs for row in rows])))
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "tool_mask": tool_mask,
        "advantages": torch.tensor([row.advantage for row in rows], dtype=dtype),
        "num_items_in_batch": tool_mask.sum(),
    }
    if reference_K is not None:
        inputs["ref_per_token_logps"] = padded(reference_K)
    if sampled_elsewhere:
        trainer.use_vllm = True
        old = None if proximal_K is None else padded(proximal_K)
        if old is None:
            ids, mask = (torch.cat(pair, 1) for pair in ((prompt_ids, completion_ids), (prompt_mask, completion_mask)))
            with torch.no_grad():
                old = trainer._get_per_token_logps_and_entropies(model, ids, mask, shape[1])[0]
        inputs |= {
            "old_per_token_logps": old,
            "sampling_per_token_logps": behaviour,
            "importance_sampling_ratio": _importance(trainer, (old - behaviour) * tool_mask),
        }
    else:
        inputs["old_per_token_logps"] = behaviour
    model.train()
    model.zero_grad()
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    return loss.item(), gradient(model)


def _importance(trainer: Any, difference: torch.Tensor) -> torch.Tensor:
    """What `_generate_and_score_completions` hands on, where nothing else can be had of it without generating."""
    mode = trainer.vllm_importance_sampling_mode
    low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    outside = (ratio < (-np.inf if low is None else low)) | (ratio > (np.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


def _plain_logps(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
    logps = logits.log_softmax(-1)
    picked = logps.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
    return picked, -(logps.exp() * logps).sum(-1), None
