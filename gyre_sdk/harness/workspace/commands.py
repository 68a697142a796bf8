"""What is sent to run a command, and what is made of what came back. Pure."""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Mapping

from gyre_sdk.errors import CommandFailed, WorkspaceError
from gyre_sdk.harness.workspace.output import clip
from gyre_sdk.records import ExecResult

INLINE = 32_768
"""Scripts up to this many bytes travel as lines, longer ones as a file."""
KILLED = 137
"""Exit code of what was killed, as shells count it: 128 and the signal's number."""
_ENV_ONE, _ENV_ALL = 131_071, 1 << 20
"""Bytes of one variable that Linux takes, and of all that it takes at any usual limit on stacks."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Kept = tuple[bytes, int | None]
"""What was captured of an output, and how many bytes of it were not (None: nobody counted)."""


def script_of(cmd: str) -> bytes:
    """Return a command as the file that a shell runs. Shells differ in what a backslash at the very end of one means."""
    return f"{cmd}\n".encode(errors="surrogateescape")


def entry(folder: str, otherwise: str) -> str:
    """Return lines of shell code that enter `folder`, or run `otherwise` and exit."""
    return f"cd -- {shlex.quote(folder)} 2>/dev/null || {{ {otherwise}; exit; }}\nunset OLDPWD\n"


def exports(env: Mapping[str, str]) -> str:
    """Return lines of shell code that export `env`. They change the shell that runs them: nothing but a command comes after.

    A shell would end at a variable of its own that cannot be changed, like bash's UID; as a `command`, export only complains.

    Raises:
        WorkspaceError: a variable cannot be set.
    """
    code = ""
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or "\0" in value:
            raise WorkspaceError(f"environment variable {name!r} cannot be set; use letters, digits and _ only")
        code += f"command export {name}={shlex.quote(value)}\n"
    sizes = {name: len(f"{name}={value}".encode(errors="surrogateescape")) for name, value in env.items()}
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if sizes and (sizes[largest] > _ENV_ONE or sum(sizes.values()) > _ENV_ALL):
        raise WorkspaceError(
            f"an environment of {sum(sizes.values())} bytes, of which {largest!r} has {sizes[largest]}, cannot be given to a"
            f" command; the limits are {_ENV_ALL} and {_ENV_ONE} for one variable: pass it as input, or in a file"
        )
    return code


def launching(
    id: str, slot: str, script: bytes, *, shell: str, entering: str, reads: bool, mark: str
) -> tuple[str, bool]:
    """Return (code that launches a script by the supervisor, whether the script is a file of its own).

    Args:
        slot: name of the command's files in the supervisor's folder: `.s` its script, `.in` its input.
        entering: what enters its folder and exports its variables, see `entry` and `exports`.
        reads: whether there is an input file.
        mark: what a launcher's events carry.
    """
    long = len(script) > INLINE or b"\0" in script
    code = f"enter() {{\n{entering}}}\n"
    if not long:
        text = shlex.quote(script.decode(errors="surrogateescape"))
        code += f'printf %s {text} >"$D/{slot}.s" || {{ say fail {id} room; exit; }}\n'
    return code + f'launch {id} {slot} {shell} "{f"$D/{slot}.in" if reads else ""}" {mark}', long


def sent_along(done: str | None) -> tuple[Kept, Kept] | None:
    """Return the outputs that the event of a command's end (None: it never came) holds itself; None when they are in files."""
    if done is None or done == "1":
        return None
    if done == "0":
        return (b"", 0), (b"", 0)
    out, _, err = done.partition(" ")
    return (base64.b64decode(out[1:]), 0), (base64.b64decode(err[1:]), 0)


def result_of(
    out: Kept,
    err: Kept,
    limit: int,
    *,
    status: int | None,
    timed_out: bool = False,
    oom_killed: bool = False,
    duration_s: float = 0.0,
) -> ExecResult:
    """Return the result of a command that ended with `status`, or was killed (None)."""
    (stdout, cut_out), (stderr, cut_err) = clip(*out, limit), clip(*err, limit)
    texts = stdout.decode(errors="replace"), stderr.decode(errors="replace")
    exact = texts[0].encode() == stdout and texts[1].encode() == stderr
    return ExecResult(
        exit_code=KILLED if timed_out or status is None else status,
        stdout=texts[0],
        stderr=texts[1],
        timed_out=timed_out,
        truncated=cut_out or cut_err,
        duration_s=duration_s,
        stdout_total=_total(out),
        stderr_total=_total(err),
        oom_killed=oom_killed,
        undecoded=None if exact else (stdout, stderr),
    )


def checked(cmd: str, result: ExecResult, check: bool) -> ExecResult:
    """Return the result.

    Raises:
        CommandFailed: it is to be checked, and its exit code is not 0.
    """
    if check and result.exit_code != 0:
        raise CommandFailed(cmd, result)
    return result


def _total(kept: Kept) -> int | None:
    content, lost = kept
    return None if lost is None else len(content) + lost
