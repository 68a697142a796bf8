"""What a workspace's container may do: decided from its task, before any container exists. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from docker.types import LogConfig, Ulimit

from gyre_sdk.harness.task import Task

Phase = Literal["agent", "verifier"]
"""Whose workspace it is: the agent's, or the one that the evaluation runs in."""

SUPERVISOR_FOLDER = "/run/gyre"
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    # To unpack files of other owners (CHOWN, DAC_OVERRIDE, FOWNER, FSETID), to step down to a package manager's own user
    # (SETGID, SETUID), and to end that user's processes (KILL), without which they could outlive the run.
    "root": ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"),
}
_DEFAULT_USER = Task.__dataclass_fields__["user"].default


def user_of(task: Task, phase: Phase, image_user: str) -> str:
    """Return the user that commands run as; in the profile `root` that is root unless the task names another."""
    if phase == "verifier" and task.verifier_user:
        return task.verifier_user
    if task.profile == "root" and task.user in (None, _DEFAULT_USER):
        return "0:0"
    return task.user or image_user


def is_root(user: str) -> bool:
    """Tell whether a user (`name` or `uid[:gid]`) is root."""
    return user.partition(":")[0] in ("0", "root", "")


def memory_folders(task: Task, *, uid: str, workdir: str, read_only: bool) -> dict[str, str]:
    """Return folder -> mount options of what is kept in memory.

    Args:
        uid: `uid[:gid]` or a name that owns them; with a name they are everybody's, like /tmp.
    """
    numeric = [part for part in uid.split(":") if part.isdigit()]
    whose = f"uid={numeric[0]},gid={numeric[-1]},mode=755" if numeric else "mode=1777"
    size = f"size={task.disk_mb or max(64, task.memory_mb // 2)}m"
    folders = {
        SUPERVISOR_FOLDER: "rw,exec,size=64m,mode=1777",
        "/logs": f"rw,{whose},{size}",
        "/tests": f"rw,exec,{whose},{size}",
    }
    if read_only or task.disk_mb:
        folders[workdir] = f"rw,exec,{whose},{size}"
    if read_only:
        folders["/tmp"] = f"rw,exec,mode=1777,{size}"
    return folders


def host_settings(
    task: Task, *, network: Mapping[str, Any], memory: Mapping[str, str], read_only: bool, cpus_there: int
) -> dict[str, Any]:
    """Return the engine's limits for a task: bounded everything, nothing of the host, no new privileges.

    No host path is mounted, and the engine's default seccomp profile stays in force.

    Args:
        network: what belongs to the network, see `network.Network.settings`.
    """
    return {
        **network,
        "init": True,
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES[task.profile]) or None,
        "security_opt": ["no-new-privileges"],
        "pids_limit": task.pids,
        "mem_limit": f"{task.memory_mb}m",
        "memswap_limit": f"{task.memory_mb}m",
        "nano_cpus": int(min(task.cpus, cpus_there) * 1e9),
        "read_only": read_only,
        "ipc_mode": "none" if read_only else None,
        "tmpfs": dict(memory),
        "auto_remove": True,
        "runtime": task.runtime,
        "log_config": LogConfig(type="none"),
        "ulimits": [Ulimit(name="nofile", soft=8192, hard=8192), Ulimit(name="core", soft=0, hard=0)],
    }
