"""The command `gyre` over real stores: exact lines, readable tables, one-line errors."""

from __future__ import annotations

import io
import json
import math
import os
import queue
import sqlite3
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

import gyre_sdk
from gyre_sdk.cli import main
from gyre_sdk.cli.follow import Follower
from gyre_sdk.events import CallRecorded, LaneOpened, RunEnded, RunStarted
from gyre_sdk.journal import CallIntent, Journal, TokenChunk
from gyre_sdk.records import (
    CallId,
    CallStatus,
    GroupId,
    LaneId,
    LaneRecord,
    RunId,
    RunRecord,
    RunStatus,
    Sampling,
    VersionSpan,
)

GYRE = [sys.executable, "-m", "gyre_sdk.cli"]


class Done(NamedTuple):
    """A command that ended."""

    returncode: object
    stdout: str
    stderr: str


def gyre(*arguments: object, env: dict[str, str] | None = None) -> Done:
    """Run a command in this process; what it raises but an exit is a defect."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with patch.dict(os.environ, env or {}), redirect_stdout(out), redirect_stderr(err):
        time.tzset()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
    time.tzset()
    said, complained = (stream.buffer.getvalue().decode() for stream in (out, err))
    return Done(ended.value.code or 0, said, complained)


def lines(*arguments: object) -> list[dict]:
    done = gyre(*arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def open_run(journal: Journal, name: str, *, group: str | None = None, at: float = 100.0) -> None:
    run = RunRecord(RunId(name), "task", at, group=GroupId(group) if group else None)
    lane = LaneRecord(LaneId(f"{name}-main"), RunId(name), "main", "main", None, at)
    journal.open_run(run, lane, f"key-{name}").result()


def record(
    journal: Journal,
    run: str,
    name: str,
    prompt: list[int],
    sampled: list[int],
    *,
    role: str = "main",
    parent: str | None = None,
    shared: int = 0,
    deliver: bool = True,
    logprobs: list[float | None] | None = None,
    at: float = 101.0,
) -> None:
    call = CallId(name)
    journal.call_received(
        CallIntent(
            call,
            RunId(run),
            LaneId(f"{run}-main"),
            role,
            CallId(parent) if parent else None,
            None,
            shared,
            prompt,
            Sampling(),
            {},
            [],
            at,
        )
    ).result()
    chunk = TokenChunk(0, sampled, logprobs or [-0.5] * len(sampled), [VersionSpan(2, 0, len(sampled))])
    journal.call_ended(call, CallStatus.COMPLETE, at=at + 1, sampled=chunk, finish_reason="stop").result()
    if deliver:
        journal.call_delivered(call).result()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with a group of three runs: a branched one, a chain, and one that could not be scored."""
    path = tmp_path_factory.mktemp("store") / "store.db"
    with Journal(path) as journal:
        for name in ("r1", "r2", "r3"):
            open_run(journal, name, group="g")
        record(journal, "r1", "a", [1], [2, 3])
        record(journal, "r1", "b", [1, 2, 3, 4], [5], parent="a", shared=3)
        record(journal, "r1", "s", [1, 2, 3, 9], [6, 6, 6], role="main-summary", parent="a", shared=3)
        record(journal, "r1", "lost", [1], [7], deliver=False)
        record(journal, "r2", "c", [1], [8, 8])
        record(journal, "r3", "d", [1], [8])
        journal.end_run(RunId("r1"), RunStatus.COMPLETED, at=110, reward=1.0).result()
        journal.end_run(RunId("r2"), RunStatus.TIMED_OUT, at=111, reward=0.0).result()
        journal.end_run(RunId("r3"), RunStatus.SCORER_ERROR, at=112, error="no number \x1b[2J").result()
    return path


def test_calls_prints_a_line_per_call_with_exact_ids(store):
    done = gyre("calls", store, "--json")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for entry in found:
        assert list(entry)[:9] == [
            "run",
            "lane",
            "role",
            "call",
            "status",
            "prompt_ids",
            "sampled_ids",
            "logprobs",
            "versions",
        ]
    by_call = {entry["call"]: entry for entry in found}
    assert set(by_call) == {"a", "b", "s", "lost", "c", "d"}
    assert by_call["b"]["prompt_ids"] == [1, 2, 3, 4] and by_call["b"]["sampled_ids"] == [5]
    assert by_call["b"]["logprobs"] == [-0.5] and by_call["b"]["versions"] == [{"version": 2, "start": 0, "end": 1}]
    assert by_call["lost"]["status"] == "complete" and by_call["a"]["status"] == "delivered"
    assert {entry["run"] for entry in lines("calls", store, "--json", "--run", "r2")} == {"r2"}


