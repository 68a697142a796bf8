"""`gyre replay`: send a recorded call's exact prompt to a replica again, and compare what it samples."""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from gyre_sdk.cli.store import AsJson, json_line, open_store
from gyre_sdk.errors import JournalError, ReplicaError, SettingsError
from gyre_sdk.records import CallRecord, CallStatus, VersionSpan
from gyre_sdk.view.escape import counted, visible

_ENDED = (CallStatus.COMPLETE, CallStatus.DELIVERED)
_AROUND = 12
"""Tokens to show as text from the first difference on."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A recorded answer beside a new one to the same prompt."""

    call: str
    equal: bool
    """Whether the same ids were sampled."""
    greedy: bool
    """Whether the call was made at temperature 0; at others another answer is no fault."""
    prompt_tokens: int
    recorded_tokens: int
    replayed_tokens: int
    same: int
    """Leading sampled ids that are equal."""
    max_logprob_difference: float | None
    """Nats, over those ids; None where one side has no log-probs."""
    recorded_versions: list[int]
    replayed_versions: list[int]
    recorded_finish: str | None
    replayed_finish: str | None
    """As the engine told it."""
    recorded_text: str | None = None
    """Text from the first difference on."""
    replayed_text: str | None = None


def compare(
    record: CallRecord,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    versions: Sequence[int],
    finish: str | None,
    decode: Callable[[list[int]], str] | None = None,
) -> Comparison:
    """Return a recorded call beside what was sampled again."""
    pairs = zip(record.sampled_ids, ids, strict=False)
    same = next((at for at, (old, new) in enumerate(pairs) if old != new), min(len(record.sampled_ids), len(ids)))
    equal = same == len(record.sampled_ids) == len(ids)
    differences = [
        abs(old - new)
        for old, new in zip(record.logprobs[:same], logprobs[:same], strict=True)
        if old is not None and new is not None
    ]
    show = decode if not equal else None
    return Comparison(
        call=record.call,
        equal=equal,
        greedy=record.sampling.temperature == 0,
        prompt_tokens=len(record.prompt_ids),
        recorded_tokens=len(record.sampled_ids),
        replayed_tokens=len(ids),
        same=same,
        max_logprob_difference=max(differences, default=None),
        recorded_versions=sorted({span.version for span in record.versions}),
        replayed_versions=sorted(set(versions)),
        recorded_finish=record.finish_reason,
        replayed_finish=finish,
        recorded_text=show(record.sampled_ids[same : same + _AROUND]) if show else None,
        replayed_text=show(list(ids[same : same + _AROUND])) if show else None,
    )


def replay(
    call: Annotated[str, typer.Argument(help="Id of the call.", show_default=False)],
    store: Annotated[Path, typer.Option("--store", help="The store: a file, or a directory with gyre.db.")],
    replica: Annotated[str, typer.Option("--replica", help="URL of the inference server.")],
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with tokenizer.json, to show differences as text.")
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds to wait for the answer.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Sample a recorded call again and compare: exit status 0 when the ids are equal, 1 when not, 2 when it cannot be."""
    decode = _decoder(model)
    with open_store(store) as journal:
        record, exchange = journal.call(call), journal.exchange(call)
        if record is None or exchange is None:
            raise JournalError(f"call {call!r} is not in {journal.path}; `gyre calls {journal.path}` lists what is")
    if exchange.hosted:
        raise JournalError(f"call {call} was answered by a hosted model: there are no token ids to send again")
    if not record.prompt_ids or not record.sampled_ids:
        raise JournalError(f"call {call} ({record.status}) has no sampled ids to compare with")
    found = asyncio.run(_compare(record, replica.rstrip("/"), timeout, decode))
    if as_json:
        json_line(asdict(found))
    else:
        for line in _lines(found, record):
            typer.echo(line)
    if not found.equal:
        raise typer.Exit(1)


async def _compare(
    record: CallRecord, url: str, timeout: float, decode: Callable[[list[int]], str] | None
) -> Comparison:
    """Sample again.

    Raises:
        ReplicaError: the replica refused, broke off or took too long.
    """
    module: Any = importlib.import_module("gyre_sdk.harness.proxy.upstream")
    upstream = module.Upstream(versions={})
    name = f"replay-{secrets.token_hex(8)}"
    limit = record.sampling.max_tokens if record.status in _ENDED else len(record.sampled_ids)
    ids: list[int] = []
    logprobs: list[float | None] = []
    spans: tuple[VersionSpan, ...] = ()
    finish: str | None = None
    await upstream.open()
    try:
        async with asyncio.timeout(timeout):
            async for piece in upstream.generate(
                url,
                request_id=name,
                prompt=msgspec.json.encode(record.prompt_ids)[1:-1],
                sampling=record.sampling,
                stop_ids=record.sampling.stop_token_ids,
                max_tokens=limit,
                salt=name,
                version=-1,
            ):
                ids += piece.ids
                logprobs += piece.logprobs
                spans, finish = piece.spans or spans, piece.finish
    except TimeoutError as error:
        await upstream.abort(url, name)
        raise ReplicaError(f"replica {url} had not answered after {timeout:g} s; give --timeout more") from error
    finally:
        await upstream.close()
    return compare(record, ids, logprobs, [span.version for span in spans if span.version >= 0], finish, decode)


def _decoder(model: Path | None) -> Callable[[list[int]], str] | None:
    if model is None:
        return None
    path = model / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"--model {model}: {path} does not exist; give the folder of the model's tokenizer")
    tokenizers: Any = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _lines(found: Comparison, record: CallRecord) -> list[str]:
    lines = [f"call {found.call}: {counted(found.prompt_tokens, 'prompt token')} sent"]
    if found.equal:
        lines.append(f"equal: {counted(found.same, 'sampled id')}")
    else:
        lines.append(
            f"different: {counted(found.same, 'id')} equal, then token {found.same} of {found.recorded_tokens} recorded"
            f" and {found.replayed_tokens} sampled now"
        )
        if not found.greedy:
            lines.append(f"(sampled at temperature {record.sampling.temperature:g}: another answer is to be expected)")
    for name, text in (("recorded", found.recorded_text), ("now", found.replayed_text)):
        if text is not None:
            lines.append(f"  {name}: {visible(text, 160)}")
    difference = found.max_logprob_difference
    lines.append(
        f"log-probs: {'none to compare' if difference is None else f'differ by at most {difference:.3g} nats'}"
    )
    lines.append(f"versions: recorded {_list(found.recorded_versions)}, now {_list(found.replayed_versions)}")
    lines.append(f"finish: recorded {found.recorded_finish}, now {found.replayed_finish}")
    return lines


def _list(versions: list[int]) -> str:
    return ", ".join(map(str, versions)) or "unknown"
