"""The training loop around a step: what an empty step changes (nothing), resuming, schedules, adapters."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_policy import random_row, tiny_model, unit_of

from gyre_sdk.errors import PublishError, SettingsError, TrainerError
from gyre_sdk.trainer.checkpoints import folder_digest
from gyre_sdk.trainer.config import LoraConfig, PolicyConfig, TrainConfig
from gyre_sdk.trainer.policy import load_policy
from gyre_sdk.trainer.trainer import StepReport, TreeGRPOConfig, make_trainer
from gyre_sdk.trainer.units import Unit
from gyre_sdk.trainer.weights import WeightFolder, full_weights


def batch(step: int, model: Any = None) -> list[Unit]:
    rng = np.random.default_rng(step)
    return [
        unit_of(
            [
                random_row(rng, f"r{step}-{n}", prompt=5, sampled=8, advantage=1.0 - 2 * (n % 2), noise=0.1)
                for n in range(3)
            ]
        )
        for _ in range(2)
    ]


def run(
    config: TrainConfig, model: Any, folder: Path, empty: frozenset[int] = frozenset(), resume: str | None = None
) -> tuple[Any, list[StepReport], list[tuple[int, Path]]]:
    reports: list[StepReport] = []
    saved: list[tuple[int, Path]] = []
    trainer = make_trainer(
        config,
        model,
        folder,
        lambda step: [] if step in empty else batch(step),
        on_step=reports.append,
        on_saved=lambda step, path: saved.append((step, path)),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, reports, saved


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


CONFIG = TrainConfig(steps=4, learning_rate=1e-2, weight_decay=0.1, save_every=1, keep_checkpoints=10)


def test_steps_are_reported_and_saved_in_order(tmp_path: Path) -> None:
    model = tiny_model()
    before = weights(model).clone()
    _, reports, saved = run(CONFIG, model, tmp_path)
    assert [report.step for report in reports] == [1, 2, 3, 4]
    assert [step for step, _ in saved] == [1, 2, 3, 4]
    assert all((path / "model.safetensors").is_file() for _, path in saved)
    assert not torch.equal(weights(model), before)
    assert reports[0].totals.runs == 6 and len(reports[0].units) == 2
    for key in ("loss", "ratio", "clip_ratio/region_mean", "approx_kl", "entropy", "grad_norm", "learning_rate"):
        assert np.isfinite(reports[0].metrics[key])
    assert [report.metrics["learning_rate"] for report in reports] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_an_empty_step_changes_no_weight_and_no_optimizer_state(tmp_path: Path) -> None:
    """Not even by weight decay or momentum."""
    seen: dict[int, tuple[torch.Tensor, Any]] = {}
    model = tiny_model()

    def on_step(report: StepReport) -> None:
        state = copy.deepcopy(trainer.optimizer.state_dict()["state"])
        seen[report.step] = (weights(model).clone(), state)

    trainer = make_trainer(CONFIG, model, tmp_path, lambda step: [] if step in (2, 3) else batch(step), on_step=on_step)
    trainer.train()
    assert torch.equal(seen[1][0], seen[2][0]) and torch.equal(seen[1][0], seen[3][0])
    assert not torch.equal(seen[3][0], seen[4][0])
    for key, kept in seen[1][1].items():
        for name, value in kept.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(seen[3][1][key][name]))


def test_empty_steps_are_reported_as_skipped(tmp_path: Path) -> None:
    _, reports, _ = run(CONFIG, tiny_model(), tmp_path, empty=frozenset({1, 3}))
    assert [report.skipped for report in reports] == [True, False, True, False]
    assert reports[0].metrics == {} and reports[0].units == []


def test_resuming_from_a_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    whole = tiny_model()
    _, _, saved = run(CONFIG, whole, tmp_path / "a")
    again = load_policy(PolicyConfig(model=saved[1][1]))
    _, reports, _ = run(CONFIG, again, tmp_path / "b", resume=str(saved[1][1]))
    assert [report.step for report in reports] == [3, 4]
    assert torch.equal(weights(again), weights(whole))


def test_a_resumed_training_can_be_made_longer(tmp_path: Path) -> None:
    _, _, saved = run(CONFIG, tiny_model(), tmp_path / "a")
    longer = TrainConfig(steps=6, learning_rate=1e-2, save_every=1)
    _, reports, _ = run(longer, load_policy(PolicyConfig(model=saved[3][1])), tmp_path / "b", resume=str(saved[3][1]))
    assert [report.step for report in reports] == [5, 6]


def test_the_last_step_is_always_saved(tmp_path: Path) -> None:
    config = TrainConfig(steps=3, learning_rate=1e-3, save_every=2)
    _, _, saved = run(config, tiny_model(), tmp_path)
    assert [step for step, _ in saved] == [2, 3]


@pytest.mark.parametrize(
    ("schedule", "final", "last"),
    [("linear", 0.1, 0.1), ("linear", 0.0, 0.0), ("cosine", 0.2, 0.2), ("constant", 0.0, 1.0)],
)
def test_schedules_end_where_they_should(tmp_path: Path, schedule: Any, final: float, last: float) -> None:
    config = TrainConfig(steps=3, learning_rate=1e-3, schedule=schedule, final_learning_rate=final, save_every=9)
    trainer, _, _ = run(config, tiny_model(), tmp_path)
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(1e-3 * last, abs=1e-9)


def test_gradients_are_clipped_after_the_division(tmp_path: Path) -> None:
    model = tiny_model()
    norms: list[float] = []
    config = TrainConfig(steps=1, learning_rate=1e-3, max_grad_norm=1e-3)
    trainer = make_trainer(config, model, tmp_path, batch, on_step=lambda report: None)
    trainer.create_optimizer()
    inner = trainer.optimizer.step

    def spy(*args: Any, **kwargs: Any) -> Any:
        norms.append(float(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm()))
        return inner(*args, **kwargs)

    trainer.optimizer.step = spy
    trainer.train()
    assert norms and norms[0] == pytest.approx(1e-3, rel=1e-3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_model().save_pretrained(folder)
    return folder


def lora_policy(base: Path, checkpoint: Path | None = None) -> Any:
    return load_policy(PolicyConfig(model=base, lora=LoraConfig(r=4, alpha=8)), checkpoint)


def test_adapters_are_trained_alone_and_published_merged(base: Path, tmp_path: Path) -> None:
    model = lora_policy(base)
    start = {name: tensor.clone() for name, tensor in tiny_model().state_dict().items()}
    _, reports, saved = run(CONFIG, model, tmp_path / "out")
    assert not any(report.skipped for report in reports)
    merged = full_weights(model)
    assert set(merged) == {name for name in start if name != "lm_head.weight"}
    changed = {name for name in merged if not torch.equal(merged[name], start[name])}
    assert changed and all("proj" in name for name in changed)
    ids = torch.arange(3, 20)[None]
    plain = tiny_model()
    plain.load_state_dict(merged, strict=False)
    model.eval()
    torch.testing.assert_close(plain(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    again = lora_policy(base, saved[-1][1])
    for name, tensor in full_weights(again).items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=0)
    assert any(parameter.requires_grad for parameter in again.parameters())


def test_adapters_go_on_with_the_rank_that_they_have(base: Path, tmp_path: Path) -> None:
    _, _, saved = run(replace(CONFIG, steps=1), lora_policy(base), tmp_path / "out")
    for lora, said in (
        (LoraConfig(r=8, alpha=8), "r = 8, .* have 4;"),
        (LoraConfig(r=4, alpha=16), "alpha = 16, .* 8;"),
    ):
        with pytest.raises(SettingsError, match=rf"policy\.lora\.{said} set it to that"):
            load_policy(PolicyConfig(model=base, lora=lora), saved[-1][1])


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size, as a disk would that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("share", "kind"), [(0.5, "SafetensorError"), (1.5, "RuntimeError")])
def test_a_checkpoint_that_the_disk_does_not_take_is_gone_and_the_one_before_counts(
    tmp_path: Path, share: float, kind: str
) -> None:
    """Its weights, or the optimizer's state that is twice as large."""
    first = replace(CONFIG, steps=1)
    run(first, tiny_model(), tmp_path)
    whole = folder_digest(tmp_path / "checkpoint-1")
    size = (tmp_path / "checkpoint-1" / "model.safetensors").stat().st_size
    with (
        pytest.raises(TrainerError, match=rf"checkpoint-2 cannot be written \({kind}: .*\); \d+ MiB are free there"),
        largest_file(int(size * share)),
    ):
        run(CONFIG, tiny_model(), tmp_path, resume=str(tmp_path / "checkpoint-1"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert folder_digest(tmp_path / "checkpoint-1") == whole


def test_weights_that_do_not_fit_name_their_folder(base: Path, tmp_path: Path) -> None:
    folder = WeightFolder(base, tmp_path, 1)
    with (
        pytest.raises(
            PublishError, match=r"weights cannot be written to .*v1\.partial \(.*MiB are free there: make room"
        ),
        largest_file(1000),
    ):
        folder.write(1, full_weights(tiny_model()))
    folder.remove()


def test_full_weights_leave_the_model_alone_and_tied_tensors_out() -> None:
    model = tiny_model()
    before = weights(model).clone()
    found = full_weights(model)
    assert "lm_head.weight" not in found and "model.embed_tokens.weight" in found
    assert torch.equal(weights(model), before)


def test_units_are_taken_one_at_a_time(tmp_path: Path) -> None:
    """Training starts on the first closed group: a unit is asked for only when the one before is done."""
    log: list[str] = []
    model = tiny_model()

    def batches(step: int) -> Iterator[Unit]:
        for number, unit in enumerate(batch(step)):
            log.append(f"seal {number}")
            yield unit

    trainer = make_trainer(TrainConfig(steps=1), model, tmp_path, batches)
    inner = trainer._accumulate
    trainer._accumulate = lambda *args: (log.append("train"), inner(*args))[1]  # type: ignore[method-assign, func-returns-value]
    trainer.train()
    assert log == ["seal 0", "train", "seal 1", "train"]


def test_a_gradient_that_is_not_finite_ends_training_before_it_changes_a_weight(tmp_path: Path) -> None:
    model, saved = tiny_model(), list[int]()

    def batches(step: int) -> list[Unit]:
        units = batch(step)
        if step == 3:
            seen.append(weights(model).clone())
            units[0].rows[0].weights[0] = np.inf
        return units

    seen: list[torch.Tensor] = []
    trainer = make_trainer(CONFIG, model, tmp_path, batches, on_saved=lambda step, path: saved.append(step))
    with pytest.raises(TrainerError, match=r"gradient of step 3 is not finite .*resumes at the last checkpoint"):
        trainer.train()
    assert saved == [1, 2] and torch.equal(weights(model), seen[0])


@pytest.mark.parametrize(
    ("decay", "holds"), [(1e10, r"values up to \d\.\d*e\+\d+"), (1e42, "values that are not finite")]
)
def test_weights_that_a_step_has_spoilt_are_neither_saved_nor_reported(
    tmp_path: Path, decay: float, holds: str
) -> None:
    done: list[Any] = []
    config = TrainConfig(steps=2, learning_rate=1e-2, weight_decay=decay, save_every=1)
    trainer = make_trainer(
        config, tiny_model(), tmp_path, batch, on_step=done.append, on_saved=lambda step, path: done.append(path)
    )
    with pytest.raises(TrainerError, match=rf"step 1 has spoilt the policy: \S+weight holds {holds}.*resumes"):
        trainer.train()
    assert done == []


def test_options_that_would_break_the_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one streamed batch"):
        TreeGRPOConfig(output_dir=str(tmp_path), max_steps=1, gradient_accumulation_steps=2, use_cpu=True)
    with pytest.raises(ValueError, match="max_steps is -1"):
        TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True)


def test_nothing_is_sent_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr("trl.trainer.base_trainer.send_telemetry", lambda **what: sent.append(what))
    monkeypatch.delenv("CI", raising=False)
    make_trainer(TrainConfig(steps=1), tiny_model(), tmp_path, batch)
    assert sent == []
