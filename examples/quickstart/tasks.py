"""The demo's family of tasks: small repairs of files in a shell.

A task has one or two parts, joined by `` ; ``. Each part is one of nine kinds and is checked by its own lines in
`tests/test.sh`; the reward is the fraction of parts that are right. The module is pure and seeded, apart from
`write_folders`, which writes the tasks as Harbor folders.

Splits are disjoint by construction: the kind and arguments of every *part* are hashed, and the hash decides which
split may use it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_NAMES = """
    amber apple arrow badge basin beach birch bison blade bloom brick brook cabin cable camel candle canoe cedar chalk
    cherry cliff clover cobalt coral cotton crane crystal daisy delta desert dragon eagle ember falcon feather fern field
    flame forest fox garden ginger glacier granite grape harbor hazel heron honey indigo iris island ivory jade jasmine
    juniper kettle lagoon lantern lemon lilac linen lotus maple marble meadow melon mint mirror moss nectar oak ocean
    olive onyx opal orchid otter pearl pebble pepper pine plum poppy quartz quill raven reef river robin saffron sage
    salmon silver slate sparrow spruce stone sugar thistle tiger topaz tulip velvet violet walnut willow zinc
"""
WORDS: tuple[str, ...] = tuple(_NAMES.split())
"""Every name, key and value in the demo; each is one token of the demo's tokenizer."""

JOIN = " ; "
"""Stands between the two parts of an instruction."""


class Split(StrEnum):
    """Which tasks may be used for what."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a scripted attempt and what the shell prints."""

    command: str
    """A line for `sh -c`, run in the work dir."""
    output: str
    """Its standard output without the last newline."""


@dataclass(frozen=True, slots=True)
class Part:
    """One job of a task."""

    kind: str
    """One of `KINDS`."""
    text: str
    """What the instruction says."""
    files: tuple[tuple[str, str], ...]
    """Name and content of each input file."""
    check: str
    """A shell condition, true when the job is done; run in the work dir."""
    right: tuple[Step, ...]
    """Commands that do the job."""
    wrong: tuple[Step, ...]
    """Commands of a plausible bad habit, which leaves the job undone."""


@dataclass(frozen=True, slots=True)
class Task:
    """A generated task."""

    name: str
    """Unique within its split; the folder's name."""
    split: Split
    parts: tuple[Part, ...]
    """One or two."""

    @property
    def instruction(self) -> str:
        """What the agent is told."""
        return JOIN.join(part.text for part in self.parts)

    @property
    def files(self) -> dict[str, str]:
        """Input files of all parts by name, relative to the work dir."""
        return dict(item for part in self.parts for item in part.files)

    @property
    def oracle(self) -> tuple[str, ...]:
        """Commands that solve the task."""
        return tuple(step.command for part in self.parts for step in part.right)

    @property
    def test_script(self) -> str:
        """`tests/test.sh`: POSIX sh, coreutils only; writes the fraction of parts done."""
        lines = ["#!/bin/sh", "cd /workspace || exit 1", "mkdir -p /logs/verifier", "done=0"]
        lines += [f"if {part.check}; then done=$((done + 1)); fi" for part in self.parts]
        scores = {n: f"{n / len(self.parts):g}" for n in range(len(self.parts) + 1)}
        lines += ["case $done in", *(f"  {n}) reward={score} ;;" for n, score in scores.items()), "esac"]
        return "\n".join([*lines, 'echo "$reward" > /logs/verifier/reward.txt', ""])


class _Names:
    """Draws words without repetition, so that no two files or keys of a task collide."""

    def __init__(self, rng: random.Random) -> None:
        self._words = list(WORDS)
        rng.shuffle(self._words)
        self.rng = rng

    def __call__(self) -> str:
        return self._words.pop()

    def many(self, low: int, high: int) -> list[str]:
        return [self() for _ in range(self.rng.randint(low, high))]

    def say(self, *phrasings: str) -> str:
        return self.rng.choice(phrasings)


def _lines(items: Sequence[str]) -> str:
    return "".join(f"{item}\n" for item in items)


def _same(name: str, items: Sequence[str]) -> str:
    """A condition: the file holds exactly these lines."""
    return f'[ "$(cat {name} 2>/dev/null; echo .)" = "$(printf \'%s\\n\' {" ".join(items)}; echo .)" ]'


