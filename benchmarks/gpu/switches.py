"""Seconds of a cell's switches phase by phase, the GPU memory that they free, and publications while replicas sleep.

    python benchmarks/gpu/switches.py [--rounds N] [--cells 2] [--share 0.2] [--kv-gib 4] [--adapters R]
    python benchmarks/gpu/switches.py --device cpu --engine embedded --shape tiny --rounds 2     # a dry run

Cells share one GPU, with the trainer's weights on it. To training: `drain` (real agents talk meanwhile), `park` (vLLM's
sleep, level 2; level 1 with adapters), `join`. Back: `leave`, `wake` (the weights' memory), the update's phases, `awake`
(the cache's memory, resumed), `route`. No batch is open, so `join` and `leave` are the words that pass and no more; what
a satellite's pull and push take is in `benchmarks/gpu/elastic.py`.

Memory is what all processes use together. A publication is timed to replicas that serve, with one asleep, and with all
asleep. Figures are medians over rounds, the first not counted. Without vLLM: `--engine embedded`, which pauses and frees
nothing. Prints one JSON object; what could not be measured is named in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import one_gpu

ADAPTED = "lora_B"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", type=int, default=16, help="that talk while cells go over")
    parser.add_argument("--drain", type=float, default=0.5, help="seconds that calls may take to end where they are")
    parser.add_argument("--adapters", type=int, default=0, help="rank of adapters to publish in place of all weights")
    one_gpu.add_options(parser)
    options = parser.parse_args()
    missing = one_gpu.problems(options)
    if options.cells < 2:
        missing["cells"] = "one cell must go on serving the agents: give --cells 2 or more"
    if options.rounds < 1 or options.agents < 1:
        missing["options"] = "--rounds and --agents begin at 1"
    result: dict[str, Any] = {"options": one_gpu.plain(options), "problems": missing}
    if not missing:
        with tempfile.TemporaryDirectory(prefix="gyre-switches-") as place:
            result = {"device": one_gpu.device_name(options.device), **measure(options, Path(place)), **result}
    text = json.dumps(result, indent=1)
    if options.json:
        options.json.write_text(text)
    print(text)
    return 1 if missing else 0


def measure(options: argparse.Namespace, place: Path) -> dict[str, Any]:
    """Start everything, switch for some rounds, and return what was seen."""
    from gyre_sdk.trainer.cells.switch import Cell, Sleeping, parking_of
    from gyre_sdk.trainer.stack import Stack
    from gyre_sdk.trainer.transports import choose

    one_gpu.make_policy(place / "policy", options)
    more = [f"rollout.concurrency={options.agents}", "agent.options.median_s=0.02", f"cells.drain_s={options.drain}"]
    more += [f"policy.lora.r={options.adapters}"] if options.adapters else []
    config = one_gpu.settings(place / "training", place / "policy", options, more)
    parking = parking_of(config.engine.options, choose(config))
    with Stack(config, base=one_gpu.AGENTS) as stack:
        model = stack.model().to(options.device)
        rounds = Rounds(
            stack,
            model,
            [
                Cell(f"cell-{number}", url, parking, launched)
                for number, (url, launched) in enumerate(zip(stack.replicas, stack.cells, strict=True))
            ],
            options,
        )
        for _ in range(options.rounds + 1):
            rounds.one()
    return {
        "engine": config.engine.kind,
        "parked": f"asleep, level {parking.level}" if isinstance(parking, Sleeping) else "paused, with its memory",
        "transport": choose(config),
        "policy_gib": round(sum(one.numel() * one.element_size() for one in model.parameters()) / 2**30, 3),
        "runs_of_agents": rounds.runs,
        **rounds.medians(),
    }


class Rounds:
    """Measures round after round; `seen` has a list of figures per name in each of its parts, one per round."""

    def __init__(self, stack: Any, model: Any, cells: Sequence[Any], options: argparse.Namespace) -> None:
        self.runs = 0
        self.seen: dict[str, list[dict[str, float]]] = {}
        self._stack = stack
        self._model = model
        self._cells = cells
        self._options = options

    def one(self) -> None:
        """Switch one cell there and back under load, then all of them, which nobody calls meanwhile."""
        memory, published = {}, {}
        cell = self._cells[-1]
        with self._agents():
            memory["serving"] = self._used()
            published["all serve"] = self._publish()
            self._note("to_training_s", self._to_training(cell))
            memory["one parked"] = self._used()
            published["one parked"] = self._publish()
            self._note("to_serving_s", self._to_serving(cell))
            memory["back"] = self._used()
        for each in self._cells:
            self._to_training(each)
        memory["all parked"] = self._used()
        published["all parked"] = self._publish()
        for each in reversed(self._cells):
            self._to_serving(each)
        self._note("publication_s", published)
        self._note("gpu_used_gib", {name: used for name, used in memory.items() if used is not None})

    def medians(self) -> dict[str, dict[str, float]]:
        """Return the medians of all rounds but the first, with the sum of a switch's phases."""
        found = {}
        for part, rounds in self.seen.items():
            names = list(dict.fromkeys(name for one in rounds for name in one))
            counted = [{name: one.get(name, 0.0) for name in names} for one in rounds[1:]]
            figures = {name: round(statistics.median(one[name] for one in counted), 4) for name in names}
            if part.startswith("to_"):
                figures["all phases"] = round(statistics.median(sum(one.values()) for one in counted), 4)
            found[part] = figures
        return found

    def _note(self, part: str, figures: dict[str, float]) -> None:
        self.seen.setdefault(part, []).append(figures)

    def _used(self) -> float | None:
        return one_gpu.used_gib(self._options.device)

    def _publish(self) -> float:
        """Publish weights that were never served; return the seconds until all who serve compute with them."""
        import torch

        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad and (not self._options.adapters or ADAPTED in name):
                    parameter.add_(1e-3)
        began = time.monotonic()
        self._stack.publisher.publish(self._model, step=0)
        return time.monotonic() - began

    def _to_training(self, cell: Any) -> dict[str, float]:
        from gyre_sdk.trainer.cells.switch import Patience, to_training

        return to_training(cell, self._core(cell), *self._sides(), Patience(self._options.drain), _unseen).phases

    def _to_serving(self, cell: Any) -> dict[str, float]:
        from gyre_sdk.trainer.cells.switch import Patience, to_serving

        return to_serving(cell, self._core(cell), *self._sides(), Patience(self._options.drain), _unseen).phases

    def _core(self, cell: Any) -> bool:
        return cell is self._cells[0]

    def _sides(self) -> tuple[Any, Any]:
        return self._stack.publisher, self._stack.core

    @contextmanager
    def _agents(self) -> Iterator[None]:
        """Let agents talk, one run after the other, until the end; an agent's error ends the benchmark."""
        ended, errors, lock = threading.Event(), list[Exception](), threading.Lock()

        def talk(number: int) -> None:
            tasks = self._stack.tasks
            try:
                while not ended.is_set():
                    self._stack.run_session(tasks[number % len(tasks)])
                    with lock:
                        self.runs += 1
            except Exception as error:  # boundary: top of an agent's thread
                errors.append(error)

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(self._options.agents)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        if errors:
            sys.exit(f"switches: an agent saw an error: {type(errors[0]).__name__}: {errors[0]}")


_unseen: Callable[[Any], None] = lambda event: None  # noqa: E731 - a hook

if __name__ == "__main__":
    sys.exit(main())
