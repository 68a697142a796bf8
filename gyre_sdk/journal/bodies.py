"""Bodies by content: messages, raw items, answers and large parts of requests, each stored once.

What one write brings is one pack, compressed together: a message and the agent's own form of it are nearly the same
text. A pack may be compressed with the end of another one of its run before it (its base) as a dictionary, which
halves small packs; chains of bases are short, so that a body is read from a few packs at most.
"""

from __future__ import annotations

import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from gyre_sdk.errors import JournalError
from gyre_sdk.journal.blobs import body_digest, body_of, body_value, compress, decompress
from gyre_sdk.records import Sampling

DIGEST = 16
"""Bytes of a digest."""
LARGE = 96
"""Parts of a request whose JSON has more bytes are bodies of their own."""
_PART, _FIELDS = 1, 2
"""Codes of the msgpack extensions that stand for a part by its digest: one whose body is JSON, or msgpack again."""
_KNOWN = 100_000
"""Digests of bodies to keep in mind."""
_FROZEN, _LITTLE = 8192, 2048
"""Items whose digests are kept in mind at most, and bytes of each."""
_PACKS = 64
"""Packs to keep open while a run is read; they are read nearly in order."""
_WINDOW = 4096
"""Bytes of a base that serve as dictionary."""
_SMALL, _BIG = 256, 1 << 17
"""Packs below need no dictionary; those above gain nothing from one, and are compressed by whoever brings them."""
_CHAIN = 8
"""Packs in a chain of bases at most."""
_BASES = 2048
"""Runs whose last pack is kept in mind."""
_pack = msgspec.msgpack.Encoder().encode
_unpack_sampling = msgspec.msgpack.Decoder(Sampling).decode

Fresh = dict[bytes, bytes]
"""Bodies to store, by digest."""


class KnownBodies:
    """Which bodies are durable, so that a history is not written again for each call."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}
        self._digests: dict[int, tuple[Any, bytes]] = {}
        """Of frozen items, by their identity; each is kept alive by its entry."""

    def add(self, digests: Iterable[bytes]) -> None:
        """Keep in mind that bodies are durable."""
        if len(self._known) > _KNOWN:
            self._known = {}
        self._known.update(dict.fromkeys(digests))

    def digest(self, item: Any, fresh: Fresh) -> bytes:
        """Return the digest of a JSON value; put its body to `fresh` unless it is known."""
        digest, body = body_of(item)
        if digest not in self._known:
            fresh[digest] = body
        return digest

    def digests(self, items: Sequence[Any], fresh: Fresh) -> tuple[bytes, ...]:
        """Return the digests of JSON values."""
        return tuple([self.digest(item, fresh) for item in items])

    def frozen_digests(self, items: Sequence[Any], fresh: Fresh) -> tuple[bytes, ...]:
        """Return the digests of values; structs are frozen, so that one which comes again needs no hashing."""
        if len(self._digests) > _FROZEN:
            self._digests = {}
        digests, found = self._digests, []
        for item in items:
            entry = digests.get(id(item))
            if entry is None or entry[1] not in self._known:
                digest, body = body_of(item)
                entry = item, digest
                if digest not in self._known:
                    fresh[digest] = body
                if len(body) <= _LITTLE and isinstance(item, msgspec.Struct):
                    digests[id(item)] = entry
            found.append(entry[1])
        return tuple(found)

    def packed(self, value: Any, fresh: Fresh) -> bytes:
        """Return the digest of a value's msgpack."""
        body = _pack(value)
        digest = body_digest(body)
        if digest not in self._known:
            fresh[digest] = body
        return digest

    def request(self, request: dict[str, Any], fresh: Fresh) -> bytes:
        """Return a request as msgpack, its large parts (fields as sent, tools, schemas) as digests."""
        whole = _pack(request)
        if len(whole) <= _SMALL:
            return whole
        return _pack({key: self._part(value, fresh, 1) for key, value in request.items()})

    def _part(self, value: Any, fresh: Fresh, deeper: int) -> Any:
        if isinstance(value, dict) and deeper:
            value = {key: self._part(item, fresh, deeper - 1) for key, item in value.items()}
            return msgspec.msgpack.Ext(_FIELDS, self.packed(value, fresh)) if value else value
        if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > LARGE):
            digest, body = body_of(value)
            if len(body) > LARGE:
                if digest not in self._known:
                    fresh[digest] = body
                return msgspec.msgpack.Ext(_PART, digest)
        return value


class _Base(NamedTuple):
    pack: int
    end: bytes
    depth: int