def test_samples_prints_a_line_per_trajectory(store):
    found = lines("samples", store, "--j-max", 5, "--json")
    for entry in found:
        assert list(entry)[:6] == ["run", "path_ids", "owned", "weights", "advantage", "role"]
        assert len(entry["path_ids"]) == len(entry["owned"]) == len(entry["weights"])
        assert all((weight > 0) == bool(owned) for weight, owned in zip(entry["weights"], entry["owned"], strict=True))
    for run in ("r1", "r2", "r3"):
        total = math.fsum(weight for entry in found if entry["run"] == run for weight in entry["weights"])
        assert total == pytest.approx(1)
    assert {entry["run"]: entry["advantage"] for entry in found} == {"r1": 0.5, "r2": -0.5, "r3": None}
    first, second = (entry for entry in found if entry["run"] == "r1")
    assert (first["path_ids"], first["owned"], first["role"]) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], "main")
    assert (second["path_ids"], second["owned"], second["role"]) == (
        [1, 2, 3, 9, 6, 6, 6],
        [0, 0, 0, 0, 1, 1, 1],
        "main-summary",
    )


def test_samples_options(store):
    assert len(lines("samples", store, "--j-max", 1, "--json", "--run", "r1")) == 1
    assert len(lines("samples", store, "--j-max", 0, "--json")) == 4
    assert lines("samples", store, "--json", "--seed", 3) == lines("samples", store, "--json", "--seed", 3)
    scaled = lines("samples", store, "--json", "--baseline", "population_std")
    assert {entry["run"]: entry["advantage"] for entry in scaled} == {"r1": 1.0, "r2": -1.0, "r3": None}
    assert "calls that are no targets: 1 orphan" in gyre("samples", store, "--json").stderr


@pytest.mark.parametrize("command", ["runs", "calls", "samples"])
def test_tables_are_readable_and_safe(store, command):
    done = gyre(command, store)
    assert done.returncode == 0 and "r1" in done.stdout and "\x1b" not in done.stdout
    if command == "runs":
        assert "unscored" in done.stdout and "scored 2 of 3, 0 placeholder, 1 unscored (1 scorer_error)" in done.stdout
        assert "\\e[2J" in done.stdout


def test_runs_as_json(store):
    found = {entry["run"]: entry for entry in lines("runs", store, "--json")}
    assert found["r1"]["calls"] == 4 and found["r1"]["sampled_tokens"] == 7 and found["r3"]["reward"] is None


def test_view_once_prints_what_is_there(store):
    done = gyre("view", store, "--once")
    assert (
        done.returncode == 0
        and "run r3 ended: scorer_error, reward unscored" in done.stdout
        and "\x1b" not in done.stdout
    )


def test_errors_are_one_line_and_status_2(tmp_path, store):
    foreign, text = tmp_path / "foreign.db", tmp_path / "text"
    sqlite3.connect(foreign).execute("CREATE TABLE t (x)").connection.close()
    text.write_text("not a database, but long enough to be taken for one" * 40)
    for arguments in [
        ("calls", tmp_path / "missing"),
        ("samples", foreign),
        ("runs", text),
        ("view", tmp_path),
        ("calls", store, "--run", "nobody"),
    ]:
        done = gyre(*arguments, "--json") if arguments[0] in ("calls", "samples", "runs") else gyre(*arguments)
        assert done.returncode == 2, arguments
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
        assert done.stderr.startswith("gyre: ") and str(arguments[1]) in done.stderr


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["table", "lines"])
def test_output_that_finds_no_room_is_one_line(store, options):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*GYRE, "calls", str(store), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("gyre: No space left on device")


