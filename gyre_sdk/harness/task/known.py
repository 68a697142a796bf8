"""Keys of task.toml that are no part of the format: ignored by every reader, so most likely a slip. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ANY: Mapping[str, Any] = {}
"""A table of any keys."""
_NETWORK = {"network_mode": None, "allowed_hosts": None}
_HEALTHCHECK = dict.fromkeys(("command", "interval_sec", "timeout_sec", "start_period_sec", "retries")) | {
    "start_interval_sec": None
}
_ENVIRONMENT: Mapping[str, Any] = {
    **_NETWORK,
    **dict.fromkeys(("build_timeout_sec", "docker_image", "os", "cpus", "gpus", "gpu_types", "workdir")),
    **dict.fromkeys(("memory_mb", "storage_mb", "memory", "storage", "allow_internet", "skills_dir", "tpu")),
    "env": _ANY,
    "mcp_servers": dict.fromkeys(("name", "transport", "url", "command", "args")) | {"headers": _ANY},
    "healthcheck": _HEALTHCHECK,
}
_AGENT = {**_NETWORK, "timeout_sec": None, "user": None}
_VERIFIER: Mapping[str, Any] = {
    **_NETWORK,
    **dict.fromkeys(("timeout_sec", "user", "environment_mode", "collect")),
    "env": _ANY,
    "environment": _ENVIRONMENT,
}
_FORMAT: Mapping[str, Any] = {
    **dict.fromkeys(("schema_version", "version", "source", "multi_step_reward_strategy", "artifacts")),
    "task": dict.fromkeys(("name", "version", "description", "authors", "keywords")),
    "metadata": _ANY,
    "environment": _ENVIRONMENT,
    "agent": _AGENT,
    "verifier": _VERIFIER,
    "solution": {"env": _ANY},
    "steps": {
        **dict.fromkeys(("name", "min_reward", "artifacts")),
        "agent": _AGENT,
        "verifier": _VERIFIER,
        "healthcheck": _HEALTHCHECK,
    },
}


def unknown_keys(values: Mapping[str, Any], known: Mapping[str, Any] = _FORMAT, prefix: str = "") -> list[str]:
    """Return the dotted names of keys that the format does not have."""
    found: list[str] = []
    for key, value in values.items():
        if key not in known:
            found.append(f"{prefix}{key}")
            continue
        below = known[key]
        if not below:
            continue
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, Mapping):
                found += unknown_keys(table, below, f"{prefix}{key}.")
    return list(dict.fromkeys(found))