class Packer:
    """Writes packs. Used by the writer's thread alone."""

    def __init__(self) -> None:
        self._bases: OrderedDict[str, _Base] = OrderedDict()

    def insert(self, db: sqlite3.Connection, run: str, fresh: Fresh, done: bytes | None) -> _Base | None:
        """Write bodies, unless all of them were stored in the meantime; `done` holds them compressed without a base."""
        whole = b"".join(fresh.values())
        base = self._bases.get(run) if done is None and len(whole) >= _SMALL else None
        packed = done or compress(whole, base.end if base else None)
        depth = base.depth + 1 if base else 0
        number = db.execute(
            "INSERT INTO pack (base, depth, body) VALUES (?,?,?)", (base.pack if base else None, depth, packed)
        ).lastrowid
        places: list[tuple[bytes, int | None, int, int]] = []
        at = 0
        for digest, body in fresh.items():
            places.append((digest, number, at, len(body)))
            at += len(body)
        stored = db.executemany("INSERT OR IGNORE INTO message VALUES (?,?,?,?)", places)
        if not stored.rowcount or number is None:
            db.execute("DELETE FROM pack WHERE pack=?", (number,))
            return None
        return _Base(number, whole[-_WINDOW:], depth)

    def keep(self, run: str, base: _Base | None) -> None:
        """Take a pack that was just stored as the next one's base."""
        if base is None or (len(base.end) < _SMALL and run in self._bases):
            return
        self._bases.pop(run, None)
        if base.depth + 1 < _CHAIN:
            self._bases[run] = base
            if len(self._bases) > _BASES:
                self._bases.popitem(last=False)

    def forget(self) -> None:
        """Forget bases that may not have become durable."""
        self._bases.clear()


def compress_early(fresh: Fresh) -> bytes | None:
    """Compress bodies that are too large for the writer's thread; None for others."""
    big = sum(map(len, fresh.values())) > _BIG
    return compress(b"".join(fresh.values())) if big else None


class StoredBodies:
    """Reads bodies, each once."""

    def __init__(self, rows: Callable[[str, Sequence[Any]], list[Any]]) -> None:
        self._rows = rows
        self._values: dict[bytes, Any] = {}
        self._open = lru_cache(_PACKS)(self._read_pack)
        self._request = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=self._extension).decode

    def value(self, digest: bytes) -> Any:
        """Return the JSON value of a body.

        Raises:
            JournalError: it is not in the store, or is damaged.
        """
        if digest not in self._values:
            try:
                self._values[digest] = body_value(self.body(digest))
            except msgspec.DecodeError as error:
                raise JournalError(f"message {digest.hex()} is damaged: {error}; run `gyre fsck`") from error
        return self._values[digest]

    def body(self, digest: bytes) -> bytes:
        """Return the bytes of a body.

        Raises:
            JournalError: it is not in the store, or its pack cannot be read.
        """
        found = self._rows("SELECT pack, start, size FROM message WHERE digest=?", (digest,))
        if not found:
            raise JournalError(f"message {digest.hex()} is not in the store; run `gyre fsck`")
        number, start, size = found[0]
        return self._open(number)[start : start + size]

    def request(self, blob: bytes) -> dict[str, Any]:
        """Return a request, whole."""
        return self._request(blob)

    def sampling(self, digest: bytes) -> Sampling:
        """Return the sampling parameters of a body."""
        if digest not in self._values:
            self._values[digest] = _unpack_sampling(self.body(digest))
        found: Sampling = self._values[digest]
        return found

    def _extension(self, code: int, data: memoryview) -> Any:
        digest = bytes(data)
        if code == _PART:
            return self.value(digest)
        if code == _FIELDS:
            return self._request(self.body(digest))
        raise JournalError(f"a request holds an unknown extension {code}; use the gyre that wrote it")

    def _read_pack(self, number: int) -> bytes:
        found = self._rows("SELECT base, body FROM pack WHERE pack=?", (number,))
        if not found:
            raise JournalError(f"pack {number} of messages is not in the store; run `gyre fsck`")
        base, packed = found[0]
        if base is not None and base >= number:
            raise JournalError(f"pack {number} of messages is based on a later one; run `gyre fsck`")
        try:
            return decompress(packed, None if base is None else self._open(base)[-_WINDOW:])
        except ValueError as error:
            raise JournalError(f"pack {number} of messages is damaged: {error}; run `gyre fsck`") from error


def split_digests(blob: bytes) -> tuple[bytes, ...]:
    """Return the digests of a blob."""
    return tuple([blob[at : at + DIGEST] for at in range(0, len(blob), DIGEST)])
