"""What it gains and costs that replicas of vLLM share keys and values through a folder (`[engine.kv]`).

    python benchmarks/cells/keys.py [--lengths 512 1024 2048 4096] [--repeats 5] [--hidden 256]

Three servers of vLLM's CPU build with a small random policy: two that share, one by itself. For contexts of each length:
the seconds to the first token where the context is computed, at a server by itself and at one that shares (and writes),
and at the second one, which finds it. Results as JSON on standard output, a table on standard error.
"""

from __future__ import annotations

import argparse
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

from gyre_sdk.trainer.engines import vllm  # noqa: E402
from gyre_sdk.trainer.engines.kv import KvConfig  # noqa: E402

BLOCK = 32


def main() -> None:
    """Start, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 1024, 2048, 4096], help="tokens of a context")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256, help="width of the policy")
    parser.add_argument("--per-file", type=int, default=4, help="blocks in a file")
    options = parser.parse_args()
    shared = KvConfig(memory_gib=0.5, blocks_per_chunk=options.per_file)
    arguments = ["--max-model-len", "8192", "--enforce-eager", "--block-size", str(BLOCK)]
    arguments += ["--max-num-batched-tokens", "8192"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_policy(folder / "model", options.hidden)
        with servers(folder, [None, shared, shared], arguments) as urls, httpx.Client(timeout=120) as http:
            for url in urls:
                http.post(f"{url}/update_weight_version", json={"new_version": "0"}).raise_for_status()
                first_token(http, url, [5] * 200, "warm")
            rows = [measure(http, urls, length, options.repeats) for length in options.lengths]
            size = sum(path.stat().st_size for path in (folder / "kv").rglob("*.bin"))
    tokens = sum(row["tokens"] * (options.repeats + 1) for row in rows)
    print(json.dumps({"lengths": rows, "bytes_per_token": size / tokens, "options": vars(options)}, indent=1))
    say(
        f"{'tokens':>8}{'computed':>10}{'and written':>13}{'found':>8}{'of tokens':>11}   ms to the first token, median"
    )
    for row in rows:
        ms = [f"{row[way]['median']:.0f}" for way in ("alone", "writes", "finds")]
        say(f"{row['tokens']:>8}{ms[0]:>10}{ms[1]:>13}{ms[2]:>8}{row['found']:>11.0f}")
    say(f"bytes of files for a token: {size / tokens:.0f}")


def measure(http: httpx.Client, urls: list[str], length: int, repeats: int) -> dict[str, Any]:
    """Ask for the first token after contexts of a length; the first round is not counted."""
    alone, one, other = urls
    times: dict[str, list[float]] = {"alone": [], "writes": [], "finds": []}
    found: list[float] = []
    for repeat in range(repeats + 1):
        ids = [Random(f"{length} {repeat} {n}").randrange(3, 250) for n in range(length)]
        taken = {"alone": first_token(http, alone, ids, "0")[0], "writes": first_token(http, one, ids, "0")[0]}
        written(http, one)
        taken["finds"], cached = first_token(http, other, ids, "0")
        if repeat:
            found.append(cached)
            for way, seconds in taken.items():
                times[way].append(1000 * seconds)
    spread = {way: {"median": statistics.median(ms), "min": min(ms), "max": max(ms)} for way, ms in times.items()}
    return {"tokens": length, "found": statistics.mean(found), **spread}


def first_token(http: httpx.Client, url: str, ids: list[int], salt: str) -> tuple[float, float]:
    """Return the seconds that one token takes, and how many tokens of the context were not computed."""
    settings = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
    body = {"model": vllm.MODEL_NAME, "token_ids": ids, "cache_salt": salt, "sampling_params": settings}
    began = time.monotonic()
    answer = http.post(f"{url}/inference/v1/generate", json=body)
    seconds = time.monotonic() - began
    answer.raise_for_status()
    return seconds, (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def written(http: httpx.Client, url: str) -> None:
    """Wait until a server writes nothing any more."""
    bytes_before, quiet = -1.0, 0
    while quiet < 3:
        page = http.get(f"{url}/metrics").text
        lines = [line for line in page.splitlines() if line.startswith("vllm:kv_offload_tiering_write_bytes_total")]
        now = sum(float(line.split()[-1]) for line in lines)
        quiet = quiet + 1 if now == bytes_before else 0
        bytes_before = now
        time.sleep(0.05)


if __name__ == "__main__":
    main()
