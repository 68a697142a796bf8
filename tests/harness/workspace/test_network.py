"""The recording proxy as the only thing that a workspace reaches, however its listener gets inside."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_kit import WAYS, Box, Server, box, until
from proxy_engine import Finish, ScriptedEngine, Tokens, Wait, say
from proxy_kit import running, sse
from proxy_toy import toy_template

from gyre_sdk.errors import ProtocolError, WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.proxy.server.refusals import refusal as of_the_proxy
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, WorkspacePool, open_workspace, sweep
from gyre_sdk.harness.workspace.network import PROXY_PORT, Network, Plan, Relay, Wire, helper, plan
from gyre_sdk.harness.workspace.network.guard import own_addresses
from gyre_sdk.harness.workspace.network.inside import CannotEnter, connect_inside, listen_inside, process_handle
from gyre_sdk.harness.workspace.network.refusals import refusal
from gyre_sdk.harness.workspace.network.relay import passes
from gyre_sdk.harness.workspace.network.serving import CONNECTIONS

docker_engine = pytest.mark.docker


# -- decisions -------------------------------------------------------------------------------------------------------


def task(**values: object) -> Task:
    return Task(instruction="x", memory_mb=64, **values)  # type: ignore[arg-type]


def test_what_each_network_is_connected_to():
    assert plan(task()) == plan(task(network="proxy-only")) == Plan(Wire.NOTHING)
    assert plan(task(network="full")) == Plan(Wire.BRIDGE)
    allowed = task(network="allowlist", allowed_hosts=("a.org",), verifier_network="full")
    assert plan(allowed) == Plan(Wire.NOTHING, allowed=("a.org",))
    assert plan(allowed, "verifier") == Plan(Wire.BRIDGE)
    assert plan(task(verifier_network="allowlist", verifier_allowed_hosts=("b.org",))) == Plan(Wire.NOTHING)


def test_under_a_runtime_with_a_network_stack_of_its_own():
    apart = {"runtime": "runsc"}
    assert plan(task(**apart)) == Plan(Wire.NOTHING, apart=True) and not plan(task(**apart)).proxied
    only = plan(task(network="proxy-only", **apart))
    assert only == Plan(Wire.INTERNAL, apart=True) and only.proxied
    listed = plan(task(network="allowlist", allowed_hosts=("a.org",), **apart))
    assert listed == Plan(Wire.INTERNAL, allowed=("a.org",), apart=True)
    assert not plan(task(network="full", **apart)).proxied


@pytest.mark.parametrize(
    ("method", "path", "wanted"),
    [
        ("POST", "/v1/chat/completions", True),
        ("GET", "/v1/models/org%2Fname?x=1", True),
        ("GET", "/v1/models/org/name", True),
        ("HEAD", "/", True),
        ("GET", "/", False),
        ("GET", "/health", True),
        ("POST", "/health", False),
        ("GET", "/metrics", False),
        ("GET", "/openapi.json", False),
        ("POST", "/gyre/v1/runs", False),
        ("POST", "/v1", False),
        ("POST", "/v1/../gyre/v1/runs", False),
        ("POST", "/v1/x/..", False),
        ("POST", "/v1/%2e%2e/gyre/v1/runs", False),
        ("POST", "/v1/%2E./gyre/v1/runs", False),
        ("POST", "/v1/..%2Fgyre/v1/runs", False),
        ("POST", "/v1/\\..\\gyre", False),
        ("POST", "/v1//gyre/v1/runs", False),
        ("POST", "//gyre/v1/runs", False),
        ("POST", "http://elsewhere/v1/models", False),
        ("CONNECT", "elsewhere:443", False),
    ],
)
def test_only_what_agents_ask_passes(method, path, wanted):
    assert passes(method, path) is wanted


@given(st.text(alphabet="v1gyre/.%2eEfF\\?#", max_size=24))
def test_no_way_of_writing_a_path_leads_out_of_v1(tail):
    """Whatever a server makes of dots, slashes and escapes, it stays below /v1."""
    from posixpath import normpath
    from urllib.parse import unquote

    path = f"/v1/{tail}"
    if passes("GET", path):
        plain = unquote(path.partition("?")[0].partition("#")[0]).replace("\\", "/")
        assert normpath(plain) == "/v1" or normpath(plain).startswith("/v1/")


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models", "/elsewhere"])
@pytest.mark.parametrize("status", [404, 503])
def test_errors_have_the_form_of_the_protocol(headers, path, status):
    """The same body, status and advice to SDKs as the recording proxy gives at that path."""
    error = ProtocolError("why", status=status, code="a_code", retryable=status == 503)
    theirs = of_the_proxy(path if path.startswith("/v1/") else "/v1/x", headers, error)
    ours = refusal(path, headers, status, "a_code", "why", retryable=status == 503)
    assert json.loads(ours.body) == json.loads(theirs.body)
    assert ours.status == theirs.status
    for name in ("Content-Type", "x-should-retry", "Retry-After"):
        assert (ours.headers.get(name) or "").partition(";")[0] == (theirs.headers.get(name) or "").partition(";")[0]


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/v2", "ftp://h/v1", "/v1", "http://h:1/v1?x=1"])
def test_a_base_url_that_is_no_lanes_is_refused(url):
    with pytest.raises(WorkspaceError, match="base URL"):
        Relay(url, "key")


# -- each way of getting inside ----------------------------------------------------------------------------------------


every_way = pytest.mark.parametrize("inside", list(WAYS), indirect=True, scope="module")
both_carriers = pytest.mark.parametrize("inside", ["joined", "relayed"], indirect=True, scope="module")
"""On a bridge beside it, the same relay container carries the same bytes."""


@pytest.fixture(scope="module")
def inside(request, docker_client, base_image) -> Iterator[Box]:
    """A container connected in each way, shared by the tests of this module."""
    how, enter = WAYS[request.param]
    with box(docker_client, how, enter=enter) as made:
        yield made


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def base(inside, upstream) -> Iterator[str]:
    """Base URL inside of a lane whose proxy is `upstream`."""
    upstream.log.clear()
    upstream.go.clear()
    upstream.dropped.clear()
    yield inside.network.connect_proxy(f"{upstream.url}/v1", "the-lanes-key")


@docker_engine
@every_way
def test_calls_from_inside_are_recorded_under_their_lane(inside, tmp_path):
    """A real proxy, plain busybox wget, no key inside: which listener is asked tells who asks."""
    with (
        ScriptedEngine(lambda request, number: say(301)) as engine,
        running(None, tmp_path / "s.db", engine.url, template=toy_template({"hi": 300, "ok": 301})) as proxy,
    ):
        access = proxy.run()
        lane = proxy.lane(access["run"], role="helper", name="helper", parent=access["lane"])
        main = inside.network.connect_proxy(access["base_url"], access["api_key"])
        other = inside.network.connect_proxy(lane["base_url"], lane["api_key"])
        assert inside.network.connect_proxy(access["base_url"], access["api_key"]) == main != other
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
        ask = "wget -qO- --header 'Content-Type: application/json' --header 'Authorization: Bearer {}' --post-data '{}' {}"
        said = json.loads(inside.sh(ask.format("forged", body, f"{main}/chat/completions")))
        assert said["choices"][0]["message"]["content"] == "ok"
        inside.sh(
            ask.format(access["api_key"], body, f"{other}/chat/completions")
        )  # another lane's key changes nothing
        calls = {call.lane: call for call in proxy.calls(access["run"])}
        assert set(calls) == {access["lane"], lane["lane"]} and len(proxy.calls()) == 2
        assert all(call.sampled_ids == [301] for call in calls.values())
        control = f"--header 'Authorization: Bearer {proxy.service_key}' {main[:-3]}/gyre/v1/status"
        refused = inside.sh(f"wget -O- {control} 2>&1")
        assert "404 Not Found" in refused


@docker_engine
@both_carriers
def test_a_stream_passes_chunk_by_chunk(inside, tmp_path):
    """What was sampled is read inside while the engine still holds the next token back."""
    more = threading.Event()
    play = lambda request, number: [Tokens([300]), Wait(more), Tokens([301]), Finish()]  # noqa: E731
    with (
        ScriptedEngine(play) as engine,
        running(None, tmp_path / "s.db", engine.url, template=toy_template({"hi": 300, "ok": 301})) as proxy,
    ):
        access = proxy.run()
        url = inside.network.connect_proxy(access["base_url"], access["api_key"])
        body = json.dumps({"model": "policy", "stream": True, "messages": [{"role": "user", "content": "hi"}]})
        inside.sh(
            f"wget -qO- --post-data '{body}' {url}/chat/completions >/tmp/got 2>&1; echo end >>/tmp/got", detach=True
        )
        first = until(lambda: '"hi"' in (text := inside.sh("cat /tmp/got 2>/dev/null")) and text)
        assert '"ok"' not in first and "end" not in first.split("\n")
        more.set()
        whole = until(lambda: (text := inside.sh("cat /tmp/got")).endswith("end\n") and text)
        events = sse(whole.removesuffix("end\n"))
        assert events[-1] == "[DONE]" and proxy.calls()[0].finish_reason == "stop"


@docker_engine
@both_carriers
def test_what_arrives_outside(inside, base, upstream):
    """The lane's key in both places, nothing of the client's credentials, the path and other headers as they were sent."""
    sent = {
        "Authorization": "Bearer mine",
        "x-api-key": "mine",
        "api-key": "mine",
        "Cookie": "a=1",
        "Proxy-Authorization": "Basic mine",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "Upgrade": "websocket",
        "anthropic-version": "2023-06-01",
        "User-Agent": "an agent",
    }
    options = " ".join(f"--header '{name}: {value}'" for name, value in sent.items())
    assert "GET /v1/a%2Fb?c=%20d&e 0" in inside.sh(f"wget -qO- {options} '{base}/a%2Fb?c=%20d&e'")
    ((_, _, headers, _),) = upstream.log
    assert headers["Authorization"] == "Bearer the-lanes-key" and headers["x-api-key"] == "the-lanes-key"
    assert "mine" not in str(dict(headers)) and not {"Cookie", "X-Hop", "Upgrade", "api-key"} & set(headers)
    assert (headers["anthropic-version"], headers["User-Agent"]) == ("2023-06-01", "an agent")
    assert "the-lanes-key" not in inside.sh("env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null")


@docker_engine
@both_carriers
def test_one_connection_carries_many_requests(inside, base):
    """Two at once, and a third later."""
    two = "".join(f"GET /v1/{number} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" for number in (1, 2))
    last = "GET /v1/3 HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n"
    said = inside.raw(base, f"printf '{two}'", "usleep 100000", f"printf '{last}'")
    assert [f"GET /v1/{number} 0" in said for number in (1, 2, 3)] == [True] * 3
    assert said.count("200 OK") == 3


@docker_engine
@both_carriers
def test_many_connections_at_once(inside, base, upstream):
    many = 12
    said = inside.sh(f"for i in $(seq {many}); do wget -qO- --post-data b$i {base}/$i & done; wait")
    assert sorted(said.split("\n")[:-1]) == sorted(f"POST /v1/{i} {len(f'b{i}')}" for i in range(1, many + 1))


@docker_engine
@both_carriers
def test_large_bodies_both_ways(inside, base, upstream):
    size = 8_000_000
    inside.sh(f"head -c {size} /dev/zero | tr '\\0' x >/tmp/large")
    head = "POST /v1/up HTTP/1.1\\r\\nHost: x\\r\\nExpect: 100-continue\\r\\nConnection: close\\r\\n"
    said = inside.raw(base, f"printf '{head}Content-Length: {size}\\r\\n\\r\\n'", "cat /tmp/large")
    assert said.startswith("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and upstream.log[-1][3] == size
    assert inside.sh(f"wget -qO- '{base}/big?bytes={size}' | tr -d -c y | wc -c").strip() == str(size)


@docker_engine
@both_carriers
def test_either_side_may_leave(inside, base, upstream):
    """A client that leaves is seen outside; an answer that is cut outside does not look whole inside."""
    for asked in (f"{base}/wait", f"--post-data x {base}/deaf"):
        upstream.arrived.clear()
        upstream.dropped.clear()
        inside.sh(f"wget -qO- {asked}", detach=True)
        assert upstream.arrived.wait(20)
        inside.sh("killall wget")
        assert upstream.dropped.wait(20)
    said = inside.raw(base, "printf 'GET /v1/cut HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'")
    assert "begun" in said and "\r\n0\r\n" not in said


@docker_engine
@both_carriers
def test_a_proxy_that_is_gone_is_an_error_to_try_again(inside):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        base = inside.network.connect_proxy(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "key")
        ask = "POST /v1/messages HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\nContent-Length: 0\\r\\n\\r\\n"
        said = inside.raw(base, f"printf '{ask}'")
    assert said.startswith("HTTP/1.1 529") and "x-should-retry: true" in said
    assert '"type":"overloaded_error"' in said and "is it still running?" in said


@docker_engine
@every_way
def test_nothing_else_is_reached(inside, base, docker_client):
    """No host service at any address of this machine, no other container, no metadata, no name, no IPv6."""
    everywhere = Path("/proc/net/fib_trie").read_text()
    with Server("0.0.0.0") as host, box(docker_client, WAYS["internal"][0], enter=False) as other:
        other.sh("nc -lll -p 7777 -e echo other-reached >/dev/null 2>&1 &", detach=True)
        theirs = docker_client.api.inspect_container(other.id)["NetworkSettings"]["Networks"]
        neighbours = [one["IPAddress"] for one in theirs.values()]
        assert until(lambda: "other-reached" in other.sh("nc 127.0.0.1 7777 </dev/null"))
        mine = docker_client.api.inspect_container(inside.id)["NetworkSettings"]["Networks"]
        gateways = [one["Gateway"] for one in mine.values() if one["Gateway"]]
        places = [f"{address}:{host.port}" for address in [*own_addresses(everywhere), *gateways, "127.0.0.1"]]
        places += [f"{address}:7777" for address in neighbours] + ["169.254.169.254:80", "1.1.1.1:80", "[fe80::1]:80"]
        assert len(places) >= 5
        tries = "\n".join(f"timeout 2 wget -qO- http://{place}/ && echo REACHED {place} &" for place in places)
        tries += f"\nwget -qO- {base}/x && echo REACHED the proxy"
        said = inside.sh(f"{tries}\nwait; timeout 2 nslookup example.com 2>&1 | tail -n 3")
        assert "REACHED the proxy" in said and said.count("REACHED") == 1  # the same tool, at the same moment
        assert "other-reached" not in said and not host.log
        assert not {"Segmentation", "applet", "not found"} & set(said.split())
        assert "Address" not in said.replace("Address:\t127.0.0.11", "").replace("Address: 127.0.0.11", "")
    assert all(line.split()[-1] == "lo" for line in inside.sh("cat /proc/net/if_inet6").splitlines())


@docker_engine
@both_carriers
def test_a_taken_port_is_passed_over(inside, upstream):
    """Whatever an agent listens on, the lane gets a port of its own."""
    inside.network.disconnect()
    inside.sh(f"nc -lll -p {PROXY_PORT} -e true >/dev/null 2>&1 &", detach=True)
    until(lambda: f":{PROXY_PORT} " in inside.sh("netstat -ltn"))
    base = inside.network.connect_proxy(f"{upstream.url}/v1", "k")
    assert not base.endswith(f":{PROXY_PORT}/v1")
    assert "GET /v1/x 0" in inside.sh(f"wget -qO- {base}/x")
    inside.sh("killall nc")


@docker_engine
@every_way
def test_disconnecting_ends_listeners_and_connections(inside, base, upstream):
    inside.sh(f"wget -qO- {base}/wait >/tmp/waiting 2>&1; echo ended >>/tmp/waiting", detach=True)
    until(lambda: upstream.log)
    inside.network.disconnect()
    until(lambda: "ended" in inside.sh("cat /tmp/waiting"))
    assert upstream.dropped.wait(20)
    assert "can't connect" in inside.sh(f'timeout 3 wget -qO- {base}/x 2>&1 || echo "can\'t connect"')
    assert "GET /v1/x 0" in inside.sh(f"wget -qO- {inside.network.connect_proxy(f'{upstream.url}/v1', 'k')}/x")


@docker_engine
@pytest.mark.parametrize("way", list(WAYS))
def test_a_listener_ends_with_its_container(way, docker_client, base_image, upstream):
    how, enter = WAYS[way]
    with box(docker_client, how, enter=enter) as made:
        made.network.connect_proxy(f"{upstream.url}/v1", "k")
        (serving,) = made.network._serving.values()
        assert not serving.closed
        made.kill()
        until(lambda: serving.closed)
    until(lambda: made.id not in {one["Id"] for one in docker_client.api.containers(all=True)})


# -- entering a namespace -------------------------------------------------------------------------------------------


@docker_engine
def test_a_namespace_is_entered_only_for_its_own_container(docker_client, base_image):
    with box(docker_client) as made:
        before = Path("/proc/thread-self/ns/net").readlink()
        listening = listen_inside(made.pid, 9000, container=made.id)
        threading.Thread(
            target=lambda: listening.accept()[0].sendall(b"met") if not listening.setblocking(True) else None
        ).start()
        assert connect_inside(made.pid, 9000, container=made.id).recv(3) == b"met"
        with pytest.raises(OSError, match="in use"):
            listen_inside(made.pid, 9000, container=made.id)
        listening.close()
        for enter in (listen_inside, connect_inside):
            with pytest.raises(CannotEnter, match="elsewhere"):
                enter(made.pid, 9001, container="0" * 64)
        with pytest.raises(CannotEnter):
            process_handle(1, container=made.id)
        assert Path("/proc/thread-self/ns/net").readlink() == before
        pid = made.pid
        made.kill()
        until(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(CannotEnter):
            listen_inside(pid, 9002, container=made.id)


# -- workspaces -----------------------------------------------------------------------------------------------------


@docker_engine
def test_a_workspace_without_a_network_has_its_lane_and_loses_it_with_its_life(docker_client, base_image, upstream):
    networks = {one["Id"] for one in docker_client.api.networks()}
    with open_workspace(task(), run_id="r") as workspace:
        assert isinstance(workspace, DockerWorkspace) and "no network" in workspace.describe()
        base = workspace.connect_proxy(f"{upstream.url}/v1", "k")
        assert base == f"http://127.0.0.1:{PROXY_PORT}/v1"
        assert "GET /v1/x 0" in workspace.exec(f"wget -qO- {base}/x").stdout
        assert workspace.exec("cat /proc/net/route").stdout.count("\n") == 1  # the heading
        assert workspace.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1").stdout.split() == ["lo"]
        assert {one["Id"] for one in docker_client.api.networks()} == networks  # no address pool is used up
        (serving,) = workspace.network._serving.values()
    assert serving.closed
    with pytest.raises(WorkspaceUnavailable):
        workspace.connect_proxy(f"{upstream.url}/v1", "k")


@docker_engine
def test_a_recycled_workspace_keeps_nothing_of_the_last_run(docker_client, base_image, upstream):
    """Neither a listener nor a connection; the next run's lane is its own."""
    with WorkspacePool(recycle=True) as pool:
        first = pool.take(task())
        base = first.connect_proxy(f"{upstream.url}/v1", "first")
        assert "GET /v1/x 0" in first.exec(f"wget -qO- {base}/x").stdout
        first.close()
        second = pool.take(task())
        assert second.id == first.id and pool.recycled == 1
        assert "can't connect" in second.exec(f"wget -O- {base}/x 2>&1").stdout
        upstream.log.clear()
        assert second.connect_proxy(f"{upstream.url}/v1", "second") == base
        second.exec(f"wget -qO- {base}/x")
        assert [headers["x-api-key"] for _, _, headers, _ in upstream.log] == ["second"]
        other = pool.take(task(network="allowlist", allowed_hosts=("a.org",)))
        assert other.id != second.id  # connected otherwise, it is never the same container
        other.close()
        second.close()


