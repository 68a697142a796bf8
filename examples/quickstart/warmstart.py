"""Make the demo's policy and warm it up with TRL's `SFTTrainer` on noisy traces; cached by content.

python examples/quickstart/warmstart.py --out DIR --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces import Row

CACHE = Path(".cache/quickstart")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start; they are part of the cache key."""

    seed: int = 0
    """Seed of the traces, the model and the order of rows."""
    traces: int = 3500
    """Scripted runs, each of another task of the train split."""
    epochs: float = 1.0
    """Passes over the rows."""
    batch: int = 12
    """Rows per optimizer step."""
    learning_rate: float = 1e-3
    """Higher ones break the structured start: at 2.6e-3 the loss after 250 steps was 1.2, here it is 0.34."""
    warmup_steps: int = 30
    decay_share: float = 0.4
    """Last part of training over which the learning rate falls to zero."""


def cache_key(settings: WarmStart) -> str:
    """Return a hash over the settings and everything that decides the result: the demo's sources."""
    digest = hashlib.sha256(repr(sorted(asdict(settings).items())).encode())
    for name in ("agent.py", "policy.py", "tasks.py", "traces.py", "warmstart.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def warm_start(
    out: Path, settings: WarmStart, cache: Path = CACHE, progress: Callable[[str], None] = lambda line: None
) -> Path:
    """Write the warm policy to `out`, from the cache where it is there; return `out`.

    An interrupted warm start leaves nothing in the cache.
    """
    stored = cache / cache_key(settings)
    if not stored.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
            train(Path(making) / "policy", settings, progress)
            try:
                (Path(making) / "policy").rename(stored)
            except OSError:
                if not stored.is_dir():
                    raise
    else:
        progress(f"warm start: cached in {stored}")
    shutil.copytree(stored, out, dirs_exist_ok=True)
    return out


def train(folder: Path, settings: WarmStart, progress: Callable[[str], None] = lambda line: None) -> None:
    """Train without looking at the cache and save to `folder`."""
    from policy import make_renderer, make_tokenizer
    from tasks import Split, generate
    from traces import in_batches, make_rows

    started = time.monotonic()
    tokenizer = make_tokenizer()
    # Another seed than the tasks of the demo itself, so most of those are new to the policy.
    tasks = generate(Split.TRAIN, settings.traces, seed=1000 + settings.seed)
    rows = make_rows(tasks, tokenizer, make_renderer(tokenizer), settings.seed)
    rows = in_batches(rows, settings.batch, settings.seed)
    progress(
        f"warm start: {len(rows)} rows, {sum(len(r.ids) for r in rows)} tokens, {time.monotonic() - started:.0f} s"
    )
    fit(folder, rows, settings, progress)


def fit(
    folder: Path, rows: Sequence[Row], settings: WarmStart, progress: Callable[[str], None] = lambda line: None
) -> None:
    """Train a new policy on rows, in their order, and save it to `folder`."""
    import datasets
    import transformers
    from policy import as_transformers, make_model, make_tokenizer, save_policy
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    started = time.monotonic()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    dataset = datasets.Dataset.from_dict(
        {"input_ids": [list(r.ids) for r in rows], "completion_mask": [list(r.mask) for r in rows]}
    )

    class Report(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
            if logs and "loss" in logs:
                done = f"{state.global_step}/{state.max_steps}"
                progress(f"warm start: step {done}, loss {logs['loss']:.3f}, {time.monotonic() - started:.0f} s")

    with tempfile.TemporaryDirectory() as scratch:
        steps = int(len(rows) * settings.epochs) // settings.batch
        config = SFTConfig(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=settings.batch,
            learning_rate=settings.learning_rate,
            adam_beta1=0.9,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": int(steps * settings.decay_share), "decay_type": "linear"},
            warmup_steps=settings.warmup_steps,
            train_sampling_strategy="sequential",
            completion_only_loss=True,
            activation_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=settings.seed,
            data_seed=settings.seed,
            max_length=512,
            packing=False,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = make_model(tokenizer, settings.seed)
        trainer = SFTTrainer(
            model=model,
            args=config,
            train_dataset=dataset,
            processing_class=as_transformers(tokenizer),
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)  # `Report` says the same in words
        trainer.train()
        save_policy(folder, trainer.model, tokenizer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    warm_start(args.out, WarmStart(seed=args.seed), args.cache, lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
