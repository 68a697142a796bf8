"""Request bodies: every coding gives the body back, what is broken is said so, and no bomb is unpacked."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import brotli
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from proxy_engine import say
from test_fidelity_cases import scripted

from gyre_sdk.errors import ProtocolError
from gyre_sdk.harness.proxy.server.bodies import _decoded

zstd = pytest.importorskip("backports.zstd")
PLAIN = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":5}'
LIMIT = 1 << 22
CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
    "br": lambda data: brotli.compress(data, quality=4),
}


@pytest.mark.parametrize("coding", CODERS)
@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=300), times=st.integers(1, 20_000), cut=st.integers(1, 40), junk=st.binary(min_size=1))
def test_codings_round_trip_and_damage_is_seen(coding: str, data: bytes, times: int, cut: int, junk: bytes) -> None:
    plain = data * times
    packed = CODERS[coding](plain)
    if len(plain) > LIMIT:
        with pytest.raises(ProtocolError, match="larger than"):
            _decoded(packed, coding, LIMIT)
        return
    assert _decoded(packed, coding, LIMIT) == plain
    for broken in (packed[: max(len(packed) - cut, 0)], packed + b"\x01" + junk):
        with pytest.raises(ProtocolError, match="corrupt") as caught:
            _decoded(broken, coding, LIMIT)
        assert caught.value.status == 400


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_may_follow_each_other_but_not_for_ever(coding: str) -> None:
    pack = CODERS[coding]
    assert _decoded(pack(b"a" * 100_000) + pack(b"") + pack(b"b"), coding, LIMIT) == b"a" * 100_000 + b"b"
    with pytest.raises(ProtocolError, match="members"):
        _decoded(pack(b"") * 100_000, coding, LIMIT)


@pytest.mark.parametrize("coding", CODERS)
def test_a_bomb_takes_no_more_memory_than_the_limit(coding: str) -> None:
    bomb = CODERS[coding](b"a" * (1 << 28))
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            _decoded(bomb, coding, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 4 * LIMIT


def test_codings_through_the_wire(model: Path, tmp_path: Path) -> None:
    """Each coding, two of them in turn, and the same turn for all transports of one body."""
    nested = gzip.compress(brotli.compress(PLAIN))
    with scripted(model, tmp_path, {}, say(104, 260), max_body=LIMIT) as (proxy, engine):
        for coding, body in [
            *((name, pack(PLAIN)) for name, pack in CODERS.items()),
            ("br, gzip", nested),
            ("BR", brotli.compress(PLAIN)),
            ("gzip, identity", gzip.compress(PLAIN)),
        ]:
            answer = proxy.chat(proxy.run(), body, **{"Content-Encoding": coding})
            assert answer.status_code == 200, (coding, answer.text)
        assert len({tuple(generation.prompt) for generation in engine.log}) == 1
        with proxy.journal() as journal:
            digests = [item.request["digest"] for run in journal.runs() for item in journal.exchanges(run.run)]
        assert len(set(digests)) == 1
        access = proxy.run()
        refused = {"gzip, " * 4 + "gzip": 415, "lzma": 415, "br": 400}
        for coding, status in refused.items():
            answer = proxy.chat(access, PLAIN, **{"Content-Encoding": coding})
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        bomb = brotli.compress(b" " * (1 << 26))
        for coding, body in (
            ("br", bomb),
            ("br, gzip", gzip.compress(bomb)),
            ("gzip", gzip.compress(b" " * (1 << 26))),
        ):
            assert proxy.chat(access, body, **{"Content-Encoding": coding}).status_code == 413
