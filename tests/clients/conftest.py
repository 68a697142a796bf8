"""A model folder for real programs: their prompts are long, so its vocabulary knows words and its context is long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
CONTEXT = 200_000
VOCABULARY = 2000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE, Qwen3's control tokens and no weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    texts = [
        path.read_text()
        for folder_ in ("docs", "gyre_sdk/harness")
        for path in sorted((ROOT / folder_).rglob("*.[mp][dy]"))
    ]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="session")
def weights(model: Path) -> Path:
    """The model folder, with random weights for its vocabulary; what they say is short."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from engine_process import make_model

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config, end = json.loads((model / "config.json").read_text()), tokenizer.token_to_id("<|im_end|>")
    random = make_model(
        model,
        0,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=False,
        eos_token_id=end,
    )
    with torch.no_grad():  # one direction that every state has makes each token an end with a chance of about 1 in 100
        random.model.embed_tokens.weight[:, 0] = 1.0
        random.lm_head.weight[end, 0] = 1.2
    random.save_pretrained(model)
    return model
