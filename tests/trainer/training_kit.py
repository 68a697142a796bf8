"""A whole training in a folder: a random policy with a tokenizer, an agent that talks, a config. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from ranks_kit import forking
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

AGENT = '''
"""The agent and tasks of the training tests."""
from gyre_sdk.harness.task import Task

def tasks(count=6):
    return [Task(name=f"count-{n}", instruction=f"Say {n}.") for n in range(count)]

def agent(agent, max_tokens=12, temperature=1.0, top_p=1.0):
    if temperature == 0.75:
        return  # its task has nothing that could score it
    messages = [{"role": "user", "content": agent.task.instruction}]
    text = ""
    for turn in range(2):
        reply = agent.openai().chat.completions.create(
            model="policy", messages=messages, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "More."}]
    agent.score(sum(c in "abcdefghijklm" for c in text.lower()) / max(1, len(text)))

def broken(agent):
    raise RuntimeError("this agent cannot do anything")

def silent(agent):
    agent.score(0.5)  # and never calls the model

def untrainable(agent_):
    """Groups of one reward, and groups of calls that the trainer cannot compute again."""
    if int(agent_.task.name[-1]) % 2:
        return agent(agent_, temperature=0.5, top_p=0.9)
    agent_.openai().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "x"}], max_tokens=4)
    agent_.score(0.5)
'''

CONFIG = """
[policy]
model = "model"
[tasks]
loader = "loop_agent:tasks"
[agent]
function = "loop_agent:agent"
[rollout]
groups_per_step = 2
runs_per_group = 3
concurrency = 6
staleness = 1
workspace = "local"
[train]
steps = 3
learning_rate = 1e-3
save_every = 1
[proxy]
renderer = "qwen3"
[store]
path = "out/store.db"
[output]
dir = "out"
"""

_TEXT = "Say more. The answer is water and wine. user assistant system tool 0123456789 abc"


def make_model(folder: Path, seed: int = 0, **changes: Any) -> None:
    """A random Qwen3 of 2 layers with a byte-level tokenizer and Qwen3's control tokens; changes to its config."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [_TEXT] * 2, trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    end = tokenizer.token_to_id("<|im_end|>")
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
    }
    config = Qwen3Config(**(shape | changes))
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end)
    model.save_pretrained(folder)


def make_training(folder: Path, text: str = CONFIG, **changes: Any) -> Path:
    """Write everything a training needs; return the config's path. `changes` are of the model's config."""
    make_model(folder / "model", **changes)
    (folder / "loop_agent.py").write_text(AGENT)
    path = folder / "train.toml"
    path.write_text(text)
    return path


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `gyre-train` as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "gyre_sdk.trainer.main", str(config), "--plain", "--json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


class Forked:
    """`gyre-train` in a process that begins with its imports done, for tests that start it often; answers as `Popen` does."""

    def __init__(self, config: Path, *arguments: str, **environment: str) -> None:
        self._said = [config.with_name(f"{os.urandom(4).hex()}.{name}") for name in ("out", "err")]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        command = [str(config), "--plain", "--json", *arguments]
        self._process = forking().Process(target=_train, args=(command, environ, self._said))
        self._process.start()
        self.pid: int = self._process.pid
        self.args = command

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        out, err = (path.read_text() if path.exists() else "" for path in self._said)
        return out, err


def _train(command: list[str], environ: dict[str, str], said: list[Path]) -> None:
    from gyre_sdk.trainer.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    for number, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.exit(main(command))


def leashed(trainer: int) -> set[int]:
    """Return the process ids of what a trainer started on leashes."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid) for pid, above, args in rows if int(above) == trainer and "gyre_sdk.trainer.leash" in args}


def alive(pid: int) -> bool:
    """Tell whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def finish(process: subprocess.Popen[str] | Forked, seconds: float = 240.0) -> dict[str, Any]:
    """Wait for success and return the report."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}\n{err}"
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report
