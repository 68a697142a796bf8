"""The egress proxy of an allow list: names decide, addresses are checked after resolution, and there is no other way out."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from network_kit import WAYS, Box, Server, box

from gyre_sdk.errors import WorkspaceError
from gyre_sdk.harness.task import Task
from gyre_sdk.harness.workspace import DockerWorkspace, open_workspace
from gyre_sdk.harness.workspace.network import EGRESS_PORT, Egress, Plan, Wire
from gyre_sdk.harness.workspace.network.addresses import AllowList, literal, plain, split_authority
from gyre_sdk.harness.workspace.network.egress import Refused, is_own
from gyre_sdk.harness.workspace.network.inside import connect_inside

docker_engine = pytest.mark.docker
PROXY = f"http://127.0.0.1:{EGRESS_PORT}"


# -- decisions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("pypi.org", True),
        ("PyPI.org.", True),
        ("a.pypi.org", False),
        ("pypi.org.evil.net", False),
        ("evilpypi.org", False),
        ("files.pythonhosted.org", True),
        ("a.b.pythonhosted.org", True),
        ("pythonhosted.org", False),
        ("evilpythonhosted.org", False),
        ("xn--bcher-kva.example", True),
        ("bücher.example", True),
        ("", False),
    ],
)
def test_names(host, wanted):
    listed = AllowList.of(("pypi.org", "*.pythonhosted.org", "xn--bcher-kva.example", "203.0.113.0/24"))
    assert listed.names_it(host) is wanted


@pytest.mark.parametrize(
    "host", ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1", "1.2.3.4.", "1.2.3", "::1::", "0x7f000001"]
)
def test_odd_ways_to_write_an_address_are_no_names(host):
    with pytest.raises(ValueError, match="odd way"):
        literal(host)


def test_addresses_as_they_are_written():
    assert literal("1.2.3.4") == ipaddress.ip_address("1.2.3.4")
    assert literal("[::1]") == ipaddress.ip_address("::1") == literal("::1%lo")
    assert literal("pypi.org") is literal("a-1.org") is literal("1and1.org") is None


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
        *("169.254.169.254", "169.254.170.2", "fe80::1", "fd00:ec2::254", "100.100.100.200", "168.63.129.16"),
        *("192.0.0.192", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2001:0:0:0:0:0:5601:5601"),
    ],
)
def test_this_machine_and_metadata_are_refused_even_when_listed(address):
    everything = AllowList.of(("0.0.0.0/0", "::/0"))
    assert everything.refuses(ipaddress.ip_address(address)) is not None


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "fd00::1",
        "ff02::1",
        "::ffff:10.0.0.1",
    ],
)
def test_private_addresses_are_refused_unless_listed(address):
    found = ipaddress.ip_address(address)
    assert AllowList.of(("a.org",)).refuses(found) is not None
    assert AllowList.of((str(found),)).refuses(found) is None


@given(st.ip_addresses())
def test_only_public_addresses_are_left_without_a_list(address):
    reason = AllowList.of(()).refuses(address)
    real = plain(address)
    if reason is None:
        assert real.is_global and not (real.is_multicast or real.is_loopback or real.is_link_local or real.is_private)


@pytest.mark.parametrize(
    ("authority", "wanted"),
    [("a.org:443", ("a.org", 443)), ("a.org", ("a.org", 80)), ("[::1]:8", ("[::1]", 8)), ("1.2.3.4:5", ("1.2.3.4", 5))],
)
def test_authorities(authority, wanted):
    assert split_authority(authority, 80) == wanted


@pytest.mark.parametrize(
    "authority", ["", ":80", "a.org:0", "a.org:65536", "u@a.org:80", "a.org:80/x", "a b:1", "::1:80", "[::1", "a.org:x"]
)
def test_what_is_no_authority(authority):
    with pytest.raises(ValueError, match="host:port"):
        split_authority(authority, 80)


def test_this_machines_own_addresses_are_known():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        mine = probe.getsockname()[0]
    assert is_own(ipaddress.ip_address(mine)) and is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(ipaddress.ip_address("203.0.113.77"))


# -- decisions with resolution -------------------------------------------------------------------------------------


class Names:
    """A resolver: each name has a list of answers, given one after the other, the last one again."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self.answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.answers:
            raise socket.gaierror(-2, "Name or service not known")
        given = self.answers[host]
        return given.pop(0) if len(given) > 1 else given[0]


