"""A stub engine: answers every wire that a proxy of the comparison asks for, always with the same tokens.

Run as a process: prints `{"url": ...}`. `/inference/v1/generate` streams ids as vLLM does; `/v1/chat/completions` answers
text, with ids and log-probs where `return_token_ids` and `logprobs` ask for them. `max_tokens` 64 asks for the answer of 64
chunks, fewer for as many of its last: what a call that was cut still wants. `PUT /pause/N` puts N milliseconds between these
from then on, also in answers that have begun.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from proxy.wires import Serving

STREAMED = 64
"""Tokens, one per chunk, of the answers that the latency section streams."""


class Stub:
    """Serves `tokens` fixed tokens, `chunk` at a time, and a stop.

    Args:
        ids: the sampled tokens; the last one ends the turn.
        pieces: their texts, the last one empty.
        chunk: tokens per event of a streamed answer.
    """

    def __init__(self, ids: list[int], pieces: list[str], chunk: int) -> None:
        self.ids, self.pieces = ids, pieces
        self.events = self._events(ids, chunk)
        self.pause = 0
        self._answers: dict[tuple[int, bool, bool], bytes] = {}
        self.streamed_events = self._events(self._stretched(ids), 1)

    async def answer(self, method: str, path: str, body: bytes, connection: Serving) -> None:
        """Answer one request."""
        if path == "/inference/v1/generate":
            await self._generate(body, connection)
        elif path == "/v1/chat/completions":
            await self._chat(json.loads(body), connection)
        elif path.startswith("/pause/") and method == "PUT":
            self.pause = int(path.removeprefix("/pause/"))
            connection.write(_whole(b""))
        elif path == "/v1/models":
            connection.write(_whole(b'{"object": "list", "data": [{"id": "policy", "object": "model"}]}'))
        elif path == "/health":
            connection.write(_whole(b""))
        else:
            connection.write(_whole(b'{"error": "no such path"}', "404 Not Found"))

    async def _generate(self, body: bytes, connection: Serving) -> None:
        sampling = json.loads(body)["sampling_params"] if len(body) < 1 << 16 else {}
        wanted = sampling.get("max_tokens") or 0
        if 0 < wanted <= STREAMED:
            await _stream(connection, self.streamed_events[-wanted:], lambda: self.pause)
        else:
            await _stream(connection, self.events, lambda: 0)

    async def _chat(self, body: dict[str, Any], connection: Serving) -> None:
        if body.get("stream"):
            ids = self._stretched(self.ids)
            texts = [self.pieces[at % (len(self.pieces) - 1)] for at in range(len(ids) - 1)] + [""]
            await _stream(connection, _chat_events(ids, texts, body), lambda: self.pause)
            return
        prompt = sum(len(str(message.get("content"))) for message in body["messages"]) // 4
        wants_ids = bool(body.get("return_token_ids") or (body.get("extra_body") or {}).get("return_token_ids"))
        connection.write(_whole(self._answer(prompt, wants_ids, bool(body.get("logprobs")))))

    def _answer(self, prompt: int, wants_ids: bool, wants_logprobs: bool) -> bytes:
        key = (prompt, wants_ids, wants_logprobs)
        if key not in self._answers:
            self._answers[key] = self._make_answer(*key)
        return self._answers[key]

    def _make_answer(self, prompt: int, wants_ids: bool, wants_logprobs: bool) -> bytes:
        message = {"role": "assistant", "content": "".join(self.pieces)}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None}
        body: dict[str, Any] = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "policy"}
        if wants_logprobs:
            choice["logprobs"] = {"content": [_chat_logprob(piece) for piece in self.pieces]}
        if wants_ids:
            choice["token_ids"] = self.ids
            body["prompt_token_ids"] = [1000 + at % 5000 for at in range(prompt)]
        usage = {"prompt_tokens": prompt, "completion_tokens": len(self.ids), "total_tokens": prompt + len(self.ids)}
        return json.dumps({**body, "choices": [choice], "usage": usage}).encode()

    @staticmethod
    def _stretched(ids: list[int]) -> list[int]:
        return [ids[at % (len(ids) - 1)] for at in range(STREAMED - 1)] + ids[-1:]

    @staticmethod
    def _events(ids: list[int], chunk: int) -> list[bytes]:
        events = []
        for at in range(0, len(ids), chunk):
            part, last = ids[at : at + chunk], at + chunk >= len(ids)
            content = [{"token_id": i, "logprob": -1.5, "rank": 1, "top_logprobs": []} for i in part]
            choice = {
                "index": 0,
                "token_ids": part,
                "logprobs": {"content": content},
                "finish_reason": "stop" if last else None,
                "stop_reason": None,
                "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}] if last else None,
            }
            events.append(b"data: " + json.dumps({"request_id": "x", "choices": [choice]}).encode() + b"\n\n")
        return events


def _chat_logprob(piece: str) -> dict[str, Any]:
    return {"token": piece, "logprob": -1.5, "bytes": list(piece.encode()), "top_logprobs": []}


def _chat_events(ids: list[int], texts: list[str], body: dict[str, Any]) -> list[bytes]:
    events = []
    for at, (number, text) in enumerate(zip(ids, texts, strict=True)):
        last = at == len(ids) - 1
        delta = {"role": "assistant", "content": text} if not at else {"content": text}
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": "stop" if last else None}
        if body.get("return_token_ids"):
            choice["token_ids"] = [number]
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_chat_logprob(text)]}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "policy", "choices": [choice]}
        events.append(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    return events


def _whole(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _stream(connection: Serving, events: list[bytes], pause: Callable[[], int]) -> None:
    """Send events, each by itself, as many milliseconds apart as `pause` says each time."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    for item in (*events, b"data: [DONE]\n\n"):
        connection.write(head + b"%x\r\n%b\r\n" % (len(item), item))
        head = b""
        if milliseconds := pause():
            await asyncio.sleep(milliseconds / 1000)
    connection.write(b"0\r\n\r\n")


async def _serve(stub: Stub) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Serving(stub.answer), "127.0.0.1", 0, backlog=2048)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", required=True, help="JSON list")
    parser.add_argument("--pieces", required=True, help="JSON list: the ids' texts")
    parser.add_argument("--chunk", type=int, default=8)
    options = parser.parse_args()
    asyncio.run(_serve(Stub(json.loads(options.ids), json.loads(options.pieces), options.chunk)))


if __name__ == "__main__":
    main()
