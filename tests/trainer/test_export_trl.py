"""What `gyre export` writes loads with `datasets`, and TRL's own trainers take a step on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_kit import make_store
from training_kit import make_model

from gyre_sdk.credit import Baseline
from gyre_sdk.export import export, materialise, writing
from gyre_sdk.export.columns import TABLES
from gyre_sdk.export.tables import Wanted
from gyre_sdk.journal import Journal
from gyre_sdk.trainer.units import Sealer

SEALER = Sealer(baseline=Baseline.MEAN, rule="longest", seed=3)
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name + call.function.arguments + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("export") / "gyre.db")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_model(folder)
    return folder


def loaded(store: Path, folder: Path, form: str, suffix: str, **wanted: Any) -> Any:
    from datasets import load_dataset

    out = folder / f"{form}.{suffix}"
    with Journal(store, "r") as journal:
        export(journal, SEALER, form, out, Wanted(**wanted))
    kind = {"parquet": "parquet", "jsonl": "json"}[suffix]
    return load_dataset(kind, data_files=str(out), cache_dir=str(folder / "cache"), split="train")


def parts(policy: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "<|endoftext|>"
    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), tokenizer


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "bf16": False,
        "disable_tqdm": True,
        **more,
    }


def steps(trainer: Any) -> float:
    """Take a step; return its loss, having seen that a weight moved."""
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    loss = trainer.train().training_loss
    assert np.isfinite(loss)
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    return float(loss)


def test_the_parquet_table_loads_with_its_schema(store: Path, tmp_path: Path) -> None:
    import pyarrow.parquet

    table = loaded(store, tmp_path, "parquet", "parquet")
    assert table.column_names == [column.name for column in TABLES["parquet"]]
    with Journal(store, "r") as journal:
        rows = [row for group in materialise(journal, SEALER) for row in group.trained]
    assert [line["leaf"] for line in table] == [row.leaf for row in rows]
    for line, row in zip(table.with_format("numpy"), rows, strict=True):
        for name in ("ids", "targets", "weights", "logprobs", "versions", "advantages", "temperatures", "calls"):
            assert np.array_equal(line[name], getattr(row, name)), name
    metadata = pyarrow.parquet.read_schema(tmp_path / "parquet.parquet").metadata[b"gyre"]
    assert json.loads(metadata)["rule"] == "longest" and json.loads(metadata)["seed"] == 3
    assert loaded(store, tmp_path, "parquet", "jsonl").to_list()[0]["ids"] == rows[0].ids.tolist()


@pytest.mark.parametrize("limit", ["_BATCH_LINES", "_BATCH_NUMBERS"])
def test_large_tables_are_written_in_parts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    import pyarrow.parquet

    monkeypatch.setattr(writing, limit, 2)
    with Journal(store, "r") as journal:
        report = export(journal, SEALER, "parquet", tmp_path / "out.parquet", Wanted(untrained=True))
    file = pyarrow.parquet.ParquetFile(tmp_path / "out.parquet")
    assert file.metadata.num_row_groups == (3 if limit == "_BATCH_LINES" else 6)
    assert file.read(["run"])["run"].to_pylist() == ["a", "b", "c", "u", "f0", "f1"] and report.lines == 6


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_sft_trainer_takes_the_tokens(store: Path, policy: Path, tmp_path: Path, suffix: str) -> None:
    """Its loss is the mean over the very tokens that gyre trains."""
    from trl import SFTConfig, SFTTrainer

    data = loaded(store, tmp_path, "trl", suffix)
    model, tokenizer = parts(policy)
    expected, count = 0.0, 0
    with torch.no_grad():
        for line in data:
            ids, mask = torch.tensor([line["input_ids"]]), torch.tensor(line["completion_mask"][1:]) == 1
            logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            expected -= float(logps[torch.arange(ids.shape[1] - 1), ids[0, 1:]][mask].sum())
            count += int(mask.sum())
    config = SFTConfig(**options(tmp_path, per_device_train_batch_size=3))
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    assert steps(trainer) == pytest.approx(expected / count, rel=1e-4)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_sft_trainer_takes_the_conversations(store: Path, policy: Path, tmp_path: Path, suffix: str) -> None:
    from trl import SFTConfig, SFTTrainer

    data = loaded(store, tmp_path, "sft", suffix, min_reward=0.5)
    assert len(data) == 5
    model, tokenizer = parts(policy)
    config = SFTConfig(**options(tmp_path, assistant_only_loss=True))
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    first = trainer.train_dataset[0]
    learnt = tokenizer.decode([token for token in first["labels"] if token != -100])
    assert (
        learnt.startswith('<think>I look.</think><tool_call>bash{"command": "env"}</tool_call>') and "Water." in learnt
    )
    assert "API=" not in learnt and "bash" in tokenizer.decode(first["input_ids"])[:200], (
        "tools are shown, results not learnt"
    )
    steps(trainer)


@pytest.mark.parametrize("whole", [False, True])
def test_dpo_trainer_takes_the_pairs(store: Path, policy: Path, tmp_path: Path, whole: bool) -> None:
    from trl import DPOConfig, DPOTrainer

    data = loaded(store, tmp_path, "dpo", "parquet", whole=whole)
    model, tokenizer = parts(policy)
    trainer = DPOTrainer(
        model=model, args=DPOConfig(**options(tmp_path)), train_dataset=data, processing_class=tokenizer
    )
    (pair,) = trainer.train_dataset
    chosen, rejected = (tokenizer.decode(pair[name]) for name in ("chosen_ids", "rejected_ids"))
    assert "env" in chosen and ("Water." in chosen) is whole and rejected.startswith("Wine.")
    assert steps(trainer) == pytest.approx(np.log(2), rel=1e-3), "policy and reference are the same at the first step"


def test_the_async_trainer_packs_the_rows(store: Path, tmp_path: Path) -> None:
    """Lines are `RolloutSample`s: TRL's packing shares their prefixes and has a loss term for every target."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
    from trl.experimental.async_grpo.packing import TreeRow

    data = loaded(store, tmp_path, "trl", "parquet").with_format("numpy")
    names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "model_version", "group_id")
    samples = [
        RolloutSample(prompt=[], completion=[], metrics={}, **{name: line[name] for name in names}) for line in data
    ]
    row = TreeRow()
    for sample in samples:
        row.add({**{name: getattr(sample, name) for name in names}, "prompt": [], "completion": []})
    assert row.trained == sum(int(sample.completion_mask.sum()) for sample in samples)
    assert len(row.tokens) < sum(len(sample.input_ids) for sample in samples)
