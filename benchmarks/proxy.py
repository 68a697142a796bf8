"""What recording costs: gyre's proxy, a bare pass-through and other recording proxies over one stub engine.

    python benchmarks/proxy.py [--peers] [--quick] [--only throughput,latency,kill,death,agents,growth]

Engine, proxies and load generator are processes of their own. Every system is measured in every round; figures are medians
over rounds, ratios are against systems of the same run. `--peers` installs the compared packages, pinned, each into an
environment of its own under `~/.cache/gyre/bench`; a peer that cannot be installed or started is named in `problems`.
Prints one JSON object, and a table on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import report
from proxy import death, growth, sections, systems
from proxy.model import make_model, texts
from proxy.systems import BARE, BOTH, OURS, PEER_TABLE

_SECTIONS = ("throughput", "latency", "kill", "death", "agents", "growth")
_SHARE, _AIM = 0.3, 0.5


def main() -> None:
    """Measure the sections asked for and print the result."""
    options = _options()
    systems.raise_file_limit()
    result: dict[str, Any] = {"quick": options.quick, "cores": os.cpu_count(), "brief": options.brief, "problems": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", options.tokens)
        result["vocabulary"] = model.vocabulary
        with systems.stub(model, options.chunk) as engine, ExitStack() as ending:
            measure = _plan(options, model, engine, folder, result["problems"], ending)
            for section in sorted(options.only, key=_SECTIONS.index):
                report.say(f"measuring {section}")
                result[section] = measure[section]()
    result["aims"] = _aims(result)
    _table(result)
    print(json.dumps(result))


def _plan(
    options: argparse.Namespace, model: Any, engine: str, folder: Path, problems: dict[str, str], ending: ExitStack
) -> dict[str, Callable[[], dict[str, Any]]]:
    names = [*BOTH, BARE, *(PEER_TABLE if options.peers else ())]
    quick = options.quick

    @cache
    def started_once() -> list[systems.System]:
        return ending.enter_context(systems.running(names, model, engine, folder / "all", problems))

    def over_all(section: str, measure: Callable[..., dict[str, Any]], *sizes: Any) -> dict[str, Any]:
        if quick:  # what is killed is killed last
            return measure(started_once(), *sizes)
        with systems.running(names, model, engine, folder / section, problems) as running:
            return measure(running, *sizes)

    return {
        "throughput": lambda: over_all(
            "throughput",
            sections.throughput,
            1 if quick else options.rounds,
            0.3 if quick else options.seconds,
            next(texts(model, options.brief)) if options.brief else "",
        ),
        "kill": lambda: over_all("kill", sections.killed, 64 if quick else 800),
        "death": lambda: death.death(model, folder / "death", 1 if quick else 8, 4),
        "latency": lambda: over_all(
            "latency",
            lambda running, *sizes: sections.latency(running, engine, *sizes),
            8 if quick else 200,
            2 if quick else 30,
        ),
        "agents": lambda: sections.agents(model, engine, folder / "agents", 20 if quick else 1000, 10),
        "growth": lambda: growth.growth(model, engine, folder / "growth", 8 if quick else 200, 300 if quick else 5000),
    }


def _aims(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every aim that this run measured: its name, the value, the limit, and whether it holds."""
    aims: list[dict[str, Any]] = []

    def aim(name: str, value: float, limit: float, *, least: bool = False) -> None:
        aims.append({"aim": name, "value": value, "limit": limit, "met": value >= limit if least else value <= limit})

    if "throughput" in result:
        rates = result["throughput"]["calls_per_second"]
        best = max(BOTH, key=lambda name: float(rates[name]))
        over = result["throughput"]["gyre_over" if best == OURS else "workers_over"]
        aim(f"share of the pass-through ({best})", over[BARE], _SHARE, least=True)
        aim(f"share of the pass-through, hoped for ({best})", over[BARE], _AIM, least=True)
        for peer, entry in PEER_TABLE.items():
            if peer in over:
                aim(f"times {peer} ({best})", over[peer], entry.aim, least=True)
    if "kill" in result:
        lost = sum(result["kill"][name]["answered"] - result["kill"][name]["on_disk"] for name in BOTH)
        aim("answered calls lost by a kill", lost, 0)
    if "death" in result:
        aim("replica death noticed, s", max(found["max"] for found in result["death"]["noticed_s"].values()), 1.0)
        aim("calls failed by a replica's death", result["death"]["errors"], 0)
    if "latency" in result:
        aim("added p50, ms", result["latency"]["added_p50_ms"][OURS], 2.0)
        aim("added time to first token, ms", result["latency"]["added_ttft_ms"][OURS], 3.0)
        aim("added time to first token, paced, ms", result["latency"]["added_ttft_paced_ms"][OURS], 3.0)
    if "agents" in result:
        aim("agents at once: errors", result["agents"]["errors"], 0)
        aim("agents at once: MiB", result["agents"]["peak_mib"], 1024)
    if "growth" in result:
        aim("stored bytes per unique token", result["growth"]["bytes_per_token"], 6.0)
        aim("CPU ms per call above JSON, at the end", result["growth"]["cpu_ms_above_json_last"], 150.0)
    return aims


def _table(result: dict[str, Any]) -> None:
    columns = {
        "calls/s": result.get("throughput", {}).get("calls_per_second", {}),
        "CPU ms": result.get("throughput", {}).get("cpu_ms_per_call", {}),
        "kept": {name: f"{found['on_disk']}/{found['answered']}" for name, found in result.get("kill", {}).items()},
        "+p50 ms": result.get("latency", {}).get("added_p50_ms", {}),
        "+ttft ms": result.get("latency", {}).get("added_ttft_ms", {}),
    }
    report.table(columns, (*BOTH, BARE, *PEER_TABLE), 20)
    report.verdicts(result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=report.chosen(_SECTIONS), default=list(_SECTIONS), metavar="SECTION,...")
    parser.add_argument("--peers", action="store_true", help="install and measure the compared packages too")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="per system and round")
    parser.add_argument("--tokens", type=int, default=32, help="per answer")
    parser.add_argument("--brief", type=int, default=0, help="tokens that every conversation of throughput starts with")
    parser.add_argument("--chunk", type=int, default=8, help="tokens per event of the engine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
