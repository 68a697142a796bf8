"""The tokenizer that the benchmark runs with, the tokens that the stub samples, and text of an exact length."""

from __future__ import annotations

import gzip
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "qwen3" / "tokenizer.json.gz"
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_SAID = (
    "The failing assertion is in tests/test_parser.py, line 41: the parser drops the last field when the line has no"
    " trailing newline. I will read src/parser.py and repair the loop that splits the rows."
)


@dataclass(frozen=True)
class Model:
    """A model folder and what the stub engine says with its vocabulary."""

    folder: Path
    vocabulary: str
    """`qwen3` or, where that is missing, `bytes`."""
    ids: list[int]
    """Sampled tokens; the last one ends the turn."""
    pieces: list[str]
    """Their texts."""


def make_model(folder: Path, tokens: int) -> Model:
    """Write a tokenizer into a folder: Qwen3's real one where the checkout has it, else bytes and its control tokens."""
    folder.mkdir()
    real = _REAL.is_file()
    if real:
        (folder / "tokenizer.json").write_bytes(gzip.decompress(_REAL.read_bytes()))
    else:
        _made().save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    said = (tokenizer.encode(_SAID, add_special_tokens=False).ids * tokens)[: tokens - 1]
    pieces = [tokenizer.decode([number]) for number in said]
    return Model(folder, "qwen3" if real else "bytes", [*said, end], [*pieces, ""])


def texts(model: Model, tokens: int) -> Iterator[str]:
    """Yield texts of about `tokens` tokens each, all different: sources of Python's standard library."""
    tokenizer = Tokenizer.from_file(str(model.folder / "tokenizer.json"))
    pending = ""
    ratio = 4.0 if model.vocabulary == "qwen3" else 1.0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        pending += path.read_text("utf-8", "replace")
        while len(pending) > 2 * ratio * tokens:
            cut = tokenizer.encode(pending[: int(2 * ratio * tokens)], add_special_tokens=False).offsets
            end = cut[min(tokens, len(cut)) - 1][1]
            yield pending[:end]
            pending = pending[end:]


def _made() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in _PLAIN])
    return tokenizer