def test_the_version_is_told():
    done = subprocess.run([*GYRE, "--version"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"gyre {gyre_sdk.__version__}\n"


def test_a_wrong_option_is_named():
    done = gyre("samples", "x", "--j-max", "many")
    assert done.returncode == 2 and "--j-max" in done.stderr and "Traceback" not in done.stderr


def begin_slow(journal: Journal) -> None:
    intent = CallIntent(
        CallId("slow"), RunId("r1"), LaneId("r1-main"), "main", None, None, 0, [1], Sampling(), {}, [], 101.0
    )
    journal.call_received(intent).result()


def end_slow(journal: Journal) -> None:
    sampled = TokenChunk(0, [4, 4], [-1.0, -1.0], [VersionSpan(1, 0, 2)])
    journal.call_ended(CallId("slow"), CallStatus.COMPLETE, at=105.0, sampled=sampled).result()


def test_following_tells_everything_once_and_calls_when_they_are_complete(tmp_path):
    path = tmp_path / "store.db"
    with Journal(path) as journal, Journal(path, "r") as reader:
        follower = Follower(reader)
        assert follower.poll() == []
        open_run(journal, "r1")
        assert [type(event) for event in follower.poll()] == [RunStarted, LaneOpened]
        begin_slow(journal)
        record(journal, "r1", "fast", [1], [2])
        found = follower.poll()
        assert [event.call for event in found if isinstance(event, CallRecorded)] == ["fast"]
        assert follower.poll() == []
        end_slow(journal)
        (late,) = follower.poll()
        assert isinstance(late, CallRecorded) and (late.call, late.sampled_tokens, late.version) == ("slow", 2, 1)
        journal.end_run(RunId("r1"), RunStatus.COMPLETED, at=110.0, reward=0.5).result()
        (end,) = follower.poll()
        assert isinstance(end, RunEnded) and (end.reward, end.seconds) == (0.5, 10.0)
        assert follower.poll() == [] and follower.going == 0


def test_a_trainer_tells_of_calls_once_when_they_are_complete(tmp_path):
    from gyre_sdk.trainer.feed import CallFeed

    path, told = tmp_path / "store.db", queue.Queue()
    with Journal(path) as journal, Journal(path, "r") as reader:
        open_run(journal, "r1")
        record(journal, "r1", "before", [1], [2])
        feed = CallFeed(reader, told.put)
        begin_slow(journal)
        feed.start()
        record(journal, "r1", "fast", [1], [2])
        assert told.get(timeout=60).call == "fast"
        end_slow(journal)
        feed.stop()
        assert told.get_nowait().call == "slow" and told.empty()


def test_following_shows_the_steps_of_a_trainer(tmp_path):
    from gyre_sdk.events import StepSkipped, StepTaken, VersionPublished
    from gyre_sdk.trainer import ledger

    with Journal(tmp_path / "store.db") as journal:
        for number, item in enumerate(
            [
                ledger.GroupClosed("g1", ["r1", "r2"], [1.0, 0.0], 0),
                ledger.StepStarted(1),
                ledger.GroupTaken(1, "g1"),
                ledger.UnitSealed("u1", "g1", 2, 40),
                ledger.StepCommitted(1, ["u1"], {"loss": 0.25, "grad_norm": 1.5}),
                ledger.VersionPublished(1, "digest"),
                ledger.StepStarted(2, []),
                ledger.StepCommitted(2, [], {}),
            ]
        ):
            journal.append(ledger.STREAM, type(item).__name__, item, at=100.0 + number).result()
        step, version, skipped = Follower(journal).poll()
    assert isinstance(step, StepTaken) and isinstance(version, VersionPublished) and isinstance(skipped, StepSkipped)
    assert (step.loss, step.mean_reward, step.success, step.runs, step.trained_tokens) == (0.25, 0.5, 0.5, 2, 40)


def test_view_follows_until_interrupted(tmp_path):
    path = tmp_path / "store.db"
    with Journal(path) as journal:
        open_run(journal, "r1")
        watching = subprocess.Popen(
            [*GYRE, "view", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert watching.stdout is not None
            assert "run r1 of task started" in watching.stdout.readline()
            journal.end_run(RunId("r1"), RunStatus.COMPLETED, at=110.0, reward=0.5).result()
            assert "run r1 ended: completed, reward 0.50" in watching.stdout.readline()
        finally:
            watching.send_signal(2)
            _, error = watching.communicate(timeout=20)
    assert watching.returncode == 0 and error == ""


def test_doctor_names_what_is_missing(tmp_path):
    done = gyre("doctor", "--store", tmp_path / "to" / "be", env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert done.returncode == 0
    found = {line.split()[1]: line.split()[0] for line in done.stdout.splitlines()}
    machine = {"gyre", "python", "docker", "ports", "limits", "bwrap", "torch", "trl", "vllm", "ray", "disk"}
    assert set(found) == machine
    assert found["docker"] == "--" and "none.sock" in done.stdout


def test_no_engine_is_one_line(tmp_path):
    done = gyre("gc", env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "none.sock" in done.stderr


def test_sandboxes_are_listed_without_an_engine(tmp_path):
    done = gyre("sandbox", "list", env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
    assert done.returncode == 0 and "none.sock" in done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        [path.parent.name, "?"] for path in sorted((Path(__file__).parents[1] / "sandboxes").glob("*/Dockerfile"))
    ]


def test_serve_hands_its_options_to_the_proxy():
    done = gyre("serve", "--help")
    assert done.returncode == 0 and "--replica" in done.stdout
    done = gyre("serve", "--replica", "http://127.0.0.1:1")
    assert done.returncode == 2 and "--store" in done.stderr


def test_help_stays_quick_and_light():
    code = "import sys, gyre_sdk.cli.commands; print([name for name in ('torch', 'transformers', 'trl', 'vllm', 'ray', 'litellm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_empty_store_has_no_empty_tables(tmp_path):
    Journal(tmp_path / "store.db").close()
    said = {name: gyre(name, tmp_path / "store.db").stdout for name in ("runs", "calls", "samples")}
    assert said == {"runs": "no runs yet\n", "calls": "no calls yet\n", "samples": "0 trajectories\n"}


def test_one_of_a_thing_is_said_so(tmp_path):
    path = tmp_path / "store.db"
    with Journal(path) as journal:
        open_run(journal, "only", at=1_700_000_000.25)
        record(journal, "only", "a", [1], [2], at=1_700_000_001.25)
        journal.end_run(
            RunId("only"), RunStatus.WORKSPACE_ERROR, at=1_700_000_002, reward=0.0, placeholder=True
        ).result()
    assert "\n1 call\n" in gyre("calls", path).stdout
    samples = gyre("samples", path).stdout
    assert "\n1 trajectory\n" in samples and "run only, no group" in samples
    shown = gyre("calls", path, "a", env={"TZ": "UTC"}).stdout
    assert "received 2023-11-14 22:13:21.250+00:00, 1.000 s" in shown and "1 token, a root" in shown
    assert " placeholder " in gyre("runs", path).stdout and "reward placeholder" in gyre("tree", path, "only").stdout
    assert gyre("fsck", path).stderr.endswith(": 1 error\n"), "its answer is missing"


def test_runs_without_a_group_are_one_line_of_samples(tmp_path):
    path = tmp_path / "store.db"
    with Journal(path) as journal:
        for name in ("r1", "r2", "r3"):
            open_run(journal, name)
            record(journal, name, f"{name}-a", [1], [2, 3])
            record(journal, name, f"{name}-lost", [1], [7], deliver=False)
            journal.end_run(RunId(name), RunStatus.COMPLETED, at=110, reward=1.0).result()
    done = gyre("samples", path, "--groups").stdout
    (line,) = [line.split("  ") for line in done.splitlines() if "without a group" in line]
    assert [part.strip() for part in line if part.strip()] == [
        "3 runs without a group",
        "0",
        "0",
        "0/0",
        "3 call_orphan (3 tokens)",
    ]
    assert len(lines("samples", path, "--groups", "--json")) == 3


def test_a_sandbox_that_is_not_there_is_said_without_an_engine(tmp_path):
    for command in ("build", "test"):
        done = gyre("sandbox", command, "nope", env={"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
        assert done.returncode == 2 and "there is no sandbox 'nope'; sandboxes here: " in done.stderr


def test_an_interrupt_while_commands_load_is_quiet():
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'gyre_sdk.cli.store':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from gyre_sdk.cli import main\n"
        "assert 'typer' not in sys.modules\n"
        "main(['runs', 'store'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
