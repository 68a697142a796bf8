"""What can steer an evaluation without being asked to, and what of it a run changed. Pure.

Programs load some files by themselves: pytest its `conftest.py`, Python `sitecustomize` and `.pth` files, shells their startup
files, git its hooks and its configuration. Planted in a workspace they would run inside the evaluation, with its rights. So
they are listed when the run starts (the *seal*) and again before the evaluation; what is new is taken away, what was changed is put
back. What tests load on purpose, the code that they test, is the agent's work and is not touched.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Watched(StrEnum):
    """Why a path is watched; the value is its mark in a listing."""

    STEERING = "steering"
    """Loaded by programs of an evaluation by themselves."""
    SECTION = "section"
    """Has a section that steers pytest, and much else that does not."""
    PROGRAM = "program"
    """In a folder of PATH that the agent can write to."""
    PROTECTED = "protected"
    """Named by the task."""
    TESTS = "tests"
    """The tests have a file of that name, and may overwrite it."""
    SETUID = "setuid"


STEERING = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "sitecustomize*",
    "usercustomize*",
    "*.pth",
    ".coveragerc",
    ".npmrc",
    ".yarnrc*",
    ".mocharc*",
    ".rspec",
)
"""Names, anywhere below the working directory."""
STEERING_PATHS = (
    "*/.git/config",
    "*/.git/config.worktree",
    "*/.git/hooks/*",
    "*/.git/info/attributes",
    "*/.cargo/config",
    "*/.cargo/config.toml",
)
STARTUP = (
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".profile",
    ".shrc",
    ".kshrc",
    ".zshrc",
    ".zshenv",
    ".zprofile",
    ".inputrc",
    ".gitconfig",
    ".pydistutils.cfg",
)
"""Names directly in a home folder."""
RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "unittest", "nose", "nose2", "xdist", "pytest_*")
"""Python modules of test programs: one of that name in the working directory would be found before the real one."""
SECTIONED = ("pyproject.toml", "setup.cfg", "tox.ini")
CONTENT_LIMIT = 65_536
"""Bytes up to which the seal keeps a file's content, to put it back."""


class Kept(msgspec.Struct, frozen=True):
    """A small file, or a link, as it was when the run started."""

    mode: int
    data: bytes = b""
    link: str | None = None
    """Target of a link."""


class Seal(msgspec.Struct, frozen=True):
    """What was there when the run started."""

    workdir: str
    homes: tuple[str, ...]
    path: tuple[str, ...]
    """Folders of PATH that the agent can write to, or could make."""
    programs: frozenset[str]
    """Names of the programs on PATH."""
    files: dict[str, dict[str, str]]
    """Why watched -> path -> `sha256:...`, `link:target` or `other`."""
    contents: dict[str, Kept] = {}
    """Path -> the small ones, to put them back."""
    leads: tuple[str, ...] = ()
    """Links into the tests or the reward, see `links`."""


class Do(StrEnum):
    """What is done about a change."""

    REMOVE = "taken away"
    PUT_BACK = "put back"
    SECTION = "its section for pytest put back"
    UNSET = "its setuid bit cleared"
    REPORT = "reported"


@dataclass(frozen=True, slots=True)
class Change:
    """Something that the run changed."""

    path: str
    why: Watched
    how: str
    """`planted`, `changed` or `deleted`."""
    do: Do

    def __str__(self) -> str:
        return f"{self.why} {self.path}: {self.how}; {self.do}"


def listing(
    workdir: str, homes: Iterable[str], path: Iterable[str], protected: Iterable[str], tests: Iterable[str]
) -> str:
    """Return the shell script that lists the watched paths, base64 of NUL-ended records; `parse` reads it.

    Records: `=<why>` starts a group; `<sha256>  <path>` is a file; `<path>` is something else, and, followed by
    `@<target>`, a link. A path with a line break is taken away where it lies: nothing honest is called so.
    """
    work = shlex.quote(workdir)
    named = _any(_names(STEERING), _paths(STEERING_PATHS), ["-name .git ! -type d"])
    lines = [f"look {Watched.STEERING} {work} \\( ! -name '*.sample' {named} \\)"]
    runners = _any(_names([*RUNNERS, *(f"{name}.*" for name in RUNNERS)]))
    lines.append(f"look {Watched.STEERING} {work} -mindepth 1 -maxdepth 1 {runners}")
    for home in homes:
        place = shlex.quote(home)
        lines.append(f"look {Watched.STEERING} {place} -mindepth 1 -maxdepth 1 {_any(_names(STARTUP))}")
        if home != workdir:
            lines.append(
                f"look {Watched.STEERING} {place}/.local/lib {_any(_names(['sitecustomize*', 'usercustomize*', '*.pth']))}"
            )
            lines.append(f"look {Watched.STEERING} {place}/.config/git {place}/.config/pip -type f")
    lines.append(f"look {Watched.SECTION} {work} {_any(_names(SECTIONED))}")
    lines.append(f"look {Watched.SETUID} {work} -type f \\( -perm -4000 -o -perm -2000 \\)")
    lines += [f"look {Watched.PROGRAM} {shlex.quote(folder)} -mindepth 1 -maxdepth 1 ! -type d" for folder in path]
    lines += [f"look {Watched.PROTECTED} {shlex.quote(one)} ! -type d" for one in protected]
    overlap = " ".join(shlex.quote(one) for one in tests)
    if overlap:
        lines.append(f"look {Watched.TESTS} {overlap} ! -type d")
    return _LOOK + "{\n" + "\n".join(lines) + "\n} 2>/dev/null | base64\n"


