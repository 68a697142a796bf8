"""`gyre run --host`: any program on this machine as the agent, with nothing but variables."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_kit import running
from run_kit import Service, lines_of, python, task_folder

from gyre_sdk.cli import main
from gyre_sdk.errors import SettingsError
from gyre_sdk.harness.launch.outlet import Outlet
from gyre_sdk.harness.launch.presets import PRESETS, Access, command_line, preset_of
from gyre_sdk.harness.launch.resume import members_left, orphans, owner_alive
from gyre_sdk.records import RunId, RunRecord, RunStatus

AGENT = """
import os, sys, anthropic, openai
question = [{"role": "user", "content": os.environ["GYRE_INSTRUCTION"]}]
print("said", repr(openai.OpenAI().chat.completions.create(model=os.environ["GYRE_MODEL"], messages=question).id)[:3])
anthropic.Anthropic().messages.create(model="policy", max_tokens=8, messages=question)
print("in", os.environ["GYRE_TASK"], open(os.environ["GYRE_INSTRUCTION_FILE"]).read().strip(), file=sys.stderr)
print("keys of gyre's:", [name for name in ("GYRE_SERVICE_KEY", "GYRE_REPLICA_TOKEN") if name in os.environ])
"""


SMALL = """
import json, os, sys, urllib.request
asked = {"model": "policy", "messages": [{"role": "user", "content": "Run ls"}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(asked).encode())
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
request.add_header("Content-Type", "application/json")
print("said", json.load(urllib.request.urlopen(request))["object"])
sys.exit(int(os.environ.get("CODE", "0")))
"""
"""As an SDK does, without the time that one takes to load."""


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory, engine: Any) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("store") / "s.db"
    with running(model, store, engine.url) as proxy:
        yield Service(proxy.url, proxy.service_key, store)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_folder(tmp_path_factory.mktemp("task") / "answer")


def host(*more: str) -> list[str]:
    return ["--host", "--workspace", "local", *more]


def test_a_program_gets_the_model_the_instruction_and_its_output_is_shown(
    serving: Service, task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYRE_REPLICA_TOKEN", "of replicas")
    process = serving.start(task, *host(), *python(AGENT))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    shown = out.splitlines()
    assert shown[:3] == ["said 'ch", "in test/answer Write yes into the file answer.", "keys of gyre's: []"]
    run = serving.runs()[-1]
    assert shown[3].startswith(f"run {run.run} completed, reward 0.25, exit code 0, 2 calls, ")
    assert (run.status, run.reward, run.task) == (RunStatus.COMPLETED, 0.25, "test/answer")
    assert (run.metadata["agent"], run.metadata["split"], run.metadata["classifier"]) == ("generic", "run", "auto")


def test_many_runs_are_one_group_and_an_exit_code_is_the_agents_own_error(serving: Service, task: Path) -> None:
    more = host("-n", "3", "--json", "--env", "CODE=3", "--group", "g-three")
    process = serving.start(task, *more, *python(SMALL))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    lines = sorted(lines_of(out), key=lambda line: line["member"])
    assert [(line["status"], line["reward"], line["exit_code"], line["calls"]) for line in lines] == (
        [("agent_error", 0.25, 3, 1)] * 3
    )
    assert sorted(line for line in err.splitlines() if "said" in line) == [
        f"[{n}] said chat.completion" for n in range(3)
    ]
    runs = [run for run in serving.runs() if run.group == "g-three"]
    assert sorted(run.member for run in runs) == [0, 1, 2]
    assert {run.run for run in runs} == {line["run"] for line in lines}
    # what stands is not made again; a run that was cancelled or whose process is gone is
    process = serving.start(task, *host("-n", "4", "--group", "g-three", "--resume", "--json"), *python(SMALL))
    out, err = process.communicate(timeout=120)
    assert "3 of 4 runs done, 1 left" in err
    assert [line["member"] for line in lines_of(out)] == [3]


CHILDREN = """
import subprocess, sys, time
subprocess.Popen(["sleep", "612345"])
print("begun", flush=True)
time.sleep(600)
"""


def _sleeping() -> bool:
    return subprocess.run(["pgrep", "-f", "sleep 612345"], capture_output=True).returncode == 0


def test_the_wall_time_ends_the_program_and_what_it_started(serving: Service, task: Path) -> None:
    process = serving.start(task, *host("--timeout", "1.5", "--json"), *python(CHILDREN))
    out, err = process.communicate(timeout=120)
    (line,) = lines_of(out)
    assert (process.returncode, line["status"], line["reward"], line["exit_code"]) == (1, "timed_out", 0.25, None)
    assert "begun" in err and not _sleeping()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_runs_as_cancelled(serving: Service, task: Path, number: int, status: int) -> None:
    process = serving.start(task, *host("-n", "3", "-j", "2", "--json"), *python(CHILDREN))
    assert process.stderr is not None
    while "begun" not in process.stderr.readline():
        pass
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert [(line["status"], line["reward"]) for line in lines_of(out)] == [("cancelled", None)] * 2
    assert "ending 2 runs, 1 not started" in err and "all runs are on record" in err
    assert not _sleeping()
    assert not [run for run in serving.runs() if run.status is RunStatus.RUNNING]


def test_a_background_child_that_holds_the_output_is_not_waited_for(serving: Service, task: Path) -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '612345']); print('done')"
    process = serving.start(task, *host("--json"), *python(code))
    out, err = process.communicate(timeout=60)
    assert (lines_of(out)[0]["exit_code"], err, _sleeping()) == (0, "done\n", False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agent", "bash"], "--agent 'bash' is not known; give one of claude-code, codex, mini-swe-agent, generic"),
        ([], "there is no command to run; give one after --"),
        (["--", "/no/such/program"], "'/no/such/program' cannot be run here: there is no such program"),
        (["--inside", "--", "true"], "no agent can be put into a local workspace; use --workspace docker, or --host"),
        (["--env", "X", "--", "true"], "--env 'X' must be NAME=VALUE"),
        (["--resume", "--", "true"], "--resume needs --group"),
        (["--turns", "0", "--", "true"], "limits: turns = 0; give a number above 0"),
        (["--model", "x", "--", "true"], "give either --service URL"),
        (["--workspace", "cloud", "--", "true"], "--workspace 'cloud' is not known"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    task: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(task), "--service", "http://127.0.0.1:9", *host(), *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err


# -- presets -------------------------------------------------------------------------------------------------------------

ACCESS = Access("http://127.0.0.1:8111/v1", "key", "policy", "/home/x")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["claude", "-p", "hi"], "claude-code"),
        (["/usr/local/bin/codex", "exec"], "codex"),
        (["mini"], "mini-swe-agent"),
        (["python", "claude.py"], "generic"),
    ],
)
def test_a_program_is_known_by_its_name(command: list[str], name: str) -> None:
    assert preset_of(None, command).name == name
    assert preset_of("generic", command).name == "generic"


@pytest.mark.parametrize("name", ["claude-code", "codex", "mini-swe-agent"])
@pytest.mark.parametrize("instruction", ["do it", "-p looks like an option", "--"])
def test_a_presets_own_command_takes_any_instruction_and_further_arguments(name: str, instruction: str) -> None:
    line = command_line(PRESETS[name], ACCESS, instruction, ("--max-turns", "3"))
    assert line[0] in PRESETS[name].programs
    assert line[-1] in (instruction, f"--task={instruction}")
    assert line.index("--max-turns") < len(line) - 1


def test_a_command_of_ones_own_is_run_as_it_is() -> None:
    assert command_line(PRESETS["generic"], ACCESS, "do it", ("sh", "-c", "{instruction} {x}")) == [
        "sh",
        "-c",
        "do it {x}",
    ]
    with pytest.raises(SettingsError, match="there is no command to run"):
        command_line(PRESETS["generic"], ACCESS, "do it", ())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_leads_its_program_to_the_proxy_and_nowhere_else(name: str) -> None:
    preset = PRESETS[name]
    told = [*preset.variables(ACCESS).values(), *preset.files(ACCESS).values()]
    assert any("http://127.0.0.1:8111" in text for text in told)
    assert "key" in told
    assert not set(preset.unset) & set(preset.variables(ACCESS))


# -- pure parts ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(1, 5))
def test_output_is_shown_whole_whatever_pieces_it_comes_in(pieces: list[bytes], cut: int) -> None:
    whole = b"\n".join(pieces)
    plain, labelled = [], []
    for show, label in ((plain, False), (labelled, True)):
        stream = Outlet(show.append, labelled=label).of("7")
        for at in range(0, len(whole), cut):
            stream(whole[at : at + cut])
        stream.close()
    assert b"".join(plain) == whole
    expected = [b"[7] " + line + b"\n" for line in whole.split(b"\n")]
    assert b"".join(labelled) == b"".join(expected[:-1] if not whole or whole.endswith(b"\n") else expected)


def record(member: int, status: RunStatus, owner: str = "") -> RunRecord:
    return RunRecord(RunId(f"r-{member}-{status}"), "t", 0.0, member=member, status=status, owner=owner)


def test_runs_that_stand_are_not_made_again() -> None:
    states = list(RunStatus)
    runs = [record(member, status) for member, status in enumerate(states)]
    left = {states[member] for member in members_left(runs, len(states))}
    assert left == {RunStatus.CANCELLED}
    assert members_left([record(0, RunStatus.CANCELLED), record(0, RunStatus.COMPLETED)], 2) == [1]


def test_open_runs_of_dead_processes_are_orphans() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = socket.gethostname()
    owners = [f"{here}:{os.getpid()}:1.0", f"{here}:{dead.pid}:1.0", "elsewhere:1:1.0", ""]
    assert [owner_alive(owner) for owner in owners] == [True, False, True, True]
    runs = [record(n, RunStatus.RUNNING, owner) for n, owner in enumerate(owners)]
    runs.append(record(9, RunStatus.COMPLETED, owners[1]))
    assert [run.member for run in orphans(runs, owner_alive)] == [1]