async def test_a_name_is_reached_only_at_addresses_that_pass():
    names = Names(
        public_org=[["198.51.100.1", "203.0.113.5", "1.2.3.4", "5.6.7.8"]],
        inner_org=[["127.0.0.1", "10.0.0.1"]],
        mixed_org=[["169.254.169.254", "::1", "1.2.3.4"]],
        mapped_org=[["::ffff:192.168.0.1"]],
        empty_org=[[]],
    )
    egress = Egress(("*.org",), resolve=names)
    assert await egress.reach("PUBLIC.org.", 443) == ["1.2.3.4", "5.6.7.8"]  # the ranges of documentation are no hosts
    assert await egress.reach("mixed.org", 443) == ["1.2.3.4"]
    for name, reason in (("inner.org", "is this machine"), ("mapped.org", "not a public"), ("empty.org", "no address")):
        with pytest.raises(Refused, match=reason):
            await egress.reach(name, 443)
    with pytest.raises(OSError, match="not known"):
        await egress.reach("unknown.org", 443)
    assert egress.refused == {"inner.org": 1, "mapped.org": 1, "empty.org": 1}


async def test_what_is_refused_is_never_resolved():
    names = Names()
    egress = Egress(("pypi.org", "10.1.0.0/16"), resolve=names)
    for host in ("evil.net", "1.2.3.4", "[::1]", "127.1", "2130706433", "localhost"):
        with pytest.raises(Refused):
            await egress.reach(host, 80)
    assert await egress.reach("10.1.2.3", 80) == ["10.1.2.3"]  # listed as an address
    assert names.asked == [] and egress.refused["evil.net"] == 1


# -- a workspace's way out -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=secure.test", "-addext", "subjectAltName=DNS:secure.test"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return key, cert


