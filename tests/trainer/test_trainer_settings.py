"""What the trainer does under its settings: reference policies, precision, checkpointing, trackers, refusals."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tensorboardX.proto.event_pb2 import Event
from tiny_policy import VOCAB, gradient, logprobs_of, pure64, random_row, relative, tiny_model, unit_of

from gyre_sdk.errors import MismatchError, SettingsError, TrainerError
from gyre_sdk.trainer.config import LoraConfig, PolicyConfig, TrainConfig
from gyre_sdk.trainer.offline import table_batches
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig, TreeGRPOTrainer, make_trainer
from gyre_sdk.trainer.units import Row, Unit, digest


def some_units(step: int = 1, model: Any = None) -> list[Unit]:
    rng = np.random.default_rng(step)
    rows = [
        random_row(rng, f"r{step}-{n}", prompt=5, sampled=8, advantage=1.0 - 2 * (n % 2), noise=0.1, model=model)
        for n in range(4)
    ]
    return [unit_of(rows[:2]), unit_of(rows[2:])]


def trained(
    config: TrainConfig, model: Any, folder: Path, *, resume: Path | None = None, **more: Any
) -> tuple[TreeGRPOTrainer, list[StepReport]]:
    reports: list[StepReport] = []
    trainer = make_trainer(config, model, folder, some_units, on_step=reports.append, **more)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, reports


def step_gradient(model: Any, folder: Path, **options: Any) -> torch.Tensor:
    """The gradient that one step leaves, before clipping."""
    reference = options.pop("reference_model", None)
    args = TreeGRPOConfig(output_dir=str(folder), max_steps=1, use_cpu=True, report_to=[], **options)
    trainer = TreeGRPOTrainer(model, args, some_units, reference_model=reference)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable()
    trainer.training_step(trainer.model, {"step": 0})
    found = gradient(trainer.model)
    trainer.model.zero_grad()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


def lora_policy(base: Path, checkpoint: Path | None = None) -> Any:
    torch.manual_seed(1)
    return load_policy(PolicyConfig(model=base, lora=LoraConfig(r=4, alpha=8)), checkpoint)


def test_the_kl_to_a_reference_is_that_of_a_model_by_itself(tmp_path: Path) -> None:
    """By hand: dL/dtheta of beta * k3 * ratio, over the tokens of each run, then over runs."""
    beta = 0.3
    with pure64():
        model, other = tiny_model(dtype=torch.float64), tiny_model(seed=5, dtype=torch.float64)
        without = step_gradient(model, tmp_path)
        found = step_gradient(model, tmp_path, beta=beta, reference_model=other) - without
        total = torch.zeros((), dtype=torch.float64)
        rows = [row for unit in some_units() for row in unit.rows]
        for row in rows:
            ids = torch.from_numpy(row.ids.astype(np.int64))[None]
            label = ids[0, row.targets]
            logp, reference = (
                m(input_ids=ids).logits[0].log_softmax(-1)[row.targets - 1].gather(-1, label[:, None]).squeeze(-1)
                for m in (model, other)
            )
            gap = reference.detach() - logp
            ratio = (logp - torch.from_numpy(row.logprobs)).exp()
            total = total + ((gap.exp() - gap - 1) * ratio).mean()
        (beta * total / len(rows)).backward()
    assert relative(found, gradient(model)) < 1e-9


def test_without_a_reference_model_it_is_the_policy_at_the_start(tmp_path: Path, base: Path) -> None:
    """A copy for full weights, the adapters off with LoRA: the same gradients and the same KL, which starts at 0."""
    config = TrainConfig(steps=2, learning_rate=1e-2, beta=0.1)
    _, reports = trained(config, tiny_model(), tmp_path / "full")
    assert reports[0].metrics["kl"] == pytest.approx(0.0, abs=1e-6) and reports[1].metrics["kl"] > 1e-5
    _, reports = trained(config, lora_policy(base), tmp_path / "lora")
    assert reports[0].metrics["kl"] == pytest.approx(0.0, abs=1e-6) and reports[1].metrics["kl"] > 1e-7


def test_a_reference_that_follows_is_resumed_with_the_training(tmp_path: Path, base: Path) -> None:
    config = TrainConfig(
        steps=4, learning_rate=1e-2, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5
    )
    _, whole = trained(config, load_policy(PolicyConfig(model=base)), tmp_path / "a")
    fixed = TrainConfig(steps=4, learning_rate=1e-2, beta=0.1)
    _, still = trained(fixed, load_policy(PolicyConfig(model=base)), tmp_path / "b")
    assert whole[-1].metrics["kl"] < still[-1].metrics["kl"] / 2
    checkpoint = tmp_path / "a" / "checkpoint-3"
    _, again = trained(
        config,
        load_policy(PolicyConfig(model=base), checkpoint),
        tmp_path / "c",
        resume=checkpoint,
        reference_model=load_policy(PolicyConfig(model=base)),
    )
    assert again[0].metrics == whole[-1].metrics


def test_a_resumed_training_has_the_same_losses_bit_by_bit(tmp_path: Path, base: Path) -> None:
    """With settings of the optimizer that were changed meanwhile, those count."""
    config = TrainConfig(
        steps=4, learning_rate=1e-2, schedule="cosine", weight_decay=0.1, loss_type="gspo", keep_checkpoints=9
    )
    _, whole = trained(config, lora_policy(base), tmp_path / "a")
    checkpoint = tmp_path / "a" / "checkpoint-2"
    _, again = trained(config, lora_policy(base, checkpoint), tmp_path / "b", resume=checkpoint)
    assert [report.metrics for report in again] == [report.metrics for report in whole[2:]]
    changed = structs.replace(config, learning_rate=1e-4, weight_decay=0.3, betas=(0.5, 0.9))
    trainer, slower = trained(changed, lora_policy(base, checkpoint), tmp_path / "c", resume=checkpoint)
    rates = [report.metrics["learning_rate"] for report in slower]
    assert rates == pytest.approx([report.metrics["learning_rate"] / 100 for report in again]) and rates[0] > 1e-5
    assert {(group["weight_decay"], group["betas"]) for group in trainer.optimizer.param_groups} <= {
        (0.3, (0.5, 0.9)),
        (0.0, (0.5, 0.9)),
    }


@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_activations_change_no_gradient(tmp_path: Path, base: Path, lora: bool) -> None:
    def model() -> Any:
        return lora_policy(base) if lora else tiny_model()

    wanted = step_gradient(model(), tmp_path)
    assert relative(step_gradient(model(), tmp_path, activation_checkpointing=True), wanted) < 1e-5


def test_mixed_precision_is_close_and_keeps_weights_in_float32(tmp_path: Path) -> None:
    model = tiny_model()
    wanted = step_gradient(model, tmp_path)
    found = step_gradient(model, tmp_path, bf16=True)
    assert 1e-5 < relative(found, wanted) < 0.05
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_training_stops_when_the_engine_says_something_else(tmp_path: Path) -> None:
    model = tiny_model()
    trainer = make_trainer(
        TrainConfig(steps=1, mismatch_threshold=0.02), model, tmp_path, lambda step: some_units(step, model)
    )
    before = gradient_free(model)
    with pytest.raises(MismatchError, match=r"the threshold is 0\.02"):
        trainer.train()
    assert torch.equal(gradient_free(model), before)
    _, reports = trained(TrainConfig(steps=1, mismatch_threshold=50.0), model, tmp_path / "b")
    assert reports[0].metrics["sampling/sampling_logp_difference/mean"] > 0.02


def gradient_free(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def test_a_tracker_gets_the_metrics_of_every_step(tmp_path: Path) -> None:
    config = TrainConfig(steps=3, learning_rate=1e-2, report_to=["tensorboard"])

    def on_step(report: StepReport) -> None:
        report.metrics["reward"] = 0.25 * report.step

    make_trainer(config, tiny_model(), tmp_path, some_units, on_step=on_step).train()
    logged: dict[str, dict[int, float]] = {}
    for path in tmp_path.rglob("events.out.tfevents.*"):
        for event in events_of(path):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    logged.setdefault(value.tag, {})[event.step] = value.simple_value
    assert logged["train/reward"] == {1: 0.25, 2: 0.5, 3: 0.75}
    for name in ("train/loss", "train/approx_kl", "train/entropy", "train/grad_norm", "train/learning_rate"):
        assert set(logged[name]) == {1, 2, 3}, name
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert len(state["log_history"]) == 1  # it would grow with every step, and be written with every checkpoint


def events_of(path: Path) -> list[Event]:
    """Read TFRecords: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        found.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report_to": ["wandb"]}, "the package of 'wandb' is not installed"),
        ({"report_to": ["paper"]}, "there is no 'paper'; known: "),
        ({"fsdp": True}, "needs several processes"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_trainer(TrainConfig(steps=1, **options), tiny_model(), tmp_path, some_units)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.7}, "temperature = 0.7 has no effect .* use the temperature recorded with each call"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "use importance_sampling"),
        ({"use_vllm": True}, "use_vllm = True has no effect on units"),
        ({"mask_truncated_completions": True}, r"use Sealer\(mask_truncated"),
        ({"num_iterations": 2}, "num_iterations = 2 has no effect"),
        ({"max_steps": -1}, "max_steps is -1"),
    ],
)
def test_what_would_do_nothing_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeGRPOConfig(**{"output_dir": str(tmp_path), "max_steps": 1, "use_cpu": True, "report_to": [], **options})