def _config(n: _Names, key: str, value: str) -> list[str]:
    """Lines of a config file with `key` somewhere among others."""
    lines = [f"{n()}={n()}", f"{key}={value}"]
    n.rng.shuffle(lines)
    return lines


def _set(n: _Names) -> Part:
    key, value, name, old = n(), n(), n(), n()
    before = _config(n, key, old)
    after = [f"{key}={value}" if line == f"{key}={old}" else line for line in before]
    edit = f"'s/^{key}=.*/{key}={value}/' {name}.conf"
    return Part(
        "set",
        n.say("set ", "change ") + f"{key} to {value} in {name}.conf",
        ((f"{name}.conf", _lines(before)),),
        _same(f"{name}.conf", after),
        (Step(f"sed -i {edit}", ""),),
        (Step(f"sed {edit}", "\n".join(after)),),
    )


def _rename(n: _Names) -> Part:
    old, new, content = n(), n(), n()
    return Part(
        "rename",
        n.say("rename ", "move ") + f"{old}.txt to {new}.txt",
        ((f"{old}.txt", f"{content}\n"),),
        f"[ ! -e {old}.txt ] && {_same(f'{new}.txt', [content])}",
        (Step(f"mv {old}.txt {new}.txt", ""),),
        (Step(f"cp {old}.txt {new}.txt", ""),),
    )


def _count(n: _Names) -> Part:
    source, target, items = n(), n(), n.many(3, 9)
    return Part(
        "count",
        n.say("count lines of ", "write the length of ") + f"{source}.txt into {target}.txt",
        ((f"{source}.txt", _lines(items)),),
        _same(f"{target}.txt", [str(len(items))]),
        (Step(f"wc -l < {source}.txt", str(len(items))), Step(f"echo {len(items)} > {target}.txt", "")),
        (Step(f"wc -l {source}.txt > {target}.txt", ""),),
    )


def _sort(n: _Names) -> Part:
    source, target, items = n(), n(), n.many(3, 4)
    return Part(
        "sort",
        n.say("sort ", "put in order ") + f"{source}.txt into {target}.txt",
        ((f"{source}.txt", _lines(items)),),
        _same(f"{target}.txt", sorted(items)),
        (Step(f"sort {source}.txt > {target}.txt", ""),),
        (Step(f"sort {source}.txt", "\n".join(sorted(items))),),
    )


def _append(n: _Names) -> Part:
    name, word, items = n(), n(), n.many(2, 4)
    return Part(
        "append",
        n.say("append ", "add ") + f"{word} to {name}.txt",
        ((f"{name}.txt", _lines(items)),),
        _same(f"{name}.txt", [*items, word]),
        (Step(f"echo {word} >> {name}.txt", ""),),
        (Step(f"echo {word} > {name}.txt", ""),),
    )


def _delete(n: _Names) -> Part:
    name, word, items = n(), n(), n.many(2, 3)
    before = [*items, word]
    n.rng.shuffle(before)
    after = [item for item in before if item != word]
    return Part(
        "delete",
        n.say("delete line ", "remove line ") + f"{word} from {name}.txt",
        ((f"{name}.txt", _lines(before)),),
        _same(f"{name}.txt", after),
        (Step(f"sed -i '/^{word}$/d' {name}.txt", ""),),
        (Step(f"sed '/^{word}$/d' {name}.txt", "\n".join(after)),),
    )


def _lookup(n: _Names) -> Part:
    key, value, source, target = n(), n(), n(), n()
    return Part(
        "lookup",
        n.say("look up ", "find ") + f"{key} in {source}.conf and write it to {target}.txt",
        ((f"{source}.conf", _lines(_config(n, key, value))),),
        _same(f"{target}.txt", [value]),
        (Step(f"grep ^{key}= {source}.conf", f"{key}={value}"), Step(f"echo {value} > {target}.txt", "")),
        (Step(f"grep ^{key}= {source}.conf > {target}.txt", ""),),
    )


