"""Server-sent events: bytes in, events out, at any split; and the other way round.

Follows the event stream format of the HTML standard (section 9.2.6). Lines end at CR LF, LF or CR and nowhere else:
U+2028 is text. Bytes are decoded only once an event is whole, so a character cut by a network read stays whole.
"""

from __future__ import annotations

from typing import NamedTuple

from gyre_sdk.errors import ReplicaError

_BOM = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One dispatched event."""

    data: bytes
    """Payload; the lines of a multi-line event are joined by LF. UTF-8."""
    event: str = "message"


class SseDecoder:
    """Incremental decoder. `feed` returns the events that are complete; `close` the one that the end completes.

    Raises:
        ReplicaError: an event grows beyond `limit` bytes.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self._buffer = b""
        self._data: list[bytes] = []
        self._event = ""
        self._limit = limit
        self._started = False
        self._held = 0

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Take bytes as they come; return the events that they complete."""
        self._buffer += chunk
        if not self._started:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._started = True
            self._buffer = self._buffer.removeprefix(_BOM)
        return self._lines(final=False)

    def close(self) -> list[SseEvent]:
        """End the stream. An event whose closing blank line is missing is still given if its data line is whole."""
        events = self._lines(final=True)
        if self._buffer:
            self._field(self._buffer)
            self._buffer = b""
        self._dispatch(events)
        return events

    def _lines(self, *, final: bool) -> list[SseEvent]:
        events: list[SseEvent] = []
        buffer = self._buffer
        if b"\r" in buffer:
            keep = b""
            if buffer.endswith(b"\r") and not final:
                buffer, keep = buffer[:-1], b"\r"
            buffer = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        else:
            keep = b""
        if not self._data and not self._event and buffer.startswith(b"data: "):
            buffer = self._plain_events(buffer, events)
        *lines, rest = buffer.split(b"\n")
        for line in lines:
            if line:
                self._field(line)
            else:
                self._dispatch(events)
        self._buffer = rest + keep
        if len(self._buffer) + self._held > self._limit:
            raise ReplicaError(f"an event of the stream is larger than {self._limit} bytes")
        return events

    @staticmethod
    def _plain_events(buffer: bytes, events: list[SseEvent]) -> bytes:
        """Take whole one-line data events off the front: nearly all there are. Return the rest."""
        at = 0
        while buffer.startswith(b"data: ", at):
            end = buffer.find(b"\n", at)
            if end < 0 or not buffer.startswith(b"\n", end + 1):
                break
            events.append(SseEvent(buffer[at + 6 : end]))
            at = end + 2
        return buffer[at:]

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._held += len(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")

    def _dispatch(self, events: list[SseEvent]) -> None:
        if self._data:
            events.append(SseEvent(b"\n".join(self._data), self._event or "message"))
        self._data, self._event, self._held = [], "", 0


def encode_data(data: bytes) -> bytes:
    """Return an event that carries `data`, which holds no line end (JSON never does)."""
    return b"data: " + data + b"\n\n"


def encode_event(event: SseEvent) -> bytes:
    """Return the bytes of any event, also one with several lines."""
    head = b"" if event.event == "message" else b"event: " + event.event.encode() + b"\n"
    body = event.data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return head + b"".join(b"data: " + line + b"\n" for line in body.split(b"\n")) + b"\n"


def encode_comment(text: str) -> bytes:
    """Return a comment, which every client skips: a heartbeat."""
    return f": {text}\n\n".encode()