@pytest.fixture(scope="module")
def site(certificate) -> Iterator[Server]:
    """A web site, on loopback: the tests' egress takes it for a public one."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def secure(certificate) -> Iterator[Server]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate[1], certificate[0])
    with Server(tls=tls) as server:
        yield server


@pytest.fixture
def names() -> Names:
    return Names(
        site_test=[["127.0.0.1"]],
        secure_test=[["127.0.0.1"]],
        a_wild_test=[["127.0.0.1"]],
        rebound_test=[["127.0.0.1"], ["127.0.0.2"]],
        inner_test=[["127.0.0.2"]],
        several_wild_test=[["127.0.0.3", "127.0.0.1"]],
    )


@pytest.fixture(scope="module", params=["joined", "relayed"])
def apart(request, docker_client, base_image) -> Iterator[Box]:
    how, enter = WAYS[request.param]
    with box(docker_client, how, enter=enter) as made:
        yield made


@pytest.fixture
def inside(apart, names) -> Iterator[Box]:
    """A container whose egress resolves by `names` and takes loopback for public addresses, 127.0.0.2 for this machine."""

    def check(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
        return "is this machine" if str(address) == "127.0.0.2" else None

    allowed = ("site.test", "secure.test", "*.wild.test", "rebound.test", "inner.test")
    apart.network.egress = Egress(allowed, resolve=names, check=check)
    apart.network.serve(EGRESS_PORT, apart.network.egress)
    yield apart
    apart.network.disconnect()


def fetch(inside: Box, url: str) -> str:
    return inside.sh(f"http_proxy={PROXY} wget -O- {url} 2>&1")


@docker_engine
def test_an_allowed_host_is_reached_by_name(inside, site, names):
    site.log.clear()
    assert "GET /x?y=1 0" in fetch(inside, f"http://site.test:{site.port}/x?y=1")
    assert "GET / 0" in fetch(inside, f"http://a.wild.test:{site.port}/")
    assert "GET / 0" in fetch(inside, f"http://SITE.test.:{site.port}/")
    assert [headers["Host"] for _, _, headers, _ in site.log[:2]] == [
        f"site.test:{site.port}",
        f"a.wild.test:{site.port}",
    ]
    assert names.asked == ["site.test", "a.wild.test", "site.test"]
    assert not inside.network.egress.refused


@docker_engine
def test_everything_else_is_refused(inside, site):
    hosts = ["other.test", "wild.test", "site.test.evil.net", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "127.0.0.2"]
    hosts += ["inner.test", "169.254.169.254", "localhost"]
    site.log.clear()
    for host in hosts:
        assert "403 Forbidden" in inside.sh(_ask(f"CONNECT {host}:{site.port} HTTP/1.1"))
        assert "403 Forbidden" in inside.sh(
            _ask(f"GET http://{host}:{site.port}/ HTTP/1.1", "Host: x", "Connection: close")
        )
    assert site.log == [] and set(hosts) <= set(inside.network.egress.refused)
    said = inside.sh(_ask(f"CONNECT other.test:{site.port} HTTP/1.1"))
    assert "other.test is not among the task's allowed hosts (site.test" in said


def _ask(line: str, *more: str) -> str:
    """Return a command that sends a head to the egress proxy and shows what comes until the other side ends."""
    head = "".join(f"{one}\\r\\n" for one in (line, *more))
    return (
        "rm -f /tmp/q; mkfifo /tmp/q; exec 3<>/tmp/q; "
        f"printf '{head}\\r\\n' >&3 & timeout 20 nc 127.0.0.1 {EGRESS_PORT} <&3"
    )


@docker_engine
def test_a_name_whose_next_address_is_another_gains_nothing(inside, site, names):
    """The address that was checked is the one that is connected to; the name is asked for once per connection."""
    site.log.clear()
    assert "GET / 0" in fetch(inside, f"http://rebound.test:{site.port}/")
    assert names.asked == ["rebound.test"]
    assert "403 Forbidden" in fetch(inside, f"http://rebound.test:{site.port}/")  # now it is this machine
    assert len(site.log) == 1


@docker_engine
def test_the_next_address_is_tried(inside, site):
    """Nothing listens at the first one; the body reaches the second one whole."""
    host = f"several.wild.test:{site.port}"
    assert "/ 4" in inside.sh(f"http_proxy={PROXY} wget -qO- --post-data body http://{host}/")
    said = inside.sh(_ask(f"CONNECT {host} HTTP/1.1\\r\\n\\r\\nGET /v1/x HTTP/1.1", "Host: x", "Connection: close"))
    assert said.startswith("HTTP/1.1 200 Connection established") and "GET /v1/x 0" in said


@docker_engine
def test_every_request_of_a_connection_is_checked(inside, site):
    """A second host on a connection that began with an allowed one; and no request says another host than its URL."""
    site.log.clear()
    there, other = f"site.test:{site.port}", f"other.test:{site.port}"
    said = inside.sh(
        _ask(
            f"GET http://{there}/ HTTP/1.1",
            f"Host: {other}\\r\\n",
            f"GET http://{other}/ HTTP/1.1",
            f"Host: {there}",
            "Connection: close",
        )
    )
    assert said.count("HTTP/1.1") == 2 and "200 OK" in said and "403 Forbidden" in said
    assert [headers["Host"] for _, _, headers, _ in site.log] == [there]


@docker_engine
@pytest.mark.parametrize(
    "line", ["GET / HTTP/1.1", "GET https://site.test/ HTTP/1.1", "CONNECT site.test:0 HTTP/1.1", "CONNECT  HTTP/1.1"]
)
def test_what_no_proxy_understands(inside, line):
    assert inside.sh(_ask(line, "Host: x", "Connection: close")).startswith("HTTP/1.1 400")


@docker_engine
def test_what_is_not_http_is_answered_and_not_logged(inside, caplog):
    for base, ends in (
        (PROXY, "not valid HTTP"),
        (inside.network.connect_proxy("http://127.0.0.1:1/v1", "k"), '"code":"bad_http"}}'),
    ):
        said = inside.raw(base, "printf 'NONSENSE\\r\\n\\r\\n'")
        assert " 400 " in said.split("\r\n")[0] and ends in said
    assert not caplog.records


@docker_engine
def test_hosts_that_cannot_be_reached_are_said_to_be(inside):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refused
        port = taken.getsockname()[1]
        assert "502 Bad Gateway" in fetch(inside, f"http://site.test:{port}/")
        said = inside.sh(_ask(f"CONNECT site.test:{port} HTTP/1.1"))
        assert said.startswith("HTTP/1.1 502") and "site.test cannot be reached" in said
    assert "does not resolve" in inside.sh(_ask("CONNECT gone.wild.test:443 HTTP/1.1"))


@docker_engine
def test_a_tunnel_carries_tls_to_its_end(inside, secure, certificate):
    """TLS of the client's own with the site's certificate, 4 MB up and down, through a listener inside."""
    size = 4_000_000
    client = ssl.create_default_context(cafile=str(certificate[1]))
    with contextlib.closing(connect_inside(inside.pid, EGRESS_PORT, container=inside.id)) as raw:
        raw.sendall(f"CONNECT secure.test:{secure.port} HTTP/1.1\r\nHost: secure.test\r\n\r\n".encode())
        assert raw.recv(100) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        raw.settimeout(60)
        with client.wrap_socket(raw, server_hostname="secure.test") as tunnel:
            head = (
                f"POST /v1/big?bytes={size} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
            )
            tunnel.sendall(head.encode() + b"x" * size)
            said = b""
            while part := tunnel.recv(1 << 16):
                said += part
    assert said.count(b"y") >= size and secure.log[-1][3] == size


@docker_engine
def test_a_workspace_with_an_allow_list(docker_client, base_image):
    """Its commands find the egress proxy by themselves; without the variables there is no way at all."""
    wanted = Task(
        instruction="x", memory_mb=64, network="allowlist", allowed_hosts=("site.test",), env={"all_proxy": "mine"}
    )
    with open_workspace(wanted) as workspace:
        assert isinstance(workspace, DockerWorkspace) and workspace.network.egress is not None
        found = dict(line.split("=", 1) for line in workspace.exec("env").stdout.splitlines() if "roxy" in line.lower())
        assert found.pop("NO_PROXY") == found.pop("no_proxy") == "localhost,127.0.0.1,::1"
        assert found.pop("all_proxy") == "mine"  # what the task says itself stays
        names = {"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY"}
        assert set(found) == names and set(found.values()) == {PROXY}
        refused = workspace.exec("wget -O- http://other.test/ 2>&1").stdout
        assert "403 Forbidden" in refused and workspace.network.egress.refused == {"other.test": 1}
        bare = workspace.exec("unset http_proxy HTTP_PROXY; wget -O- http://1.1.1.1/ 2>&1").stdout
        assert "unreachable" in bare
        base = workspace.connect_proxy("http://127.0.0.1:1/v1", "k")  # the recording proxy is beside it
        assert "503" in workspace.exec(f"wget -Y off -O- {base}/x 2>&1").stdout


@docker_engine
def test_each_phase_has_its_own_hosts_in_one_container(docker_client, base_image):
    """What the agent may reach, the evaluation may not, nor does it keep the agent's lane; `full` needs another container."""
    hosts = {"allowed_hosts": ("a.test",), "verifier_allowed_hosts": ("b.test",)}
    wanted = Task(instruction="x", memory_mb=64, network="allowlist", verifier_network="allowlist", **hosts)
    with DockerWorkspace(wanted, docker_client) as workspace:
        base = workspace.connect_proxy("http://127.0.0.1:1/v1", "k")
        for phase, listed in (("verifier", "b.test"), ("agent", "a.test")):
            workspace.enter(phase)
            said = workspace.exec(_ask("CONNECT other.test:1 HTTP/1.1")).stdout
            assert f"allowed hosts ({listed})" in said
        assert "can't connect" in workspace.exec(f"wget -Y off -O- {base}/x 2>&1").stdout
    alone = Task(instruction="x", memory_mb=64, network="allowlist", allowed_hosts=("a.test",))
    with DockerWorkspace(alone, docker_client) as workspace:
        ask = "echo $http_proxy; wget -O- http://a.test/ 2>&1; netstat -ltn"
        said = workspace.exec(ask).stdout
        assert said.startswith(f"{PROXY}\n") and "127.0.0.1:8112 " in said
        workspace.enter("verifier")
        assert "8112" not in workspace.exec(ask).stdout
    with DockerWorkspace(Task(instruction="x", memory_mb=64, verifier_network="full"), docker_client) as workspace:
        with pytest.raises(WorkspaceError, match="separate"):
            workspace.enter("verifier")


@docker_engine
def test_an_allow_list_on_a_network_apart(docker_client, base_image):
    """Where no listener can be placed inside, the egress proxy is at the relay container's address."""
    with box(docker_client, Plan(Wire.INTERNAL, allowed=("site.test",), apart=True), enter=False) as made:
        there = made.network.variables["http_proxy"]
        assert there.startswith("http://198.1") and made.network.variables["NO_PROXY"].endswith(there[7:].split(":")[0])
        assert "403 Forbidden" in made.sh(f"http_proxy={there} wget -O- http://other.test/ 2>&1")
        assert made.network.egress.refused == {"other.test": 1}
