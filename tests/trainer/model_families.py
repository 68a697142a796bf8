"""Tiny models of the families that transformers has, with what makes each family special."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tiny_policy import VOCAB

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 8, **_EXPERTS}),
    "gemma2": ("Gemma2", {"head_dim": 8, **_WINDOWS}),
    "gemma3": ("Gemma3", {"head_dim": 8, **_WINDOWS}),
    "cohere2": ("Cohere2", {"sliding_window": 8}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "phi3": ("Phi3", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_MLA,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_next": ("Qwen3Next", {"head_dim": 8, "shared_expert_intermediate_size": 16, **_EXPERTS, **_LINEAR}),
    "qwen3_5": ("Qwen3_5", {"head_dim": 8, **_LINEAR}),
    "gpt_oss": ("GptOss", {"head_dim": 8, "num_local_experts": 4, **_WINDOWS}),
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "falcon_h1": (
        "FalconH1",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    ),
    "jamba": ("Jamba", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}),
    "recurrent_gemma": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 8}),
    "rwkv": ("Rwkv", {"attention_hidden_size": 32, "context_length": 64}),
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("Falcon", {}),
    "llama4": (
        "Llama4",
        {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 8},
    ),
    "nemotron": ("Nemotron", {}),
    "diffllama": ("DiffLlama", {}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
}


def family(name: str, seed: int = 0, **changes: Any) -> Any:
    """Return a tiny random causal LM of a family, with changes to its config."""
    prefix, settings = _FAMILIES[name]
    config_class = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    config = config_class(**{**_SHAPE, **settings, **changes})
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
