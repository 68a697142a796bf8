"""`gyre run` with the real programs inside workspaces without a network: their tools act there, the model is the only thing
they reach. What they do with a model that says nothing of use is in `test_programs_embedded`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents_image import build_agents_image
from proxy_engine import ScriptedEngine
from proxy_kit import running
from run_kit import Service, lines_of, start, task_folder
from tokenizers import Tokenizer
from tools_image import build_tools_image

from clients.plays import Prompt, play
from clients.scripted_provider import Reply
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallStatus, RunStatus

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]
PROGRAMS = ("claude-code", "codex", "mini-swe-agent")
TOOLS = {"claude-code": "Bash", "codex": "exec_command", "mini-swe-agent": "bash"}
LOOK = "echo yes > answer; echo INTERFACES $(tail -n +3 /proc/net/dev | wc -l) USER $(id -u) KEYS $(env | grep -c 'gy-[A-Za-z0-9_-]\\{20,\\}')"
"""Does the task, and shows what there is of a network, who runs, and whether the environment holds a key."""


@pytest.fixture(scope="module")
def image(docker_client: Any, base_image: str) -> str:
    """The image with all programs; made in about half a minute."""
    return build_agents_image(docker_client, build_tools_image(docker_client))


@pytest.fixture(scope="module")
def task(image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return task_folder(tmp_path_factory.mktemp("task") / "answer", image=image)


def does_the_task(prompt: Prompt) -> Reply:
    """Use the program's own shell tool once, then say that it is done."""
    program = next(name for name, tool in TOOLS.items() if f'"{tool}"' in prompt.system or name == "mini-swe-agent")
    if "<tool_call>" not in prompt.system:
        return Reply(json.dumps({"title": "Answer"}))
    if prompt.said:
        last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        return Reply("Done.", (("bash", {"command": last}),) if program == "mini-swe-agent" else ())
    name = "cmd" if program == "codex" else "command"
    more = {"description": "look"} if program == "claude-code" else {}
    return Reply("I look.", ((TOOLS[program], {name: LOOK, **more}),))


@pytest.fixture(scope="module")
def scripted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    store = tmp_path_factory.mktemp("store") / "s.db"
    with ScriptedEngine(play(does_the_task, model)) as engine, running(model, store, engine.url) as proxy:
        yield Service(proxy.url, proxy.service_key, store)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_does_the_task_in_the_workspace(program: str, scripted: Service, task: Path, model: Path) -> None:
    process = scripted.start(task, "--agent", program, "--json")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    (line,) = lines_of(out)
    assert (line["status"], line["reward"], line["exit_code"]) == ("completed", 1.0, 0), err
    assert "Done." in err
    with Journal(scripted.store, "r") as journal:
        run = journal.run(line["run"])
        calls = sorted(journal.calls(line["run"]), key=lambda call: call.received_at)
    assert run is not None and run.metadata["agent"] == run.metadata["classifier"] == program
    assert {call.status for call in calls} == {CallStatus.DELIVERED}
    text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(calls[-1].prompt_ids, skip_special_tokens=False)
    shown = "\n".join(said for said in Prompt.of(text).users if "<tool_response>" in said)
    assert "INTERFACES 1 USER 1000 KEYS 0" in shown, shown


def test_without_a_service_it_starts_one(weights: Path, base_image: str, tmp_path: Path) -> None:
    """`--model local:PATH`, a shell as the agent, its only tool wget; two runs, one group."""
    task = task_folder(tmp_path / "task")
    ask = (
        'cat; echo yes > answer; wget -q -O- --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json"'
        """ --post-data '{"model": "x", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}'"""
        " $OPENAI_BASE_URL/chat/completions; echo; echo $GYRE_RUN"
    )
    store = tmp_path / "runs"
    given = ["-n", "2", "--model", f"local:{weights}", "--store", str(store), "--", "sh", "-c", ask]
    process = start(task, *given)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    with Journal(store / "gyre.db", "r") as journal:
        runs = journal.runs()
    shown = out.splitlines()
    for run in runs:
        assert f"[{run.member}] {run.run}" in shown
        assert any(text.startswith(f"run {run.run} completed, reward 1, exit code 0, 1 call,") for text in shown), out
    assert len([text for text in shown if '"object":"chat.completion"' in text]) == 2
    assert shown[-1] == f"group {runs[0].group}: 2 of 2 scored now, mean reward 1"
    assert {run.status for run in runs} == {RunStatus.COMPLETED}
