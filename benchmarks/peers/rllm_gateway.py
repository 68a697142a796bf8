"""`rllm-model-gateway` in front of an engine, with `sync_traces`: an answer waits for its trace in SQLite.

Run with the python of its own environment: `rllm_gateway.py ENGINE_URL STORE_FOLDER`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import uvicorn
from rllm_model_gateway import GatewayConfig, create_app


def main() -> None:
    """Serve until standard input ends; answer `lanes N` with N lanes."""
    engine, folder = sys.argv[1], Path(sys.argv[2])
    config = GatewayConfig(
        workers=[{"url": f"{engine}/v1", "model_name": "policy"}], db_path=str(folder / "gateway.db"), sync_traces=True
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(create_app(config), log_level="warning", access_log=False))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    print(json.dumps({"url": url}), flush=True)
    opened = 0
    for line in sys.stdin:
        count = int(line.split()[1])
        lanes = [{"base_url": f"{url}/sessions/s{opened + at}/v1", "key": "none"} for at in range(count)]
        opened += count
        print(json.dumps(lanes), flush=True)


if __name__ == "__main__":
    main()
