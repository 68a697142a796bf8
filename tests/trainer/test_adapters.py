"""What TRL's trainers are handed: rows and samples of sealed groups, and an attention for machines without its kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, logprobs_of, random_row, tiny_model, unit_of
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.experimental.async_grpo.packing import TREE_ATTENTION, TreeRow, register_tree_attention

from gyre_sdk.credit import group_credit
from gyre_sdk.errors import TrainerError
from gyre_sdk.harness.task import Task
from gyre_sdk.records import RunId, RunRecord, RunStatus
from gyre_sdk.trainer.adapters import without_gpu
from gyre_sdk.trainer.adapters.groups import ClosedGroup
from gyre_sdk.trainer.adapters.grpo import as_trl
from gyre_sdk.trainer.adapters.samples import Weighing, samples_of
from gyre_sdk.trainer.units import Row, SealedGroup

TASK = Task(name="t", instruction="do it")


def closed(rows: list[Row], rewards: dict[str, float | None]) -> ClosedGroup:
    runs = [
        RunRecord(RunId(run), "t", 0.0, member=n, status=RunStatus.COMPLETED, reward=reward)
        for n, (run, reward) in enumerate(rewards.items())
    ]
    sealed = SealedGroup("g", (unit_of(rows),), group_credit(runs))
    return ClosedGroup(TASK, runs, sealed, sampled=100)


def samples(group: ClosedGroup, **more: Any) -> Any:
    given = {"weighing": Weighing.RUN, "temperature": 1.0, "version": lambda version: version, **more}
    return samples_of(group, 7, **given)


def branching(rng: np.random.Generator, model: Any = None) -> list[Row]:
    """Runs a (two trajectories with a shared prefix) and b (one, longer); the weights of each run sum to 1."""
    first = random_row(rng, "a", prompt=9, sampled=6, advantage=1.0)
    second = random_row(rng, "a", prompt=9, sampled=3, advantage=1.0)
    second = replace(second, leaf="a-other", ids=np.concatenate([first.ids[:11], second.ids[11:]]))
    other = random_row(rng, "b", prompt=5, sampled=14, advantage=-1.0)
    rows = [first, second, other]
    sizes = {"a": len(first.targets) + len(second.targets), "b": len(other.targets)}
    rows = [replace(row, weights=np.full(len(row.targets), 1 / sizes[row.run])) for row in rows]
    return rows if model is None else [replace(row, logprobs=logprobs_of(model, row.ids, row.targets)) for row in rows]


# -- samples -----------------------------------------------------------------------------------------------------------


def test_every_target_is_in_one_sample_and_runs_weigh_the_same() -> None:
    rows = branching(np.random.default_rng(0))
    found, dropped = samples(closed(rows, {"a": 1.0, "b": 0.0}))
    assert not dropped and len(found) == 3
    trained = sum(int(sample.completion_mask.sum()) for sample in found)
    assert trained == sum(len(row.targets) for row in rows)
    pull = {"a": 0.0, "b": 0.0}
    for sample, row in zip(found, rows, strict=True):
        last = row.targets[-1] + 1
        assert sample.input_ids.tolist() == row.ids[:last].tolist()
        assert np.flatnonzero(sample.completion_mask).tolist() == row.targets.tolist()
        assert sample.old_log_probs[row.targets] == pytest.approx(row.logprobs, rel=1e-6)
        assert not sample.old_log_probs[sample.completion_mask == 0].any()
        assert sample.group_id == 7 and sample.model_version == 0
        pull[row.run] += sample.advantage * sample.completion_mask.sum()
    assert pull["a"] == pytest.approx(-pull["b"]) and pull["a"] == pytest.approx(trained / 2)
    assert {sample.metrics["reward"] for sample in found} == {0.0, 1.0}
    plain, _ = samples(closed(rows, {"a": 1.0, "b": 0.0}), weighing=Weighing.TOKEN)
    assert [sample.advantage for sample in plain] == [1.0, 1.0, -1.0]


def test_a_row_with_several_coefficients_is_several_samples_on_the_same_tokens() -> None:
    row = random_row(np.random.default_rng(1), "a", prompt=4, sampled=8, advantage=1.0)
    advantages = np.array([1.0, 1.0, 0.0, 2.0, 2.0, 2.0])
    row = replace(row, advantages=advantages, versions=np.array([5, 3, 3, 4, 6, 6], np.int32))
    found, dropped = samples(closed([row], {"a": 1.0, "b": 0.0}), version=lambda version: version * 10)
    assert dropped == {"target_advantage_zero": 1}
    assert [(s.advantage, s.model_version, int(s.completion_mask.sum())) for s in found] == [(1.0, 30, 2), (2.0, 40, 3)]
    together = np.zeros(len(row.ids), np.int64)
    for sample in found:
        assert sample.input_ids.tolist() == row.ids[: len(sample.input_ids)].tolist()
        together[: len(sample.input_ids)] += sample.completion_mask
    assert np.flatnonzero(together).tolist() == np.delete(row.targets, 2).tolist() and together.max() == 1


def test_targets_of_another_temperature_are_left_out_and_counted() -> None:
    row = random_row(np.random.default_rng(2), "a", prompt=4, sampled=4, advantage=1.0)
    row = replace(row, temperatures=np.array([1.0, 0.7, 0.7, 1.0]))
    (sample,), dropped = samples(closed([row], {"a": 1.0}))
    assert dropped == {"target_temperature": 2}
    assert np.flatnonzero(sample.completion_mask).tolist() == row.targets[[0, 3]].tolist()
    (other,), _ = samples(closed([row], {"a": 1.0}), temperature=0.7)
    assert np.flatnonzero(other.completion_mask).tolist() == row.targets[[1, 2]].tolist()
    assert samples(closed([row], {"a": 1.0}), temperature=0.5) == ([], {"target_temperature": 4})


def test_rows_for_the_trainer_that_takes_one_per_run() -> None:
    row = random_row(np.random.default_rng(3), "a", prompt=5, sampled=8, advantage=1.0)
    found, dropped = as_trl(row, 1.0, end=2)
    first, last = int(row.targets[0]), int(row.targets[-1])
    assert not dropped and found["prompt_ids"] + found["completion_ids"] == row.ids[: last + 1].tolist()
    assert len(found["prompt_ids"]) == first == 5
    assert (np.flatnonzero(found["env_mask"]) + first).tolist() == row.targets.tolist()
    assert [found["logprobs"][t - first] for t in row.targets] == row.logprobs.tolist()
    warm, dropped = as_trl(replace(row, temperatures=np.full(6, 0.5)), 1.0, end=2)
    assert dropped == {"target_temperature": 6} and not any(warm["env_mask"])
    assert as_trl(None, 1.0, end=2)[0] == {
        "prompt_ids": [2],
        "completion_ids": [2],
        "logprobs": [0.0],
        "env_mask": [0],
    }


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree_attention() -> None:
    register_tree_attention()
    without_gpu.register()


def windowed(window: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=1,
    )
    return Qwen3ForCausalLM(config).eval()


def packed_loss(model: Any, found: list[Any]) -> torch.Tensor:
    """TRL's loss of one micro-batch, at a policy that has not moved much: its packing, our attention, its formula."""
    row = TreeRow()
    for sample in found:
        row.add(
            {
                "input_ids": torch.from_numpy(sample.input_ids),
                "completion_mask": torch.from_numpy(sample.completion_mask),
                "old_log_probs": torch.from_numpy(sample.old_log_probs),
                "advantage": sample.advantage,
                "group_id": sample.group_id,
            }
        )
    batch = row.pack()
    assert batch["input_ids"].numel() < sum(len(sample.input_ids) for sample in found)
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    longest = dict(zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), batch["tree_max_seqlens"].tolist(), strict=True))
    logits = model(
        input_ids=batch["input_ids"][None],
        position_ids=batch["position_ids"][None],
        use_cache=False,
        **{name: batch[name] for name in names},
        **longest,
    ).logits[0]
    at = batch["token_index"]
    logp = logits[at].log_softmax(-1).gather(-1, batch["shift_labels"][at][:, None])[:, 0]
    ratio = (logp - batch["old_log_probs"]).exp()
    advantage = batch["advantages"]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / len(at)


