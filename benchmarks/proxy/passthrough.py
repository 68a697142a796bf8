"""A bare pass-through that records nothing: aiohttp in front, aiohttp behind, bytes between. The yardstick.

Run as a process: `passthrough.py ENGINE_URL` prints `{"url": ...}`; each line `lanes N` is answered with N lanes.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
from aiohttp import web


async def serve(engine: str) -> None:
    """Relay until standard input ends."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def relay(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{engine}{request.path}", data=body, headers=headers) as answer:
                kind = {"Content-Type": answer.headers["Content-Type"]}
                if "text/event-stream" not in kind["Content-Type"]:
                    return web.Response(body=await answer.read(), status=answer.status, headers=kind)
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post("/v1/chat/completions", relay)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        print(json.dumps({"url": url}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            lanes = [{"base_url": f"{url}/v1", "key": "none"}] * int(line.split()[1])
            print(json.dumps(lanes), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