@docker_engine
def test_one_workspace_cannot_use_up_this_process(docker_client, base_image, upstream):
    """Beyond its share of connections, further ones are closed; once some end, it is served again."""
    with box(docker_client) as made:
        base = made.network.connect_proxy(f"{upstream.url}/v1", "k")
        held = [connect_inside(made.pid, PROXY_PORT, container=made.id) for _ in range(CONNECTIONS)]
        (serving,) = made.network._serving.values()
        until(lambda: serving._service.connections == CONNECTIONS)
        with pytest.raises(OSError):
            extra = connect_inside(made.pid, PROXY_PORT, container=made.id)
            extra.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if not extra.recv(1):
                raise ConnectionResetError
        for one in held:
            one.close()
        until(lambda: "GET /v1/x 0" in made.sh(f"wget -qO- {base}/x"))


@docker_engine
def test_a_relay_container_carries_so_many_at_a_time(docker_client, base_image, upstream, monkeypatch):
    """Further connections wait for their turn; none of them costs a thread meanwhile."""
    monkeypatch.setattr(helper, "CONNECTIONS", 2)
    with box(docker_client, enter=False) as made:
        made.network.connect_proxy(f"{upstream.url}/v1", "k")
        held = [connect_inside(made.pid, PROXY_PORT, container=made.id) for _ in range(2)]
        relay = made.network._helper
        assert relay is not None
        until(lambda: relay._carriers == 2)
        late = connect_inside(made.pid, PROXY_PORT, container=made.id)
        late.sendall(b"GET /v1/late HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: len(relay._waiting) == 1)
        assert relay._carriers == 2
        for one in held:
            one.close()
        answer = b""
        while b"GET /v1/late 0" not in answer:  # head and body come in pieces of any size
            part = late.recv(1000)
            assert part, answer
            answer += part
        late.close()
        until(lambda: relay._carriers == 0)


OWNER = """
import sys, time
sys.path.insert(0, {folder!r})
from network_kit import WAYS, box
from gyre_sdk.harness.workspace.engine import connect
how, enter = WAYS["internal"]
with box(connect({url!r}), how, enter=enter) as made:
    made.network.connect_proxy("http://127.0.0.1:1/v1", "k")
    print(made.id, made.network._helper.id, flush=True)
    time.sleep(600)
"""


@docker_engine
def test_a_relay_container_ends_with_a_killed_owner(docker_client, docker_url, base_image):
    """At once, by the end of its input; its network is swept with the workspace's container."""
    code = OWNER.format(folder=str(Path(__file__).parent), url=docker_url)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workspace, relay = process.stdout.readline().split()
        process.kill()
    until(lambda: relay not in {one["Id"] for one in docker_client.api.containers(all=True)})
    swept = sweep(docker_client)
    assert workspace in swept.containers and len(swept.networks) == 1


@docker_engine
def test_a_runtime_apart_without_a_network_says_what_to_do(docker_client, base_image):
    network = Network(docker_client, Plan(Wire.NOTHING, apart=True))
    with pytest.raises(WorkspaceError, match="proxy-only"):
        network.connect_proxy("http://127.0.0.1:1/v1", "k")


def test_local_workspaces_have_no_egress():
    with pytest.raises(WorkspaceError, match="workspace='docker'"):
        open_workspace(task(network="full"), kind="local")
