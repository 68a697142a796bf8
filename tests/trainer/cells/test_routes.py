"""What the proxy is told while replicas come and go: nobody waits for it who need not, and the newest table stands."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cells_kit import Toys, until

from gyre_sdk.errors import PublishError
from gyre_sdk.harness.service import ServiceClient

LONG = 60.0


class ToyProxy:
    """Keeps a table as the proxy does. What it is told takes effect when `go_on` of its route is set, or it dies of it."""

    def __init__(self) -> None:
        self.table: set[str] = set()
        """Replicas that calls are sent to."""
        self.asked: list[str] = []
        self.go_on = {"replicas": threading.Event(), "drain": threading.Event()}
        for event in self.go_on.values():
            event.set()
        self.dies = False
        toy = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self.tell()

            def do_POST(self) -> None:
                self.tell()

            def tell(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                route = self.path.rpartition("/")[2]
                toy.asked.append(route)
                if toy.dies:
                    toy.server.socket.close()
                    return
                assert toy.go_on[route].wait(LONG)
                if route == "drain":
                    toy.table.discard(body["url"])
                else:
                    toy.table = {row["url"] for row in body["replicas"]}
                self.send_response(200)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.client = ServiceClient(f"http://127.0.0.1:{self.server.server_port}", "the key of this test", patience=600)

    def close(self) -> None:
        for event in self.go_on.values():
            event.set()
        if not self.dies:
            self.server.shutdown()
            self.server.server_close()
        self.client.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Toys, ToyProxy]]:
    toys, proxy = Toys(tmp_path, 2), ToyProxy()
    toys.publisher.connect([toy.url for toy in toys.replicas], proxy.client)
    toys.publisher.start()
    proxy.asked.clear()
    yield toys, proxy
    proxy.close()
    toys.close()


def test_a_drain_holds_up_no_publication_and_comes_too_late_for_nobody(told: tuple[Toys, ToyProxy]) -> None:
    """A replica dies and is back, with new weights and announced, before the proxy has drained the one that it was."""
    (toys, proxy), urls = told, {toy.url for toy in told[0].replicas}
    proxy.go_on["drain"].clear()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(toys.publisher.lost, toys.replicas[0].url)
        until(lambda: proxy.asked, "the proxy is asked to drain it")
        assert toys.publisher.publish({}, step=1) == 1 and not lost.done()
        assert proxy.table == urls
        proxy.go_on["drain"].set()
        lost.result(LONG)
    assert proxy.asked == ["drain", "replicas", "replicas"] and proxy.table == urls


def test_a_table_that_is_on_its_way_brings_nobody_back(told: tuple[Toys, ToyProxy]) -> None:
    (toys, proxy), (first, second) = told, told[0].replicas
    proxy.go_on["replicas"].clear()
    with ThreadPoolExecutor(2) as pool:
        routed = pool.submit(toys.publisher.route)
        until(lambda: proxy.asked, "a table with both is on its way")
        withdrawn = pool.submit(toys.publisher.withdraw, first.url, 0.0)
        until(lambda: first.url not in toys.publisher._serving, "it is withdrawn")
        proxy.go_on["replicas"].set()
        routed.result(LONG)
        withdrawn.result(LONG)
    assert proxy.asked == ["replicas", "drain"] and proxy.table == {second.url}


def test_a_replica_that_dies_again_while_the_proxy_is_told_of_it_is_brought_again(told: tuple[Toys, ToyProxy]) -> None:
    (toys, proxy), toy = told, told[0].replicas[0]
    toys.publisher.lost(toy.url)
    proxy.go_on["replicas"].clear()
    toys.publisher.returned(toy.url)
    until(lambda: proxy.asked == ["drain", "replicas"], "it is brought, and the proxy is told")
    toy.asked.clear()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(toys.publisher.lost, toy.url)
        until(lambda: toy.url not in toys.publisher._serving, "it is gone again")
        toys.publisher.returned(toy.url)
        proxy.go_on["replicas"].set()
        lost.result(LONG)
    until(lambda: not toys.publisher._catching_up, "it is brought")
    assert toy.asked and proxy.table == {one.url for one in toys.replicas}


def test_a_proxy_that_dies_holds_up_a_drain_no_longer_than_the_drain_may_take(told: tuple[Toys, ToyProxy]) -> None:
    """Its client would wait ten minutes for it."""
    (toys, proxy), toy = told, told[0].replicas[0]
    proxy.dies = True
    with ThreadPoolExecutor(1) as pool:
        withdrawn = pool.submit(toys.publisher.withdraw, toy.url, 0.5)
        with pytest.raises(PublishError, match=r"was withdrawn, but the proxy was not told: .* did not answer"):
            withdrawn.result(LONG)
    assert proxy.asked == ["drain"] and toy.url not in toys.publisher._serving
