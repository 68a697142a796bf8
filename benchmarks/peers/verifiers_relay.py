"""The interception server of `verifiers` v1 with its relay client in front of an engine. It keeps traces in memory.

Run with the python of its own environment: `verifiers_relay.py ENGINE_URL STORE_FOLDER`. Answers `lanes N` with N lanes, a
session each, and `recorded` with the number of calls that its traces hold in memory.
"""

from __future__ import annotations

import asyncio
import json
import sys

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig


def _trace() -> Trace:
    return Trace(task=TraceTask(type="Bench", data=TaskData()), agent=AgentInfo(config=AgentConfig()))


async def serve(engine: str) -> None:
    """Serve until standard input ends."""
    client = EvalClientConfig(base_url=f"{engine}/v1", api_key_var="BENCH_API_KEY")
    context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
    async with InterceptionServer() as server:
        print(json.dumps({"url": server.base_url}), flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).split():
            if line[0] == "recorded":
                print(json.dumps(sum(len(session.trace.calls) for session in server.sessions.values())), flush=True)
                continue
            lanes = []
            for _ in range(int(line[1])):
                key, _ = server.register(RolloutSession(ctx=context, trace=_trace()))
                lanes.append({"base_url": f"{server.base_url}/v1", "key": key})
            print(json.dumps(lanes), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
