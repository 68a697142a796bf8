"""`LLMProxy` of `agentlightning` in front of an engine, with its in-memory store, both in one process.

Run with the python of its own environment: `agentlightning_proxy.py ENGINE_URL STORE_FOLDER`. Answers `lanes N` with N
lanes, a rollout each, and `recorded` with the number of calls that the store holds in memory.

The proxy's other launch mode, a process of its own that sends spans to the store over HTTP, does strictly more work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from typing import Any

_SPAN = "raw_gen_ai_request"
"""Name of the span that holds a call's request and answer, token ids included."""


def _say(value: Any) -> None:
    print("\n" + json.dumps(value), flush=True)


async def serve(engine: str) -> None:
    """Serve until standard input ends."""
    from agentlightning import LLMProxy
    from agentlightning.store.memory import InMemoryLightningStore

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    store, rollouts = InMemoryLightningStore(thread_safe=True), []
    parameters = {"model": "hosted_vllm/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    models = [{"model_name": "policy", "litellm_params": parameters}]
    proxy = LLMProxy(port=port, host="127.0.0.1", model_list=models, store=store, launch_mode="thread")
    await proxy.start()
    _say({"url": f"http://127.0.0.1:{port}"})
    while line := (await asyncio.to_thread(sys.stdin.readline)).split():
        if line[0] == "recorded":
            spans = [await store.query_spans(rollout) for rollout in rollouts]
            _say(sum(span.name == _SPAN for found in spans for span in found))
            continue
        lanes = []
        for _ in range(int(line[1])):
            rollout = await store.start_rollout(input={"task": "bench"})
            rollouts.append(rollout.rollout_id)
            path = f"rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}"
            lanes.append({"base_url": f"http://127.0.0.1:{port}/{path}/v1", "key": "none"})
        _say(lanes)


if __name__ == "__main__":
    os.environ["LITELLM_LOG"] = "ERROR"
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    logging.disable(logging.WARNING)
    asyncio.run(serve(sys.argv[1]))