def test_the_configuration_is_trls(tmp_path: Path) -> None:
    from trl import GRPOConfig

    args = TreeGRPOConfig(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to=[], num_generations=8, beta=0.1
    )
    assert isinstance(args, GRPOConfig)
    assert (args.loss_type, args.epsilon, args.beta, args.sapo_temperature_neg) == ("run", 0.2, 0.1, 1.05)


def test_adapters_have_no_copy_that_could_follow(tmp_path: Path, base: Path) -> None:
    config = TrainConfig(steps=1, beta=0.1, sync_ref_model=True)
    with pytest.raises(SettingsError, match="train full weights"):
        make_trainer(config, lora_policy(base), tmp_path, some_units)


def test_adapters_of_modules_that_are_not_there(base: Path) -> None:
    with pytest.raises(SettingsError, match=r"target_modules = \['w_nowhere'\] does not fit: .*not found"):
        load_policy(PolicyConfig(model=base, lora=LoraConfig(target_modules=["w_nowhere"])))


def test_four_bits_need_their_package(base: Path) -> None:
    with pytest.raises(SettingsError, match="bitsandbytes"):
        load_policy(PolicyConfig(model=base, lora=LoraConfig(load_in_4bit=True)))


def test_behaviour_of_the_rows_is_the_models(tmp_path: Path) -> None:
    """What the mismatch report calls no difference is none."""
    model = tiny_model()
    rng = np.random.default_rng(0)
    row = random_row(rng, "r", prompt=4, sampled=9, advantage=1.0, model=model, noise=0.0)
    assert row.ids.max() < VOCAB and np.allclose(row.logprobs, logprobs_of(model, row.ids, row.targets))
    reports: list[StepReport] = []
    make_trainer(TrainConfig(steps=1), model, tmp_path, lambda step: [unit_of([row])], on_step=reports.append).train()
    assert reports[0].metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_table_of_trajectories_trains_like_the_rows_it_was_made_of(tmp_path: Path) -> None:
    units = [
        replace(unit, rows=rows, group=f"g{n}", id=digest(rows))
        for n, unit in enumerate(some_units())
        # a table keeps log-probs in float32
        for rows in [tuple(replace(r, logprobs=r.logprobs.astype(np.float32).astype(float)) for r in unit.rows)]
    ]
    names = [field.name for field in fields(Row)]
    table = [{**{name: getattr(row, name) for name in names}, "group": u.group} for u in units for row in u.rows]
    batches = table_batches([*table, {**table[0], "advantage": None}], groups_per_step=1)
    assert [list(batches(step)) for step in (1, 2, 3)] == [[same(units[0])], [same(units[1])], [same(units[0])]]
    with pytest.raises(TrainerError, match="no row of the table has an advantage"):
        table_batches([], groups_per_step=1)


class same:  # noqa: N801
    """Equal to units with the same id, which is a hash of everything in them."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Unit)
        return (other.id, other.group, other.runs, other.tokens) == (
            self.unit.id,
            self.unit.group,
            self.unit.runs,
            self.unit.tokens,
        )