_LOOK = r"""
command -v find >/dev/null && command -v sha256sum >/dev/null || exit 9
NL='
'
look() {
  printf '=%s\0' "$1"; shift
  find -H "$@" -path "*$NL*" -prune -exec rm -rf {} +
  find -H "$@" -type f -exec sha256sum {} + | tr '\n' '\0'
  find -H "$@" -type l -exec sh -c 'for f; do printf "%s\0@%s\0" "$f" "$(readlink "$f")"; done' sh {} +
  find -H "$@" ! -type f ! -type l -print0
}
"""


def parse(records: bytes) -> dict[str, dict[str, str]]:
    """Return why watched -> path -> digest, from what the script of `listing` printed."""
    found: dict[str, dict[str, str]] = {}
    group: dict[str, str] = {}
    last = ""
    for record in records.decode(errors="surrogateescape").split("\0"):
        if record.startswith("="):
            group = found.setdefault(record[1:], {})
        elif record.startswith("@"):
            group[last] = f"link:{record[1:]}"
        elif record.startswith("/"):
            last = record
            group.setdefault(record, "other")
        elif hashed := _HASHED.fullmatch(record):
            escaped, digest, path = hashed.groups()
            group[path.replace("\\\\", "\\") if escaped else path] = f"sha256:{digest}"
    return found


_HASHED = re.compile(r"(\\?)([0-9a-f]{64})  (/.*)", re.DOTALL)


def changes(seal: Seal, now: Mapping[str, Mapping[str, str]], *, kept: Iterable[str] = ()) -> list[Change]:
    """Return what changed since the seal, and what is to be done about it.

    Args:
        now: the listing before the evaluation.
        kept: paths that are the run's declared work product: never touched.
    """
    found = []
    for why in Watched:
        before, after = seal.files.get(why, {}), now.get(why, {})
        for path in sorted({*before, *after} - set(kept)):
            change = _change(seal, why, path, before.get(path), after.get(path))
            if change is not None:
                found.append(change)
    return found


def _change(seal: Seal, why: Watched, path: str, before: str | None, after: str | None) -> Change | None:
    if before == after:
        return None
    name = path.rpartition("/")[2]
    if after is None:
        restorable = path in seal.contents and "/.git/" not in path and name not in STARTUP
        if why not in (Watched.STEERING, Watched.PROTECTED, Watched.PROGRAM) or (
            why is not Watched.PROTECTED and not restorable
        ):
            return None
        return Change(path, why, "deleted", Do.PUT_BACK if restorable else Do.REPORT)
    how = "planted" if before is None else "changed"
    if why is Watched.SETUID:
        return Change(path, why, how, Do.UNSET)
    if why is Watched.TESTS:
        return Change(path, why, how, Do.REPORT)
    if why is Watched.SECTION:
        return Change(path, why, how, Do.SECTION)
    if why is Watched.PROGRAM and before is None and name not in seal.programs:
        return None  # a program of the agent's own that stands in nobody's place
    if before is None:
        return Change(path, why, how, Do.REMOVE)
    if path in seal.contents:
        return Change(path, why, how, Do.PUT_BACK)
    return Change(path, why, how, Do.REPORT if why is Watched.PROTECTED else Do.REMOVE)


def with_sections(name: str, content: str, sealed: str) -> str | None:
    """Return a configuration file with what it tells pytest as it was in the sealed one; None when that cannot be done.

    >>> with_sections("tox.ini", "[a]\\nx=1\\n[pytest]\\naddopts=-k no\\n", "")
    '[a]\\nx=1\\n'
    """
    toml = name.endswith(".toml")
    if _told(content, toml) == _told(sealed, toml):
        return content
    rest, _ = _split(content, toml)
    _, original = _split(sealed, toml)
    made = rest + ("\n" if rest and not rest.endswith("\n") and original else "") + original
    return made if _told(made, toml) == _told(sealed, toml) else None


def _told(content: str, toml: bool) -> object:
    """Return what a file tells pytest, None for nothing; a file that cannot be parsed tells what it holds."""
    if not toml:
        return _split(content, toml)[1] or None
    try:
        tool = tomllib.loads(content).get("tool")
    except (tomllib.TOMLDecodeError, RecursionError):
        return content
    return tool.get("pytest") if isinstance(tool, dict) else None


_SECTIONS = {True: re.compile(r"\s*\[\[?\s*tool\s*\.\s*pytest\s*[\].]"), False: re.compile(r"\[(tool:)?pytest\]")}
_HEADERS = {True: re.compile(r"\s*\[\[?[^,\[\]]*\]\]?\s*(#.*)?$"), False: re.compile(r"\[")}
"""Of TOML (True) and of the other files."""


def _split(content: str, toml: bool) -> tuple[str, str]:
    """Return (the other lines, the lines of the sections for pytest)."""
    rest: list[str] = []
    found: list[str] = []
    inside = False
    for line in content.splitlines(keepends=True):
        if _HEADERS[toml].match(line):
            inside = _SECTIONS[toml].match(line) is not None
        (found if inside else rest).append(line)
    return "".join(rest), "".join(found)


def _names(patterns: Iterable[str]) -> list[str]:
    return [f"-name {shlex.quote(pattern)}" for pattern in patterns]


def _paths(patterns: Iterable[str]) -> list[str]:
    return [f"-path {shlex.quote(pattern)}" for pattern in patterns]


def _any(*groups: list[str]) -> str:
    return r"\( " + " -o ".join(one for group in groups for one in group) + r" \)"
