"""The ready tools: bash, read, write, edit, submit."""

from __future__ import annotations

import shlex
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gyre_sdk.errors import WorkspaceError, WorkspaceUnavailable
from gyre_sdk.harness.ports import Workspace
from gyre_sdk.harness.tools.clip import clip
from gyre_sdk.harness.tools.tool import Tool, ToolOutput
from gyre_sdk.records import ExecResult

DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 600.0
READ_LINES = 2000
READ_CHARS = 29_000
MAX_FILE_BYTES = 4 << 20
_SHOWN = 12_000
"""Characters shown of each of a command's outputs, when both are long."""

Path = Annotated[str, Meta(min_length=1, description="Path of the file, absolute or from the working directory.")]


class Bash(msgspec.Struct, forbid_unknown_fields=True):
    """Input of `bash`."""

    command: Annotated[str, Meta(min_length=1, description="What to run.")]
    timeout_s: Annotated[
        float,
        Meta(gt=0, le=MAX_TIMEOUT_S, description=f"Seconds after which it is killed (default {DEFAULT_TIMEOUT_S:g})."),
    ] = DEFAULT_TIMEOUT_S


class Read(msgspec.Struct, forbid_unknown_fields=True):
    """Input of `read`."""

    path: Path
    offset: Annotated[int, Meta(ge=1, description="First line to show, from 1.")] = 1
    limit: Annotated[int, Meta(ge=1, description=f"Lines to show at most (default {READ_LINES}).")] = READ_LINES


class Write(msgspec.Struct, forbid_unknown_fields=True):
    """Input of `write`."""

    path: Path
    content: Annotated[str, Meta(description="The whole content.")]


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """Input of `edit`."""

    path: Path
    old_string: Annotated[str, Meta(min_length=1, description="Text that is in the file exactly once.")]
    new_string: Annotated[str, Meta(description="Text to put in its place.")]


class Submit(msgspec.Struct, forbid_unknown_fields=True):
    """Input of `submit`."""

    answer: Annotated[str, Meta(description="The answer, or what was done.")] = ""


def bash(workspace: Workspace, given: Bash) -> ToolOutput:
    """Run a command; each call is a shell of its own."""
    done = workspace.exec(given.command, timeout=given.timeout_s)
    return ToolOutput(shown(done, given.timeout_s), done.exit_code != 0, done)


def shown(done: ExecResult, timeout_s: float) -> str:
    """Return a command's outputs and end as a model is shown them."""
    room = _SHOWN if len(done.stdout) > _SHOWN and len(done.stderr) > _SHOWN else READ_CHARS
    parts = [clip(done.stdout.rstrip("\n"), room)] if done.stdout.strip() else []
    if done.stderr.strip():
        parts.append(f"[stderr]\n{clip(done.stderr.rstrip(chr(10)), room)}")
    if done.timed_out:
        parts.append(f"[killed after {timeout_s:g} s, its time limit]")
    elif done.exit_code != 0:
        parts.append(f"[exit code {done.exit_code}]")
    return "\n".join(parts) or "[no output, exit code 0]"


def read(workspace: Workspace, given: Read) -> ToolOutput:
    """Show a file, or some lines of it."""
    found = _file(workspace, given.path)
    if isinstance(found, ToolOutput):
        return found
    data = found.data
    if b"\0" in data[:8192]:
        return ToolOutput(f"{given.path} is not text ({len(data):,} bytes)", is_error=True)
    lines = data.decode(errors="replace").splitlines(keepends=True)
    if not lines:
        return ToolOutput(f"[{given.path} is empty]")
    if given.offset > len(lines):
        return ToolOutput(f"{given.path} ends with line {len(lines)}; there is no line {given.offset}", is_error=True)
    chosen = lines[given.offset - 1 : given.offset - 1 + given.limit]
    text = clip("".join(chosen), READ_CHARS)
    if len(chosen) < len(lines):
        text += f"\n[lines {given.offset} to {given.offset - 1 + len(chosen)} of {len(lines)}]"
    return ToolOutput(text)


def write(workspace: Workspace, given: Write) -> ToolOutput:
    """Create or replace a file; one that starts with `#!` is executable."""
    failed = _save(workspace, given.path, given.content.encode(), 0o755 if given.content.startswith("#!") else 0o644)
    return failed or ToolOutput(f"wrote {len(given.content.encode()):,} bytes to {given.path}")


def edit(workspace: Workspace, given: Edit) -> ToolOutput:
    """Replace a text that a file holds exactly once."""
    if given.old_string == given.new_string:
        return ToolOutput("old_string and new_string are the same: nothing to do", is_error=True)
    file = _file(workspace, given.path)
    if isinstance(file, ToolOutput):
        return file
    data, old = file.data, given.old_string.encode()
    found = _occurrences(data, old)
    if found == 0:
        return ToolOutput(
            f"{given.path} does not hold old_string; read the file and give it exactly, spaces and line ends too",
            is_error=True,
        )
    if found > 1:
        return ToolOutput(
            f"{given.path} holds old_string {found} times; give more of what is around it, so that it is there once",
            is_error=True,
        )
    line = data[: data.index(old)].count(b"\n") + 1
    failed = _save(workspace, given.path, data.replace(old, given.new_string.encode()), file.mode)
    return failed or ToolOutput(f"edited {given.path} at line {line}")


def submit(workspace: Workspace, given: Submit) -> ToolOutput:
    """Hand in."""
    return ToolOutput("handed in", submitted=given.answer)


class _File(NamedTuple):
    data: bytes
    mode: int


def _file(workspace: Workspace, path: str) -> _File | ToolOutput:
    """Return a file, or why it cannot be read; a huge one is never fetched."""
    quoted = shlex.quote(path)
    seen = workspace.exec(f"[ -f {quoted} ] && wc -c < {quoted} && {{ [ ! -x {quoted} ] || echo x; }}", timeout=60.0)
    size, _, executable = seen.stdout.strip().partition("\n")
    if size.isdigit() and int(size) > MAX_FILE_BYTES:
        told = f"{path} is too large to read ({int(size):,} bytes); look at parts of it with bash (head, sed, grep)"
        return ToolOutput(told, is_error=True)
    try:
        return _File(workspace.read(path), 0o755 if executable else 0o644)
    except WorkspaceUnavailable:
        raise
    except WorkspaceError as error:
        return ToolOutput(f"{path} cannot be read: {error}", is_error=True)


def _save(workspace: Workspace, path: str, data: bytes, mode: int = 0o644) -> ToolOutput | None:
    try:
        workspace.write(path, data, mode=mode)
    except WorkspaceUnavailable:
        raise
    except WorkspaceError as error:
        return ToolOutput(f"{path} cannot be written: {error}", is_error=True)
    return None


def _occurrences(data: bytes, text: bytes) -> int:
    """Count where a text begins, overlapping ones too: any of them would be a different edit."""
    count, at = 0, data.find(text)
    while at >= 0:
        count, at = count + 1, data.find(text, at + 1)
    return count


BUILT_IN = (
    Tool(
        "bash", "Run a shell command. Each call starts in the working directory; nothing but files is kept.", Bash, bash
    ),
    Tool("read", "Show a text file, whole or some lines of it.", Read, read),
    Tool("write", "Create a file, or replace all of it.", Write, write),
    Tool("edit", "Replace a text that a file holds exactly once.", Edit, edit),
    Tool("submit", "Hand in when the task is done; nothing can be done after it.", Submit, submit),
)
"""What `agent.tools` offers."""
