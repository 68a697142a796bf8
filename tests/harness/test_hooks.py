"""Hooks: told of everything once at its start and once at its end, able to refuse and to edit, loud when at fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from session_kit import a_task, ask, stored

import gyre_sdk as gyre
from gyre_sdk.errors import CommandFailed, HookError, ImageMissing, Vetoed
from gyre_sdk.harness.hooks import Outcome, RunHooks
from gyre_sdk.harness.hooks.payloads import DENIABLE, EDITABLE, PAYLOADS
from gyre_sdk.records import RunStatus

PAIRS = {
    "RunStart": "RunEnd",
    "SubagentStart": "SubagentStop",
    "PreCompact": "PostCompact",
    "PreToolUse": "PostToolUse",
}
PLACE = {"run": "r-1", "lane": "l-1", "parent": None, "role": "main", "name": "main", "depth": 0}


class Told:
    """Writes down what hooks are told."""

    def __init__(self) -> None:
        self.payloads: list[Any] = []
        self.hooks = gyre.Hooks(**dict.fromkeys(PAYLOADS, self.payloads.append))

    def of(self, event: str) -> list[Any]:
        return [payload for payload in self.payloads if type(payload).__name__ == event]

    def names(self) -> list[str]:
        return [type(payload).__name__ for payload in self.payloads]

    def assert_paired(self) -> None:
        for start, stop in PAIRS.items():
            assert len(self.of(start)) == len(self.of(stop)), self.names()


@pytest.fixture
def told() -> Told:
    return Told()


def open_session(service: gyre.ServiceClient, hooks: gyre.Hooks, **changes: Any) -> Any:
    return gyre.session(a_task(), service=service, workspace="local", hooks=hooks, **changes)


# -- who is told what ----------------------------------------------------------------------------------------------------


def test_every_payload_says_where(service: gyre.ServiceClient, told: Told, tmp_path: Path) -> None:
    with open_session(service, told.hooks, group="g", member=3) as agent:
        with agent.subagent("reviewer") as reviewer:
            reviewer.tools.run({"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "echo hi"}})
            reviewer.output = "fine"
            with reviewer.compaction([{"role": "user", "content": "x"}], trigger="manual") as summary:
                summary.output = "so far"
        agent.workspace.exec("echo yes > answer")
    assert told.names() == (
        [
            "RunStart",
            "SubagentStart",
            "PreToolUse",
            "PostToolUse",
            "PreCompact",
            "PostCompact",
            "SubagentStop",
            "PreToolUse",
            "PostToolUse",
            "RunEnd",
        ]
    )
    _, lanes, _ = stored(tmp_path)
    main, sub, compact = (lane.lane for lane in lanes)
    assert {payload.run for payload in told.payloads} == {agent.run}
    places = [(payload.lane, payload.parent, payload.depth, payload.name) for payload in told.payloads]
    at_main, at_sub = (main, None, 0, "main"), (sub, main, 1, "reviewer")
    assert places == [at_main, *[at_sub] * 6, *[at_main] * 3]
    start, end = told.of("RunStart")[0], told.of("RunEnd")[0]
    assert (start.task, start.instruction, start.group, start.member) == ("answer", "Write yes into answer", "g", 3)
    assert (end.status, end.reward, end.error) == (RunStatus.COMPLETED, 1.0, None)
    stop = told.of("SubagentStop")[0]
    assert (stop.outcome, stop.error, stop.output) == (Outcome.COMPLETED, None, "fine")
    before, after = told.of("PreCompact")[0], told.of("PostCompact")[0]
    assert (before.trigger, before.messages) == ("manual", [{"role": "user", "content": "x"}])
    assert (after.summary_lane, after.output, after.outcome) == (compact, "so far", Outcome.COMPLETED)
    (bash, exec_), (bash_done, exec_done) = told.of("PreToolUse"), told.of("PostToolUse")
    assert (bash.tool, bash.input, bash.call_id) == ("bash", {"command": "echo hi"}, "t1")
    assert (exec_.tool, exec_.input, exec_.call_id) == ("exec", {"cmd": "echo yes > answer"}, "")
    assert (bash_done.output, bash_done.is_error, bash_done.outcome) == ("hi", False, Outcome.COMPLETED)
    assert bash_done.result.stdout == "hi\n" and exec_done.result.exit_code == 0


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (ValueError("bug"), Outcome.FAILED),
        (KeyboardInterrupt(), Outcome.CANCELLED),
        (asyncio.CancelledError(), Outcome.CANCELLED),
        (SystemExit(1), Outcome.CANCELLED),
        (gyre.LimitExceeded("spent", limit="turns"), Outcome.LIMIT),
    ],
)
def test_an_error_in_a_block_stops_all_that_was_started(
    service: gyre.ServiceClient,
    told: Told,
    raised: BaseException,
    outcome: Outcome,
) -> None:
    with pytest.raises(type(raised)):
        with open_session(service, told.hooks) as agent:
            with agent.subagent() as lane, lane.compaction():
                raise raised
        raise raised  # a spent budget ends at the session's block
    told.assert_paired()
    assert told.names()[-3:] == ["PostCompact", "SubagentStop", "RunEnd"]
    assert [payload.outcome for payload in told.payloads[-3:-1]] == [outcome, outcome]
    assert told.of("SubagentStop")[0].error is raised


async def test_cancelling_a_task_stops_its_subagents_once(service: gyre.ServiceClient, told: Told) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with open_session(service, told.hooks) as agent, agent.subagent("bg") as lane:
            async with lane.compaction():
                inside.set()
                await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    told.assert_paired()
    assert [payload.outcome for payload in told.payloads[-3:-1]] == [Outcome.CANCELLED] * 2
    assert told.of("RunEnd")[0].status is RunStatus.CANCELLED


@pytest.mark.parametrize("moment", ["RunStart", "SubagentStart", "PreCompact", "SubagentStop"])
async def test_cancelling_while_a_hook_is_awaited_leaves_no_start_without_its_stop(
    service: gyre.ServiceClient,
    told: Told,
    moment: str,
    tmp_path: Path,
) -> None:
    inside = asyncio.Event()

    @told.hooks.on(moment)
    async def slow(payload: gyre.LaneInfo) -> None:
        inside.set()
        await asyncio.sleep(0.3 if moment == "SubagentStop" else 60)

    async def work() -> None:
        async with open_session(service, told.hooks) as agent, agent.subagent() as lane, lane.compaction():
            pass
        await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    told.assert_paired()
    assert stored(tmp_path)[0].status is RunStatus.CANCELLED


def test_subagents_still_at_work_in_the_background_are_stopped_before_the_run_ends(
    service: gyre.ServiceClient,
    told: Told,
) -> None:
    begun, release = threading.Event(), threading.Event()

    def background(agent: Any) -> None:
        with agent.subagent("left behind"):
            begun.set()
            release.wait(30)

    with open_session(service, told.hooks) as agent:
        thread = threading.Thread(target=background, args=(agent,))
        thread.start()
        begun.wait(30)
        never_left = agent.subagent("forgotten")
        never_left.__enter__()
    release.set()
    thread.join()
    assert told.names()[-3:] == ["SubagentStop", "SubagentStop", "RunEnd"]
    assert [(stop.name, stop.outcome) for stop in told.of("SubagentStop")] == [
        ("forgotten", Outcome.ABANDONED),
        ("left behind", Outcome.ABANDONED),
    ]
    told.assert_paired()


def test_a_run_whose_workspace_cannot_be_opened_has_an_end(
    service: gyre.ServiceClient,
    told: Told,
    docker_client: Any,
) -> None:
    task = a_task(image="local/does-not-exist:0")
    with pytest.raises(ImageMissing), gyre.session(task, service=service, workspace="docker", hooks=told.hooks):
        pass
    assert told.names() == ["RunStart", "RunEnd"]
    assert told.of("RunEnd")[0].status is RunStatus.WORKSPACE_ERROR


# -- what hooks may answer -----------------------------------------------------------------------------------------------


def test_a_denied_tool_does_not_run_and_its_reason_is_the_result(service: gyre.ServiceClient, told: Told) -> None:
    @told.hooks.on("PreToolUse", tool="bash|exec")
    def guard(use: gyre.PreToolUse) -> gyre.Deny:
        return gyre.Deny("not here")

    with open_session(service, told.hooks) as agent:
        call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "touch x"}'}}
        assert agent.tools.run(call) == {"role": "tool", "tool_call_id": "c1", "content": "not here"}
        done = agent.workspace.exec("touch x")
        assert (done.exit_code, done.stdout, done.stderr) == (126, "", "not here")
        write = {"type": "tool_use", "id": "t", "name": "write", "input": {"path": "y", "content": "1"}}
        assert "is_error" not in agent.tools.run(write)
        with pytest.raises(CommandFailed, match="not here"):
            agent.workspace.exec("touch x", check=True)
        assert agent.context.workspace.exec("ls").stdout == "y\n"
    assert [post.outcome for post in told.of("PostToolUse")] == (
        [Outcome.DENIED, Outcome.DENIED, Outcome.COMPLETED, Outcome.DENIED]
    )
    told.assert_paired()


def test_input_and_output_of_tools_are_edited_in_turn(service: gyre.ServiceClient) -> None:
    hooks = gyre.Hooks(
        PreToolUse=[
            lambda use: gyre.Edit(input={**use.input, "command": use.input["command"] + "; echo b"}),
            lambda use: gyre.Edit(input={**use.input, "command": use.input["command"] + "; echo c"}),
        ],
        PostToolUse=[
            lambda use: gyre.Edit(output=use.output.replace("a", "A")),
            lambda use: gyre.Edit(output=use.output + "!"),
        ],
    )
    with open_session(service, hooks) as agent:
        call = {"type": "function_call", "call_id": "f", "name": "bash", "arguments": '{"command": "echo a"}'}
        assert agent.tools.run(call)["output"] == "A\nb\nc!"


def test_edits_of_exec_and_of_a_history(service: gyre.ServiceClient) -> None:
    hooks = gyre.Hooks(
        PreToolUse=lambda use: gyre.Edit(input={"cmd": "echo edited", "timeout": 5.0}),
        PostToolUse=lambda use: gyre.Edit(output=use.output.upper()),
        PreCompact=lambda compact: gyre.Edit(messages=compact.messages[1:]),
    )
    with open_session(service, hooks) as agent:
        assert agent.workspace.exec("echo given", cwd="/").stdout == "EDITED\n"
        with agent.compaction([1, 2, 3]) as summary:
            assert summary.messages == [2, 3]


@pytest.mark.parametrize("event", ["SubagentStart", "PreCompact"])
def test_a_denied_lane_is_vetoed_and_the_agent_goes_on(
    service: gyre.ServiceClient,
    told: Told,
    event: str,
) -> None:
    told.hooks.on(event)(lambda payload: gyre.Deny("too deep"))
    with open_session(service, told.hooks) as agent:
        with pytest.raises(Vetoed, match=f"{event}.*too deep"):
            with agent.subagent("helper") if event == "SubagentStart" else agent.compaction():
                pytest.fail("its block ran")
        ask(agent.openai())  # the main lane's key is its own again
    told.assert_paired()
    (stop,) = told.of(PAIRS[event])
    assert stop.outcome is Outcome.DENIED
    assert agent.result.status is RunStatus.COMPLETED


def test_a_denied_run_is_cancelled_before_it_has_a_workspace(
    service: gyre.ServiceClient,
    told: Told,
    tmp_path: Path,
) -> None:
    told.hooks.on(gyre.RunStart)(lambda start: gyre.Deny("enough for today"))
    with pytest.raises(Vetoed, match="enough for today"), open_session(service, told.hooks):
        pytest.fail("its block ran")
    run, _, _ = stored(tmp_path)
    assert run.status is RunStatus.CANCELLED and "enough for today" in (run.error or "")
    assert told.names() == ["RunStart", "RunEnd"]


# -- hooks at fault ------------------------------------------------------------------------------------------------------


def broken(payload: gyre.LaneInfo) -> None:
    raise ZeroDivisionError("in a hook")


@pytest.mark.parametrize("event", [event for event in PAYLOADS if event not in ("RunStart", "RunEnd")])
def test_a_hook_that_raises_is_named_and_fails_the_block(
    service: gyre.ServiceClient,
    told: Told,
    tmp_path: Path,
    event: str,
) -> None:
    told.hooks.on(event)(broken)
    with pytest.raises(
        HookError, match=rf"hook {event} broken .*test_hooks\.py.*ZeroDivisionError: in a hook"
    ) as caught:
        with open_session(service, told.hooks) as agent, agent.subagent() as lane, lane.compaction():
            agent.workspace.exec("true")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert stored(tmp_path)[0].status is RunStatus.AGENT_ERROR
    told.assert_paired()


@pytest.mark.parametrize(("event", "status"), [("RunStart", RunStatus.CANCELLED), ("RunEnd", RunStatus.COMPLETED)])
def test_a_broken_hook_of_the_run_is_loud_once_the_run_is_on_record(
    service: gyre.ServiceClient,
    told: Told,
    tmp_path: Path,
    event: str,
    status: RunStatus,
) -> None:
    told.hooks.on(event)(broken)
    with pytest.raises(HookError, match=f"hook {event} broken"), open_session(service, told.hooks):
        pass
    assert stored(tmp_path)[0].status is status
    told.assert_paired()


def test_a_broken_stop_hook_never_hides_a_cancellation(service: gyre.ServiceClient) -> None:
    stops: list[str] = []
    hooks = gyre.Hooks(SubagentStop=[broken, lambda stop: stops.append(stop.name)], RunEnd=broken)
    with pytest.raises(KeyboardInterrupt) as caught, open_session(service, hooks) as agent, agent.subagent("s"):
        raise KeyboardInterrupt
    assert stops == ["s"]
    assert [note.split(" broken")[0] for note in caught.value.__notes__] == ["hook SubagentStop", "hook RunEnd"]


def fire(hooks: gyre.Hooks, event: str, **fields: Any) -> Any:
    blank = {"tool": "bash", "input": {}, "call_id": "", "trigger": "auto", "messages": [], "task": "t"}
    blank |= {"instruction": "", "group": None, "member": 0, "output": "", "is_error": False, "error": None}
    blank |= {"outcome": Outcome.COMPLETED, "result": None, "duration_s": 0.0, "summary_lane": "", "reward": None}
    blank |= {"status": RunStatus.COMPLETED, "seconds": 0.0, **fields}
    kind = PAYLOADS[event]
    wanted = set(kind.__struct_fields__)
    return RunHooks(hooks).fire(kind(**PLACE, **{name: value for name, value in blank.items() if name in wanted}))


@pytest.mark.parametrize("event", PAYLOADS)
@pytest.mark.parametrize(
    "answer",
    [gyre.Deny("no"), *[gyre.Edit(**{f: v}) for f, v in {"input": {}, "output": "x", "messages": [1]}.items()]],
)
def test_an_answer_is_taken_where_the_event_can_take_it_and_refused_by_name_elsewhere(event: str, answer: Any) -> None:
    hooks = gyre.Hooks(**{event: lambda payload: answer})
    if isinstance(answer, gyre.Deny):
        fits = event in DENIABLE
    else:
        fits = getattr(answer, EDITABLE.get(event, ""), None) is not None
    if not fits:
        with pytest.raises(HookError, match=f"hook {event} .*answered"):
            fire(hooks, event)
    else:
        payload, denied = fire(hooks, event)
        assert denied == answer if isinstance(answer, gyre.Deny) else denied is None
        if isinstance(answer, gyre.Edit):
            assert getattr(payload, EDITABLE[event]) == getattr(answer, EDITABLE[event])


@pytest.mark.parametrize("answer", [True, "no", gyre.Edit(), gyre.Edit(input={}, output="x")])
def test_answers_that_are_none_are_refused(answer: Any) -> None:
    with pytest.raises(HookError, match=r"may answer None or Deny\(reason\) or Edit\(input=\.\.\.\)"):
        fire(gyre.Hooks(PreToolUse=lambda use: answer), "PreToolUse")


def test_the_first_refusal_is_the_last_hook_called_but_stops_reach_all() -> None:
    called: list[int] = []
    hooks = gyre.Hooks(
        PreToolUse=[lambda _: gyre.Deny("first"), lambda _: called.append(1)],
        PostToolUse=[broken, lambda _: called.append(2), broken],
    )
    assert fire(hooks, "PreToolUse")[1] == gyre.Deny("first")
    with pytest.raises(HookError) as caught:
        fire(hooks, "PostToolUse")
    assert called == [2] and len(caught.value.__notes__) == 1


def test_wrong_names_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no hook 'PreToolUsed'; there are RunStart"):
        gyre.Hooks(PreToolUsed=print)
    with pytest.raises(TypeError, match="not about a tool"):
        gyre.Hooks().on("RunStart", tool="bash")


# -- sync and async ------------------------------------------------------------------------------------------------------


def test_async_hooks_of_sync_code_run_to_their_end_and_may_answer(service: gyre.ServiceClient) -> None:
    loops: set[int] = set()

    async def deny(use: gyre.PreToolUse) -> gyre.Deny:
        await asyncio.sleep(0.01)
        loops.add(id(asyncio.get_running_loop()))
        return gyre.Deny("later")

    async def nested(stop: gyre.SubagentStop) -> None:
        fire(gyre.Hooks(PreToolUse=deny), "PreToolUse")  # sync code in an async hook, with an async hook of its own

    with open_session(service, gyre.Hooks(PreToolUse=deny, SubagentStop=nested)) as agent:
        assert agent.workspace.exec("true").stderr == "later"
        with agent.subagent():
            pass
    assert len(loops) == 2


async def test_async_hooks_of_async_code_run_on_its_loop(service: gyre.ServiceClient) -> None:
    here, loops = asyncio.get_running_loop(), []

    async def note(payload: gyre.LaneInfo) -> None:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())

    events: dict[str, Callable[..., Any]] = dict.fromkeys(PAYLOADS, note)
    async with open_session(service, gyre.Hooks(**events)) as agent:
        async with agent.subagent() as lane, lane.compaction():
            call = {"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "echo hi"}}
            assert (await lane.tools.arun(call))["content"] == "hi"
    assert loops == [here] * len(PAYLOADS)


def test_hooks_added_while_a_session_runs_are_for_the_next(service: gyre.ServiceClient) -> None:
    hooks, called = gyre.Hooks(), []
    for expected in ([], ["exec"]):
        with open_session(service, hooks) as agent:
            hooks.on("PreToolUse")(lambda use: called.append(use.tool)) if not expected else None
            agent.workspace.exec("true")
        assert called == expected


def test_an_observer_that_fails_never_fails_a_run(service: gyre.ServiceClient, told: Told) -> None:
    def observer(event: Any) -> None:
        raise ZeroDivisionError

    with open_session(service, told.hooks, observer=observer) as agent:
        agent.workspace.exec("true")
    assert agent.result.status is RunStatus.COMPLETED
    told.assert_paired()