@pytest.mark.usefixtures("tree_attention")
@pytest.mark.parametrize("dense", [4096, 0], ids=["one mask", "by segments"])
@pytest.mark.parametrize("window", [None, 6])
def test_trls_loss_on_samples_is_the_two_level_mean_of_separate_rows(
    monkeypatch: pytest.MonkeyPatch, dense: int, window: int | None
) -> None:
    """One group in one micro-batch: TRL's token mean of weighted advantages is gyre's mean over runs of means over tokens."""
    monkeypatch.setattr(without_gpu, "_DENSE", dense)
    model = tiny_model(seed=3) if window is None else windowed(window)
    rows = branching(np.random.default_rng(4), model)
    found, _ = samples(closed(rows, {"a": 1.0, "b": 0.0}))

    loss = torch.zeros(())
    for row in rows:
        ids = torch.from_numpy(row.ids.astype(np.int64))
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        ratio = (logp[row.targets - 1] - torch.from_numpy(row.logprobs)).exp()
        loss = loss - (torch.from_numpy(row.weights) * ratio * row.advantage).sum() / 2
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation(TREE_ATTENTION)
    packed = packed_loss(model, found)
    packed.backward()
    assert packed.item() == pytest.approx(loss.item(), abs=2e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=2e-6)


@pytest.mark.usefixtures("tree_attention")
def test_capped_scores_are_refused() -> None:
    states = torch.zeros(1, 2, 3, 4)
    bounds = torch.tensor([0, 3])
    with pytest.raises(TrainerError, match="softcap 30"):
        without_gpu._attention(
            None,
            states,
            states,
            states,
            None,
            tree_kv_index=torch.arange(3),
            tree_cu_seqlens_q=bounds,
            tree_cu_seqlens_k=bounds,
            softcap=30.0,
        )
