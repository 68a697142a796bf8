"""`gyre tree`: which calls of a run share which tokens, what was chosen for training, and why the rest was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from gyre_sdk.cli.store import AsJson, Store, json_line, open_store
from gyre_sdk.credit import CallFacts, Filters, seed_of
from gyre_sdk.errors import JournalError
from gyre_sdk.journal import Journal
from gyre_sdk.records import CallId, CallRecord, RunRecord
from gyre_sdk.select import J_MAX, select
from gyre_sdk.tree import RunTree, SampledCall
from gyre_sdk.tree.lines import Line, lines
from gyre_sdk.tree.outline import TreeOutline, outline
from gyre_sdk.view.escape import count, counted, reward, shortly, visible

_IDS = 12
"""Token ids to show of each end of a stretch."""


def tree(
    store: Store,
    run: Annotated[str, typer.Argument(help="The run.", show_default=False)],
    as_json: AsJson = False,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids.")] = False,
    j_max: Annotated[int, typer.Option("--j-max", min=0, help="Trajectories at most; 0 for all.")] = J_MAX,
    seed: Annotated[int, typer.Option("--seed", help="Decides the draws.")] = 0,
) -> None:
    """Show the tree of a run: shared tokens, forks and their reasons, what is trained and why the rest is not."""
    with open_store(store) as journal:
        record = journal.run(run)
        if record is None:
            raise JournalError(f"run {run!r} is not in {journal.path}; `gyre runs {journal.path}` lists what is")
        built, masks = _built(journal.calls(run, arrays=True))
        given_up = _given_up(journal, built)
    selection = select(built, j_max=j_max or None, seed=seed_of(record.run, seed))
    chosen = [(row.leaf, row.role, row.owned_spans) for row in selection]
    found = outline(built, chosen, masks=masks, given_up=given_up, with_ids=tokens)
    if as_json:
        json_line(as_object(record, found))
    else:
        show(record, found, tokens=tokens)


def as_object(record: RunRecord, found: TreeOutline) -> dict[str, Any]:
    """Return a run and its tree as one JSON object; its keys after those of the run are those of `TreeOutline`."""
    kept = ("run", "task", "group", "member", "status", "reward", "placeholder")
    return {**{key: getattr(record, key) for key in kept}, **msgspec.to_builtins(found)}


def show(record: RunRecord, found: TreeOutline, *, tokens: bool) -> None:
    """Print a tree for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    for text in _heading(record, found):
        console.print(Text(text), soft_wrap=True)
    numbers = {chosen.leaf: number for number, chosen in enumerate(found.trajectories, 1)}
    drawn = Tree(Text("paths", style="bold"), guide_style="dim")
    pending = [(drawn, line) for line in reversed(lines(found))]
    while pending:
        above, line = pending.pop()
        label = _label(line, numbers)
        if tokens and line.nodes:
            label.append(f"\n{_ids(line)}", style="dim")
        branch = above.add(label)
        pending += [(branch, below) for below in reversed(line.below)]
    console.print(drawn, soft_wrap=True)


def _built(records: Iterable[CallRecord]) -> tuple[RunTree, dict[CallId, str]]:
    """Return the tree of calls, and why those are left out that the trainer could not compute again."""
    built, masks, filters = RunTree(), {}, Filters()
    for record in records:
        mask = filters.mask(CallFacts.of(record), lambda version: 0)
        if mask is not None:
            masks[record.call] = str(mask)
        built.insert(SampledCall.from_record(record, excluded=mask is not None))
    return built, masks


def _given_up(journal: Journal, built: RunTree) -> dict[CallId, list[int]]:
    found = {
        call: [attempt.tokens_to for attempt in journal.attempts(call) if attempt.end == "abandoned"]
        for call in built.inserted()
    }
    return {call: sizes for call, sizes in found.items() if sizes}


def _heading(record: RunRecord, found: TreeOutline) -> list[str]:
    scored = reward(record.reward, placeholder=record.placeholder)
    sizes = f"{shortly(found.raw_tokens, 'token')} sent and sampled, {count(found.unique_tokens)} different"
    parts = [
        f"run {visible(record.run, 80)}, task {visible(record.task, 80)}: {record.status}, reward {scored}",
        f"{counted(len(found.calls), 'call')}, {sizes}, {count(found.sampled_tokens)} sampled, {count(found.trained_tokens)} trained",
    ]
    if found.untrained:
        parts.append("calls not trained: " + ", ".join(f"{number} {why}" for why, number in found.untrained.items()))
    for number, chosen in enumerate(found.trajectories, 1):
        size = f"{shortly(chosen.tokens, 'token')}, {count(chosen.owned)} of them targets"
        parts.append(f"trajectory {number}: {visible(chosen.role, 40)}, {size}, ends with call {chosen.leaf}")
    return parts


def _label(line: Line, numbers: Mapping[CallId, int]) -> Text:
    """Return a line: where, who, how much, and what became of it."""
    where = f"{line.start:,}-{line.stop:,}"
    if not line.calls:
        return Text(f"{where}  shared by {counted(line.shared_by, 'call')}", style="dim")
    label = Text(where, style="dim")
    name = visible(line.role, 40)
    if line.branches:
        label.append(f"  {line.branches} branches of one {name} call each", style="bold")
    else:
        label.append(f"  {name}" + (f" x{len(line.calls)}" if len(line.calls) > 1 else ""), style="bold")
    label.append(f"  {count(line.sampled)} sampled")
    if line.versions is not None:
        low, high = line.versions
        label.append(f"  version {low}" if low == high else f"  versions {low}-{high}")
    trained = sorted(numbers[leaf] for leaf in line.trajectories)
    fate = f"trained in {', '.join(map(str, trained))}" if trained else line.fate.replace("_", " ")
    label.append(f"  {fate}", style="green" if trained else "yellow")
    if line.forks:
        label.append("  forks: " + ", ".join(f"{reason} x{number}" for reason, number in line.forks.items()))
    attempts, lost = line.given_up
    if attempts:
        label.append(f"  gave up {counted(lost, 'token')} of {counted(attempts, 'engine attempt')}", style="yellow")
    first, last = visible(line.calls[0].call, 80), visible(line.calls[-1].call, 80)
    label.append(f"  {first}" if len(line.calls) == 1 else f"  {first} .. {last}", style="dim")
    return label


def _ids(line: Line) -> str:
    """Return the ends of a stretch's ids; what its calls sampled is in brackets."""
    start = line.nodes[0].start
    ids = [str(token) for node in line.nodes for token in node.ids or ()]
    for call in line.calls:
        first, stop = call.prompt_tokens - start, call.prompt_tokens + call.sampled_tokens - start
        if max(first, 0) < stop <= len(ids):
            ids[max(first, 0)] = "[" + ids[max(first, 0)]
            ids[stop - 1] += "]"
    if len(ids) <= 2 * _IDS + 1:
        return " ".join(ids)
    return " ".join([*ids[:_IDS], f"... {len(ids) - 2 * _IDS} more ...", *ids[-_IDS:]])
