"""Ray clusters of several nodes on this machine, and cells of small processes to run on them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre_sdk.trainer.processes import ChildSpec

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "500", "RAY_enable_worker_prestart": "0"}
"""No calls home, no idle workers, and a dead node is seen soon."""

SERVER = """
import http.server, os, subprocess, sys
print("model", sys.argv[2], "on GPU", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if sys.argv[2] == "none":
    print("no model here", file=sys.stderr); sys.exit(3)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
host = sys.argv[sys.argv.index("--host") + 1] if "--host" in sys.argv else "127.0.0.1"
server = http.server.HTTPServer((host, int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
print(f"helper {helper.pid}", flush=True)
print(f"toy ready on http://{host}:{server.server_port} extra", flush=True)
server.serve_forever()
"""


@contextmanager
def cluster(nodes: int) -> Iterator[Any]:
    """A cluster of nodes with an address and one `slot` each, and GPUs in name."""
    before, mark = dict(os.environ), f"GYRE_TEST_CLUSTER_{os.getpid()}"
    os.environ.update(QUIET | {mark: "1"})
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for number in range(nodes):
            made.add_node(
                **({"node_ip_address": f"127.0.0.{10 + number}"} if number else {}),
                num_cpus=1,
                num_gpus=8,
                resources={"slot": 1},
                object_store_memory=80 << 20,
                include_dashboard=False,
                wait=False,
            )
        made.wait_for_nodes(timeout=120)
        yield made
    finally:
        made.shutdown()
        for agent in marked(mark):  # of a node that was killed: they end by themselves after a minute
            os.kill(agent, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(before)


def toy(folder: Path, name: str, model: str = "one", *, ready: str = "toy ready on", **changes: Any) -> ChildSpec:
    """A server of HTTP that starts a helper, which holds on to its output."""
    (folder / "cell_toy_server.py").write_text(SERVER)
    return ChildSpec(
        name,
        lambda port: ["cell_toy_server", str(port), model],
        ready,
        folder / f"{name}.log",
        environment={"PYTHONPATH": str(folder)},
        **changes,
    )


def engine(folder: Path, name: str, model: Path) -> ChildSpec:
    """An embedded engine."""
    arguments = ["gyre_sdk.trainer.engines.embedded", "--model", str(model), "--version", "1", "--port"]
    return ChildSpec(name, lambda port: [*arguments, str(port)], "gyre-engine ready on", folder / f"{name}.log")


def raylet(node: Any) -> int:
    """Process id of a node's own process."""
    return int(node.all_processes["raylet"][0].process.pid)


def helper(log: Path) -> int:
    """Process id of the toy's helper."""
    return int(log.read_text().rsplit("helper ", 1)[1].split()[0])


def eventually(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ["Z", "0"]


def alive(pid: int) -> bool:
    return _stat(pid)[0] != "Z"


def parent(pid: int) -> int:
    return int(_stat(pid)[1])


def marked(mark: str) -> dict[int, str]:
    """Command lines of the processes that inherited an environment variable of this name, by id."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "environ").read_bytes() and alive(int(folder.name)):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


DRIVER = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from ray_kit import toy
from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.cells.launch.ray import RayLauncher
assert "ray" not in sys.modules and "torch" not in sys.modules
folder = Path(sys.argv[1])
launcher = RayLauncher(None, observer=lambda event: None)
cells = [launcher.launch(CellSpec(f"cell-{{n}}", toy(folder, f"replica-{{n}}"))) for n in range(2)]
print([cell.wait() for cell in cells], flush=True)
time.sleep(600)
"""
"""A trainer's process with a cluster of its own and two cells on it."""


def driver(folder: Path) -> list[str]:
    return [sys.executable, "-c", DRIVER, str(folder)]
