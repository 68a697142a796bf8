"""The demo's policy: a tokenizer and a 0.6M-parameter Qwen3 model, both made here from nothing.

A model this small does not learn to copy names in a minute of training, so it does not start at random: two heads
of layer 0 attend to the previous token, and two heads of layer 1 find an earlier token whose predecessor equals the
current token and copy it (an induction circuit, Olsson et al. 2022, arXiv:2209.11895; "mimetic" starts, Trockman and
Kolter 2023, arXiv:2305.09828). Nothing in the construction knows a task, a word or a command.

Shapes: E hidden size, H head size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import agent
import torch
from renderers.configs import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer
from tasks import WORDS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

RENDERER_CONFIG = Qwen3RendererConfig(enable_thinking=True, thinking_retention="all")
"""No think block is put into the prompt, and history is bridged across user messages too."""

MAX_POSITIONS = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_HEADER = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n"
)
_TEMPLATE = ("system\n", "user\n", "assistant\n", _HEADER, _FOOTER.split("<tool_call>")[0], " XML tags:\n")
_TEMPLATE += ('\n{"name": <function-name>, "arguments": <args-json-object>}\n',)
_LOOP = (agent.SYSTEM, agent.SUMMARISE, agent.SO_FAR, agent.HELPER, agent.DONE, agent.JOIN, json.dumps(agent.TOOLS[0]))
_CALL = ('\n{"name": "bash", "arguments": {"command": "', '"}}\n')
_ASK = """set |change |rename |move |count lines of |write the length of |sort |put in order |append |add |delete line |
remove line |look up |find |copy |carry |repair |fix | to | in | into | from | and write it to | so that | passes|.conf|.txt|
.sh|.test""".replace("\n", "").split("|")
_SHELL = """sed -i 's/^|sed 's/^|=.*/|/' |mv |cp |wc -l < |wc -l | > | >> |echo |sed -i '/^|sed '/^|$/d' |grep ^|= |
sh |sed -i 's/|got | want |done: |found: """.replace("\n", "").split("|")
PHRASES: tuple[str, ...] = (*_TEMPLATE, *_LOOP, *_CALL, *_ASK, *_SHELL)
"""Texts that are one token each. They keep runs short, and they make the token before a name say what the name is."""


class RendererTokenizer:
    """What `renderers` asks of a tokenizer, over a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = "gyre-quickstart"
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = tokenizer.token_to_id("<|im_end|>")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the id of a token, or the ids of a list of tokens."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def make_renderer(tokenizer: Tokenizer) -> Qwen3Renderer:
    """Return the renderer that the proxy uses for this policy."""
    return Qwen3Renderer(RendererTokenizer(tokenizer), RENDERER_CONFIG)


def make_tokenizer() -> Tokenizer:
    """Train the byte-level BPE tokenizer; every word of the demo ends up as one token."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"[a-z]+|[A-Z][a-z]*|[0-9]|\s|.")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, min_frequency=1, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([" ".join((*WORDS, "ok", "error", "pass"))], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    plain = dict.fromkeys((*MARKERS, *PHRASES))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Build the model with its structured start."""
    torch.manual_seed(seed)
    im_end = tokenizer.token_to_id("<|im_end|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=[im_end, config.pad_token_id], pad_token_id=config.pad_token_id
    )
    with torch.no_grad():
        _build_in_copying(model, torch.Generator().manual_seed(seed))
    return model


_ROTATION = (0.40, 0.35, 0.25)
"""Share of the three fastest rotary pairs in the previous-token heads: offset 1 wins by 5 nats or more."""
_SLOW = 0.012
"""Radians per position below which a rotary pair is used for matching, as good as position-free."""