def _copy(n: _Names) -> Part:
    key, value, source, target, old = n(), n(), n(), n(), n()
    before = _config(n, key, old)
    after = [f"{key}={value}" if line == f"{key}={old}" else line for line in before]
    look = Step(f"grep ^{key}= {source}.conf", f"{key}={value}")
    return Part(
        "copy",
        n.say("copy ", "carry ") + f"{key} from {source}.conf to {target}.conf",
        ((f"{source}.conf", _lines(_config(n, key, value))), (f"{target}.conf", _lines(before))),
        _same(f"{target}.conf", after),
        (look, Step(f"sed -i 's/^{key}=.*/{key}={value}/' {target}.conf", "")),
        (look, Step(f"echo {key}={value} >> {target}.conf", "")),
    )


def _repair(n: _Names) -> Part:
    name, want, got = n(), n(), n()
    test = f'got=$(sh {name}.sh)\nif [ "$got" = {want} ]; then echo pass; else echo got $got want {want}; fi\n'
    look = Step(f"sh {name}.test", f"got {got} want {want}")
    return Part(
        "repair",
        n.say("repair ", "fix ") + f"{name}.sh so that {name}.test passes",
        ((f"{name}.sh", f"echo {got}\n"), (f"{name}.test", test)),
        f'[ "$(sh {name}.sh 2>/dev/null)" = {want} ]',
        (look, Step(f"sed -i 's/{got}/{want}/' {name}.sh", "")),
        (look, Step(f"sed -i 's/{got}/{want}/' {name}.test", "")),
    )


KINDS: dict[str, Callable[[_Names], Part]] = {
    "set": _set,
    "rename": _rename,
    "count": _count,
    "sort": _sort,
    "append": _append,
    "delete": _delete,
    "lookup": _lookup,
    "copy": _copy,
    "repair": _repair,
}
"""Maker of each kind of part. The bad habit of `repair` is to edit the test instead of the script."""


def split_of(part: Part) -> Split:
    """Return the one split that may use this part; phrasing does not matter, arguments do."""
    digest = hashlib.sha256("|".join((part.kind, *(step.command for step in part.right))).encode()).digest()
    return (Split.VALIDATION, Split.HELDOUT, Split.HELDOUT, *[Split.TRAIN] * 7)[digest[0] % 10]


def _draw(names: _Names, split: Split) -> Part:
    state = names._words.copy()
    while True:
        part = KINDS[names.rng.choice(list(KINDS))](names)
        if split_of(part) is split:
            return part
        names._words = state.copy()
        names.rng.shuffle(names._words)


def generate(split: Split | str, count: int, seed: int) -> list[Task]:
    """Return `count` different tasks of a split: about one third with one part, the rest with two."""
    split = Split(split)
    rng = random.Random(f"{split}-{seed}")
    tasks: dict[str, Task] = {}
    while len(tasks) < count:
        names = _Names(rng)
        parts = tuple(_draw(names, split) for _ in range(1 if rng.random() < 1 / 3 else 2))
        task = Task(f"{split}-{len(tasks):04d}", split, parts)
        tasks.setdefault(task.instruction, task)
    return list(tasks.values())


def write_folders(root: Path, tasks: Sequence[Task]) -> list[Path]:
    """Write tasks as Harbor folders below `root`; return the folders. Existing files are overwritten."""
    folders = []
    for task in tasks:
        folder = root / task.name
        kinds = ", ".join(f'"{part.kind}"' for part in task.parts)
        contents = {
            "task.toml": (
                'version = "1.0"\n\n[metadata]\n'
                f'split = "{task.split}"\nkinds = [{kinds}]\n\n'
                '[metadata.gyre]\nfiles = "environment/files"\n\n'
                '[environment]\ndocker_image = "gyre/base"\nworkdir = "/workspace"\n\n'
                "[agent]\ntimeout_sec = 120.0\n\n"
                # thousands of short runs in recycled workspaces, whose tests load nothing of the agent's
                '[verifier]\ntimeout_sec = 30.0\nenvironment_mode = "shared"\n'
            ),
            "instruction.md": task.instruction + "\n",
            "tests/test.sh": task.test_script,
            "solution/solve.sh": "\n".join(["#!/bin/sh", "cd /workspace || exit 1", *task.oracle, ""]),
            **{f"environment/files/{name}": content for name, content in task.files.items()},
        }
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        folders.append(folder)
    return folders
