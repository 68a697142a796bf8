"""Where a real vLLM stops to sample faster, and what gyre finds of that from its metrics.

    python benchmarks/cells/knee.py [--levels 1 2 4 ...] [--seconds 5] [--batch 64] [--hidden 256] [--samples FILE]

One server of vLLM's CPU build with a small random policy, asked by 1 to 64 requests at a time, each for 16 to 80
tokens; up the levels and down again. gyre's own meter (`cells/rates.py`) looks every half second. Results as JSON on standard
output, a table on standard error; `--samples` keeps what the meter read, for tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from report import say  # noqa: E402
from servers import make_policy, servers  # noqa: E402

from gyre_sdk.trainer.cells.rates import RateMeter, Reading  # noqa: E402
from gyre_sdk.trainer.engines import vllm  # noqa: E402

LEVELS = [1, 2, 4, 8, 16, 24, 32, 48, 64]
PROMPT, SAMPLED = 128, (16, 80)
"""Tokens of a prompt, and that a request samples at least and at most."""
PERIOD_S = 0.5
"""Seconds between looks: a training has hours for them, this has minutes."""


def main() -> None:
    """Start, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--levels", type=int, nargs="*", default=LEVELS, help="requests at a time")
    parser.add_argument("--seconds", type=float, default=4.0, help="at each level, up and down")
    parser.add_argument("--batch", type=int, default=64, help="requests that the server runs at a time")
    parser.add_argument("--hidden", type=int, default=256, help="width of the policy")
    parser.add_argument("--samples", type=Path, help="file for what was read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policy(folder / "model", options.hidden)
        with servers(folder, [None], ["--max-model-len", "512", "--enforce-eager"], options.batch) as (url,):
            result = asyncio.run(measure(url, options))
    result["options"] = {name: str(value) for name, value in vars(options).items()}
    print(json.dumps(result, indent=1))
    say(f"{'requests':>9}{'tokens/s':>10}{'ms/token':>10}")
    for row in result["levels"]:
        say(f"{row['requests']:>9}{row['tokens_s']:>10.0f}{row['ms_token']:>10.1f}")
    say(f"bound by speed that gyre found: {result['knee']}")


class Kept(RateMeter):
    """Keeps what it read."""

    def __init__(self, url: str) -> None:
        super().__init__(lambda: [url])
        self._url = url
        self.read: list[Reading] = []

    def beat(self) -> None:
        """Look once."""
        super().beat()
        self.read += self._before.values()


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Ask at each level, up and down, while the meter looks."""
    meter = Kept(url)
    found: dict[int, list[float]] = {}
    limits = httpx.Limits(max_connections=None)
    knees = []
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as http:
        await asyncio.gather(*(ask(http, number, 8) for number in range(4)))  # everything is loaded once
        for requests in [*options.levels, *reversed(options.levels)]:
            until = time.monotonic() + options.seconds
            loops = [asyncio.create_task(loop(http, number, until)) for number in range(requests)]
            marks: list[Reading] = []
            while time.monotonic() < until - 0.5:
                await asyncio.to_thread(meter.beat)
                marks.append(meter.read[-1])
                await asyncio.sleep(PERIOD_S)
            knees.append((requests, meter.rates.knee))
            found.setdefault(requests, []).append((marks[-1].sampled - marks[0].sampled) / (marks[-1].at - marks[0].at))
            await asyncio.gather(*loops)
    meter.stop()
    if options.samples is not None:
        began = meter.read[0]
        rows = [[round(r.at - began.at, 3), int(r.sampled - began.sampled), int(r.calls)] for r in meter.read]
        options.samples.write_text(json.dumps(rows))
    levels = [
        {
            "requests": n,
            "tokens_s": statistics.mean(rates),
            "ms_token": 1000 * n / statistics.mean(rates),
            "seen": rates,
        }
        for n, rates in found.items()
    ]
    return {"levels": levels, "knee": meter.rates.knee, "knee_by_level": knees}


async def loop(http: httpx.AsyncClient, number: int, until: float) -> None:
    """Ask again and again."""
    random = Random(number)
    while time.monotonic() < until:
        await ask(http, number, random.randint(*SAMPLED))


async def ask(http: httpx.AsyncClient, number: int, tokens: int) -> None:
    """Ask once, with a prompt of its own."""
    ids = [3 + (7 * n + number * n * n) % 60 for n in range(PROMPT)]
    settings = {"temperature": 1.0, "ignore_eos": True, "max_tokens": tokens, "logprobs": 0}
    body = {"model": vllm.MODEL_NAME, "token_ids": ids, "sampling_params": settings}
    answer = await http.post("/inference/v1/generate", json=body)
    answer.raise_for_status()


if __name__ == "__main__":
    main()