def _build_in_copying(model: Qwen3ForCausalLM, generator: torch.Generator) -> None:
    """Overwrite embeddings and the first two layers' heads 0 and 1 with the induction circuit.

    The hidden space is split by a random orthogonal basis: dim 0 carries a constant, P (63 dims) the token itself,
    Q (63 dims) the token before it.
    """
    E, H = model.config.hidden_size, model.config.head_dim
    half = H // 2
    basis_EE = torch.zeros(E, E)
    basis_EE[0, 0] = 1.0
    basis_EE[1:, 1:] = torch.linalg.qr(torch.randn(E - 1, E - 1, generator=generator))[0]
    P_E, Q_E = basis_EE[:, 1:64], basis_EE[:, 64:127]
    vocab = model.config.vocab_size
    token = torch.randn(vocab, P_E.shape[1], generator=generator)
    token = token / token.norm(dim=1, keepdim=True)
    embed = model.get_input_embeddings().weight
    embed.copy_(0.35 * token @ P_E.T)
    embed[:, 0] = 0.35
    omega = model.config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    scale = (E**0.5) * (0.35 / (2 * 0.35**2) ** 0.5)  # size of each part after the norm

    first = model.model.layers[0].self_attn
    amount = torch.tensor(_ROTATION).sqrt()
    query, key = torch.zeros(H), torch.zeros(H)
    key[: len(amount)] = amount
    # A query at position i, turned back by one position, points where the key of i - 1 points.
    query[: len(amount)] = amount * torch.cos(omega[: len(amount)])
    query[half : half + len(amount)] = -amount * torch.sin(omega[: len(amount)])
    for head in range(2):
        rows = slice(head * H, (head + 1) * H)
        dims = slice(head * H, min((head + 1) * H, 63))
        width = dims.stop - dims.start
        for projection, vector in ((first.q_proj, query), (first.k_proj, key)):
            projection.weight[rows] = 0.0
            projection.weight[rows, 0] = vector
        first.v_proj.weight[rows] = 0.0
        first.v_proj.weight[rows][:width] = P_E[:, dims].T
        first.o_proj.weight[:, rows] = 0.0
        first.o_proj.weight[:, rows][:, :width] = Q_E[:, dims] * (0.35 / scale)
    first.q_norm.weight.fill_(2.2)
    first.k_norm.weight.fill_(2.2)

    second = model.model.layers[1].self_attn
    slow = [pair for pair in range(half) if omega[pair] < _SLOW]
    slots = torch.tensor(slow + [pair + half for pair in slow])
    for head in range(2):
        rows = slice(head * H, (head + 1) * H)
        dims = slice(head * H, min((head + 1) * H, 63))
        width = dims.stop - dims.start
        match = torch.arange(len(slots)) + head * len(slots)
        second.q_proj.weight[rows] = 0.0
        second.q_proj.weight[rows.start + slots] = P_E[:, match].T
        second.k_proj.weight[rows] = 0.0
        second.k_proj.weight[rows.start + slots] = Q_E[:, match].T
        second.v_proj.weight[rows] = 0.0
        second.v_proj.weight[rows][:width] = P_E[:, dims].T
        second.o_proj.weight[:, rows] = 0.0
        second.o_proj.weight[:, rows][:, :width] = 0.12 * P_E[:, dims]
    second.q_norm.weight.fill_(1.76)
    second.k_norm.weight.fill_(1.76)


def as_transformers(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer as `transformers` sees it, with TRL's copy of Qwen3's chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
    fast.chat_template = resources.files("trl").joinpath("chat_templates", "qwen3.jinja").read_text()
    return fast


def save_policy(folder: Path, model: Qwen3ForCausalLM, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder that `AutoModelForCausalLM`, `AutoTokenizer` and vLLM load."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    fast = as_transformers(tokenizer)
    fast.save_pretrained(folder)
    # `transformers` may reorder added tokens; this file is the one that the proxy reads.
    tokenizer.save(str(folder / "tokenizer.json"))
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["chat_template"] = fast.chat_template
    config_path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def load_policy(folder: Path) -> tuple[Qwen3ForCausalLM, Tokenizer]:
    """Load what `save_policy` wrote."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))
