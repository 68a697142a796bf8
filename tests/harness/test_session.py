"""Sessions: one record, one terminal state, whatever happens in the block. Real proxy, real store, real workspace."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait
from session_kit import QUESTION, a_task, ask, stored

import gyre_sdk as gyre
from gyre_sdk.errors import (
    ImageMissing,
    ScoringError,
    ServiceError,
    SettingsError,
    WorkspaceError,
    WorkspaceUnavailable,
)
from gyre_sdk.events import Event, LaneOpened, RunEnded, RunStarted, ToolRan
from gyre_sdk.harness.agent import Lane
from gyre_sdk.harness.limits import classify
from gyre_sdk.harness.proxy.routing import ReplicaSpec
from gyre_sdk.harness.scoring import POLICY
from gyre_sdk.records import End, RunStatus, Score


def test_block_that_ends_is_scored_and_completed(service: gyre.ServiceClient, tmp_path: Path) -> None:
    seen: list[Event] = []
    with gyre.session(
        a_task(), service=service, workspace="local", observer=seen.append, group="g1", member=2
    ) as agent:
        ask(agent.openai())
        ask(openai.OpenAI(base_url=agent.base_url, api_key=agent.api_key))
        assert agent.workspace.exec("echo yes > answer").exit_code == 0
        with pytest.raises(RuntimeError, match="once the session"):
            agent.result
    assert (agent.result.status, agent.result.reward) == (RunStatus.COMPLETED, 1.0)
    assert (agent.result.calls, agent.result.sampled_tokens) == (2, 6)
    run, lanes, calls = stored(tmp_path)
    assert (run.status, run.reward, run.group, run.member, run.dispatch_version) == (
        RunStatus.COMPLETED,
        1.0,
        "g1",
        2,
        3,
    )
    assert [lane.role for lane in lanes] == ["main"] and [call.role for call in calls] == ["main", "main"]
    assert [type(event) for event in seen if isinstance(event, RunStarted | RunEnded | ToolRan)] == [
        RunStarted,
        ToolRan,
        RunEnded,
    ]


def test_lanes_of_subagents_and_summaries(service: gyre.ServiceClient, tmp_path: Path) -> None:
    infos: list[tuple[str, str, int]] = []
    hooks = gyre.Hooks()

    @hooks.on("SubagentStart", "SubagentStop", "PreCompact", "PostCompact")
    def note(told: gyre.LaneInfo) -> None:
        infos.append((type(told).__name__, told.name, told.depth))

    seen: list[Event] = []
    with gyre.session(a_task(), service=service, workspace="local", hooks=hooks, observer=seen.append) as agent:
        fixed = openai.OpenAI(base_url=agent.base_url, api_key=agent.api_key)
        ask(fixed)
        with agent.subagent("reviewer") as reviewer:
            ask(reviewer.openai())
            with reviewer.compaction() as summary:
                ask(summary.openai())
        with agent.compaction():
            ask(fixed)  # the main lane's own key counts as the summary's inside the block
        ask(fixed)
    _run, lanes, calls = stored(tmp_path)
    assert [call.role for call in calls] == ["main", "subagent", "subagent-summary", "main-summary", "main"]
    by_id = {lane.lane: lane for lane in lanes}
    reviewer_summary = next(lane for lane in lanes if lane.role == "subagent-summary")
    assert by_id[reviewer_summary.parent].name == "reviewer"  # type: ignore[index]
    assert infos == [
        ("SubagentStart", "reviewer", 1),
        ("PreCompact", "reviewer", 1),
        ("PostCompact", "reviewer", 1),
        ("SubagentStop", "reviewer", 1),
        ("PreCompact", "main", 0),
        ("PostCompact", "main", 0),
    ]
    assert len([event for event in seen if isinstance(event, LaneOpened)]) == 3


@pytest.mark.parametrize(
    ("raised", "status", "reward", "propagates"),
    [
        (ValueError("agent bug"), RunStatus.AGENT_ERROR, 0.0, True),
        (KeyboardInterrupt(), RunStatus.CANCELLED, None, True),
        (SystemExit(3), RunStatus.CANCELLED, None, True),
        (gyre.session, RunStatus.COMPLETED, 0.0, False),
        (WorkspaceUnavailable("container died"), RunStatus.WORKSPACE_ERROR, None, True),
    ],
)
def test_every_way_out_has_one_terminal_state(
    service: gyre.ServiceClient, tmp_path: Path, raised: Any, status: RunStatus, reward: float | None, propagates: bool
) -> None:
    def block() -> None:
        with gyre.session(a_task(), service=service, workspace="local"):
            if isinstance(raised, BaseException):
                raise raised

    if propagates:
        with pytest.raises(type(raised)):
            block()
    else:
        block()
    run, _, _ = stored(tmp_path)
    assert (run.status, run.reward) == (status, reward)
    assert (run.error is None) == (status is RunStatus.COMPLETED)


def test_scorer_failure_is_not_a_reward(service: gyre.ServiceClient, tmp_path: Path) -> None:
    def broken(workspace: Any) -> float:
        raise OSError("disk on fire")

    with gyre.session(a_task(scorer=broken), service=service, workspace="local") as agent:
        pass
    assert (agent.result.status, agent.result.reward) == (RunStatus.SCORER_ERROR, None)
    assert "disk on fire" in (stored(tmp_path)[0].error or "")


def test_wall_time_ends_a_run_as_timed_out_and_scores_it(service: gyre.ServiceClient, tmp_path: Path) -> None:
    with gyre.session(a_task(), service=service, workspace="local", limits=gyre.Limits(wall_s=1.0)) as agent:
        agent.workspace.exec("echo yes > answer")
        done = agent.workspace.exec("sleep 30")
        pytest.fail(f"went on after its time: {done}")
    assert (agent.result.status, agent.result.reward) == (RunStatus.TIMED_OUT, 1.0)


def test_turn_limit_of_the_proxy_ends_a_run_as_limit(service: gyre.ServiceClient, tmp_path: Path) -> None:
    with gyre.session(a_task(), service=service, workspace="local", limits=gyre.Limits(turns=2)) as agent:
        for _ in range(5):
            ask(agent.openai())
    assert agent.result.status is RunStatus.LIMIT
    assert len(stored(tmp_path)[2]) == 2


def test_missing_image_is_a_placeholder_not_a_score(
    service: gyre.ServiceClient, tmp_path: Path, base_image: str
) -> None:
    with pytest.raises(ImageMissing, match="local/does-not-exist:0"):
        with gyre.session(a_task(image="local/does-not-exist:0"), service=service, workspace="docker"):
            pass
    run, _, calls = stored(tmp_path)
    assert (run.status, run.reward, run.placeholder, calls) == (RunStatus.WORKSPACE_ERROR, 0.0, True, [])


def test_a_lane_forks_and_snapshots_its_container(
    service: gyre.ServiceClient, base_image: str, docker_client: Any
) -> None:
    with gyre.session(a_task(), service=service) as agent:
        agent.workspace.write("answer", "yes")
        forked = agent.workspace.fork()
        try:
            assert forked.read("answer") == b"yes"
        finally:
            forked.close()
        snapshot = agent.workspace.snapshot()
        docker_client.images.remove(snapshot)
    assert agent.result.reward == 1.0
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with pytest.raises(WorkspaceError, match=r"has no snapshot\(\); open the session with workspace='docker'"):
            agent.workspace.snapshot()


def test_own_score_wins_and_is_asked_once(service: gyre.ServiceClient) -> None:
    asked: list[int] = []
    task = a_task(scorer=lambda workspace: asked.append(1) or 0.25)
    with gyre.session(task, service=service, workspace="local") as agent:
        assert agent.score().reward == 0.25
    assert agent.result.reward == 0.25 and asked == [1]
    with gyre.session(task, service=service, workspace="local") as agent:
        agent.score(Score(0.5, {"style": 1.0}))
    assert agent.result.reward == 0.5 and agent.result.parts == {"style": 1.0}
    with gyre.session(task, service=service, workspace="local") as agent:
        for value in (math.nan, math.inf, Score(0.5, {"style": math.nan})):
            with pytest.raises(ScoringError, match="give a finite number"):
                agent.score(value)
    assert agent.result.reward == 0.25 and asked == [1, 1]


def test_a_task_that_nothing_scores_is_recorded_all_the_same(service: gyre.ServiceClient, tmp_path: Path) -> None:
    with gyre.session(gyre.Task(instruction="Look around"), service=service, workspace="local") as agent:
        ask(agent.openai())
        with pytest.raises(ScoringError, match="neither tests nor a scorer"):
            agent.score()
    assert (agent.result.status, agent.result.reward, agent.result.error) == (RunStatus.COMPLETED, None, None)
    run, _, calls = stored(tmp_path)
    assert (run.status, run.reward, run.error, len(calls)) == (RunStatus.COMPLETED, None, None, 1)


def test_observer_that_raises_is_dropped(service: gyre.ServiceClient) -> None:
    def observer(event: Event) -> None:
        raise ZeroDivisionError

    with gyre.session(a_task(), service=service, workspace="local", observer=observer) as agent:
        agent.workspace.exec("true")
    assert agent.result.status is RunStatus.COMPLETED


def test_key_of_an_ended_run_opens_nothing(service: gyre.ServiceClient, tmp_path: Path) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        client = openai.OpenAI(base_url=agent.base_url, api_key=agent.api_key, max_retries=0)
    with pytest.raises(openai.APIStatusError):
        ask(client)
    assert stored(tmp_path)[2] == []


def test_async_session_and_cancellation(service: gyre.ServiceClient, tmp_path: Path) -> None:
    called = asyncio.Event()

    async def work() -> None:
        async with gyre.session(a_task(), service=service, workspace="local") as agent:
            async with agent.async_openai() as client:
                await client.chat.completions.create(model="policy", messages=QUESTION)  # type: ignore[arg-type]
            called.set()
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(work())
        async with asyncio.timeout(60):
            await called.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    run, _, calls = stored(tmp_path)
    assert run.status is RunStatus.CANCELLED and len(calls) == 1


def test_a_lane_gives_anthropics_clients(service: gyre.ServiceClient, tmp_path: Path) -> None:
    """`anthropic()` and `async_anthropic()` speak as their lane, and options reach the SDK."""

    async def say(lane: Lane) -> str:
        async with lane.async_anthropic(max_retries=0) as client:
            answer = await client.messages.create(model="policy", max_tokens=8, messages=QUESTION)  # type: ignore[arg-type]
            return answer.content[0].text  # type: ignore[union-attr]

    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with agent.anthropic() as client:
            message = client.messages.create(model="policy", max_tokens=8, messages=QUESTION)  # type: ignore[arg-type]
        with agent.subagent("reviewer") as reviewer:
            assert asyncio.run(say(reviewer)) == message.content[0].text  # type: ignore[union-attr]
        assert agent.anthropic(max_retries=7).max_retries == 7
    _, lanes, calls = stored(tmp_path)
    assert [(call.role, call.sampled_ids) for call in calls] == [("main", [40, 41, 2]), ("subagent", [40, 41, 2])]
    assert [call.lane for call in calls] == [lane.lane for lane in lanes]


def test_anthropics_clients_need_their_package(service: gyre.ServiceClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        monkeypatch.setitem(sys.modules, "anthropic", None)
        with pytest.raises(SettingsError, match="pip install anthropic"):
            agent.anthropic()
        with pytest.raises(SettingsError, match="pip install anthropic"):
            agent.async_anthropic()


CHILD = """
import anthropic, openai
question = [{"role": "user", "content": "Run ls"}]
openai.OpenAI().chat.completions.create(model="policy", messages=question)
anthropic.Anthropic().messages.create(model="policy", max_tokens=8, messages=question)
"""


def test_environment_gives_a_child_process_the_lane(service: gyre.ServiceClient, tmp_path: Path) -> None:
    """A child that knows nothing of gyre reaches its lane by the variables of the SDKs alone."""
    with gyre.session(a_task(), service=service, workspace="local") as agent:
        with agent.subagent("child") as child:
            done = subprocess.run(
                [sys.executable, "-c", CHILD], env=os.environ | child.environment, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stderr
        assert child.environment != agent.environment
    assert [call.role for call in stored(tmp_path)[2]] == ["subagent", "subagent"]


def test_call_in_flight_when_the_block_ends_is_waited_for(model: Path, tmp_path: Path) -> None:
    release = threading.Event()
    with ScriptedEngine(lambda request, number: [Tokens([40]), Wait(release), Tokens([2]), Finish()]) as engine:
        settings = gyre.ProxySettings(store=tmp_path / "s.db", model=model, replicas=(ReplicaSpec(engine.url, 0),))
        with gyre.serve(settings) as service:
            with gyre.session(a_task(), service=service, workspace="local") as agent:
                thread = threading.Thread(target=ask, args=(agent.openai(),))
                thread.start()
                while not engine.log:
                    pass
                threading.Timer(0.5, release.set).start()
            thread.join()
    assert agent.result.sampled_tokens == 2


def test_no_service_is_a_clear_error() -> None:
    with pytest.raises(SettingsError, match="gyre serve"), gyre.session(a_task(), workspace="local"):
        pass
    with pytest.raises(ServiceError, match=r"127\.0\.0\.1:9.*gyre serve"):
        with gyre.session(
            a_task(),
            service=gyre.ServiceClient("http://127.0.0.1:9", "k", patience=3600.0, arrival=0.1),
            workspace="local",
        ):
            pass


@pytest.mark.parametrize(
    ("body", "content"), [(b"<html>Welcome</html>", "text/html"), (b'{"detail":"Not Found"}', "application/json")]
)
@pytest.mark.parametrize("status", [200, 404, 302])
def test_something_else_at_the_services_address_is_told_of(status: int, body: bytes, content: str) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", content)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with gyre.ServiceClient(url, "k") as client, pytest.raises(ServiceError) as caught:
            client.open_run(
                task="t", group=None, member=0, owner="", split="train", metadata={}, dispatch_version=None,
                limits=gyre.Limits(),
            )  # fmt: skip
        server.shutdown()
    assert f"{url} is no recording service ({status}: " in str(caught.value)
    assert "give the address that `gyre serve` printed" in str(caught.value)


def test_a_service_that_was_there_is_waited_for(model: Path, tmp_path: Path) -> None:
    settings = gyre.ProxySettings(store=tmp_path / "s.db", model=model, service_key="known")
    with gyre.serve(settings) as service:
        client = gyre.ServiceClient(service.url, "known", arrival=0.0)
        assert client.status()["runs_open"] == 0
    with ThreadPoolExecutor(1) as pool, client:
        asked = pool.submit(client.status)
        port = int(service.url.rpartition(":")[2])
        with gyre.serve(msgspec.structs.replace(settings, port=port)):
            assert asked.result(30)["runs_open"] == 0


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("127.0.0.1:8700", "k", "address is '127.0.0.1:8700'; write http://HOST:PORT"),
        ("http://127.0.0.1:8700", "\n", "service key is empty; give the one in the file `service-key`"),
        ("http://127.0.0.1:port", "k", "address is 'http://127.0.0.1:port': Invalid port"),
        ("http://127.0.0.1:8700", "clé", "characters that no key has"),
        ("http://127.0.0.1:8700", "a\nb", "characters that no key has"),
    ],
)
def test_what_cannot_be_a_service_is_said_before_it_is_asked(url: str, key: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        gyre.ServiceClient(url, key)


def test_a_key_as_read_from_its_file_is_taken_and_a_wrong_one_is_told_of(model: Path, tmp_path: Path) -> None:
    with gyre.serve(gyre.ProxySettings(store=tmp_path / "s.db", model=model, service_key="known")) as service:
        with gyre.ServiceClient(service.url, "known\n") as read:
            assert read.status()["replicas"] == []
        with gyre.ServiceClient(service.url, "wrong") as other:
            with pytest.raises(
                ServiceError, match=r"\(401\): .*`service-key` beside its store \(invalid_service_key\)$"
            ):
                other.status()


@pytest.mark.parametrize("given", ["values", "texts"])
def test_proxy_in_the_process_when_no_service_is_given(
    given: str, model: Path, tmp_path: Path, engine: ScriptedEngine
) -> None:
    store: Any = tmp_path / "s.db"
    settings = gyre.ProxySettings(store=store, model=model, replicas=(ReplicaSpec(engine.url, 0),))
    if given == "texts":
        texts: Any = {"store": str(store), "model": str(model), "replicas": [engine.url]}
        settings = gyre.ProxySettings(**texts)
    with gyre.session(a_task(), proxy=settings, workspace="local") as agent:
        ask(agent.openai())
    assert agent.result.calls == 1


REQUEST = httpx.Request("POST", "http://service/v1/chat/completions")
CUT_OFF = openai.types.chat.ChatCompletion(id="c", choices=[], created=0, model="policy", object="chat.completion")


def _answered(kind: type[Any], status: int, body: object = None) -> Any:
    if kind is httpx.HTTPStatusError:
        return kind("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))
    return kind("no", response=httpx.Response(status, request=REQUEST), body=body)


class LikeLiteLLMs(openai.APIConnectionError):
    """A connection that failed, with a status that nobody sent."""

    status_code = 408


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (openai.APIConnectionError(request=REQUEST), End.MODEL_FAILED),
        (openai.APITimeoutError(REQUEST), End.MODEL_FAILED),
        (openai.APIError("the stream broke off", REQUEST, body=None), End.MODEL_FAILED),
        (LikeLiteLLMs(request=REQUEST), End.MODEL_FAILED),
        (anthropic.APIConnectionError(request=REQUEST), End.MODEL_FAILED),
        (httpx.ReadTimeout("late", request=REQUEST), End.MODEL_FAILED),
        *((_answered(kind, 500), End.MODEL_FAILED) for kind in (openai.APIStatusError, httpx.HTTPStatusError)),
        *((_answered(kind, 499), End.AGENT_FAILED) for kind in (openai.APIStatusError, httpx.HTTPStatusError)),
        (openai.LengthFinishReasonError(completion=CUT_OFF), End.AGENT_FAILED),
        (openai.OpenAIError("no api_key"), End.AGENT_FAILED),
        (httpx.InvalidURL("no"), End.AGENT_FAILED),
        (_answered(openai.BadRequestError, 400, {"code": "context_length_exceeded"}), End.CONTEXT_FULL),
        (_answered(anthropic.BadRequestError, 400, {"error": {"code": "context_length_exceeded"}}), End.CONTEXT_FULL),
        (ConnectionError("to a place of the agent's own"), End.AGENT_FAILED),
    ],
    ids=lambda value: value.value if isinstance(value, End) else type(value).__name__,
)
def test_model_side_failures_are_not_held_against_the_agent(error: Exception, end: End) -> None:
    ending = classify(error)
    assert (ending.end, POLICY[ending.end].graded) == (end, end is not End.MODEL_FAILED)
    assert ending.error is not None and ending.error.startswith("infrastructure") == (end is End.MODEL_FAILED)


def test_sigterm_ends_the_run_and_leaves_no_workspace(model: Path, tmp_path: Path, engine: ScriptedEngine) -> None:
    """A program that turns SIGTERM into SystemExit, as most do, leaves a cancelled run behind."""
    program = f"""
import signal, sys, time
import gyre_sdk as gyre
from pathlib import Path
from gyre_sdk.harness.proxy.routing import ReplicaSpec
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
settings = gyre.ProxySettings(store=Path({str(tmp_path / "s.db")!r}), model=Path({str(model)!r}), replicas=(ReplicaSpec({engine.url!r}, 0),))
with gyre.session(gyre.Task(instruction="x", scorer=lambda w: 1.0), proxy=settings, workspace="local") as agent:
    print("in", flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "in\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) == 143
    assert stored(tmp_path)[0].status is RunStatus.CANCELLED
