"""Ray clusters of several nodes on this machine, and cells of small processes to run on them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gyre_sdk.trainer.cells.launch import CellSpec
from gyre_sdk.trainer.processes import ChildSpec

Driver = subprocess.Popen[str]

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
    before, mark = dict(os.environ), _mark()
    os.environ.update(QUIET | {mark: "1"})
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for number in range(nodes):
            add_node(made, f"127.0.0.{10 + number}" if number else None)
        made.wait_for_nodes(timeout=120)
        yield made
    finally:
        made.shutdown()
        for agent in marked(mark):  # of a node that was killed: they end by themselves after a minute
            os.kill(agent, signal.SIGKILL)
        os.environ.clear()
        os.environ.update(before)


def add_node(cluster: Any, address: str | None) -> None:
    """Begin a node."""
    cluster.add_node(
        **({"node_ip_address": address} if address else {}),
        num_cpus=1,
        num_gpus=8,
        resources={"slot": 1},
        object_store_memory=80 << 20,
        include_dashboard=False,
        wait=False,
    )


def _mark() -> str:
    return f"GYRE_TEST_CLUSTER_{os.getpid()}"


def wardens() -> list[int]:
    """Process ids of what holds the places of trainings on the cluster."""
    return [found for found, line in marked(_mark()).items() if line.startswith("ray::Warden")]


def leashed() -> set[int]:
    """Process ids of what trainings on the cluster started on leashes, here and there."""
    found = {pid for pid, line in marked(_mark()).items() if "gyre_sdk.trainer.leash" in line}
    return {pid for pid in found if parent(pid) not in found}


def groups() -> list[str]:
    """Names of the placement groups that are there, or are waited for; needs a connection."""
    from ray.util import placement_group_table

    return [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]


@contextmanager
def connected(address: str) -> Iterator[None]:
    import ray

    ray.init(address, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()


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
import json, os, select, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from ray_kit import driven, toy
from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch.ray import RayLauncher
from gyre_sdk.trainer.lingering import Linger
assert "ray" not in sys.modules and "torch" not in sys.modules
folder, address, seconds = Path(sys.argv[1]), sys.argv[2] or None, float(sys.argv[3])
launcher = RayLauncher(
    address, observer=lambda event: None, namespace=os.environ.get("TRAINING", "gyre-toy"), logs=folder, linger=Linger(folder / "run", seconds), silence=3.0
)
cells = [launcher.launch(spec) for spec in driven(folder, sys.argv[4:])]
try:
    for cell in cells[:2]:
        cell.wait()
    print(json.dumps(dict(pid for cell in cells[:2] for pid in cell.pids().items())), flush=True)
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        for cell in cells[:2]:
            cell.check()
except TrainerError as error:
    print(error, flush=True)
launcher.close()
"""
"""A trainer's process with cells on a cluster that lingers: the one with an address, or one of its own."""


def driven(folder: Path, others: Sequence[str] = ()) -> list[CellSpec]:
    """Two cells; and one on the trainer's node for each amount of slots that is given.

    The first is on that node too, and there is room for it wherever the second lands, of two such trainings.
    """
    made = [
        CellSpec("cell-0", toy(folder, "replica-0"), None, {"CPU": 0.2}),
        CellSpec("cell-1", toy(folder, "replica-1"), toy(folder, "worker-1"), {"CPU": 0.3}),
    ]
    return made + [
        CellSpec(f"more-{slots}", toy(folder, f"replica-{slots}"), None, {"slot": float(slots)}) for slots in others
    ]


def driver(folder: Path, address: str = "", seconds: float = 300.0, *others: str, **environment: str) -> Driver:
    """Start one; what it prints first are the ids of its processes. It ends at a line or the end of its stdin."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), address, str(seconds), *others],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def said(process: Driver) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
