"""Writing lines to a file: Parquet, or JSON lines. A file appears under its name when it is whole."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from gyre_sdk.errors import SettingsError
from gyre_sdk.export.columns import Column, Kind
from gyre_sdk.export.lines import Line

_SUFFIXES = {".parquet": "parquet", ".jsonl": "jsonl"}
_BATCH_LINES, _BATCH_NUMBERS = 1000, 4_000_000
"""Lines, and numbers in their lists, that are held before they are written as a row group."""


def kind_of(path: Path) -> str:
    """Return `parquet` or `jsonl`, by a file's name.

    Raises:
        SettingsError: it ends otherwise.
    """
    if path.suffix not in _SUFFIXES:
        raise SettingsError(f"output {str(path)!r}: name a file that ends in .parquet or .jsonl")
    return _SUFFIXES[path.suffix]


def write(path: Path, columns: Sequence[Column], lines: Iterable[Line], settings: Mapping[str, Any]) -> int:
    """Write lines to a file and return how many there were.

    Args:
        settings: kept in a Parquet file's metadata under `gyre`.

    Raises:
        SettingsError: the file's name or place is wrong, or Parquet needs a package that is not there.
    """
    kind = kind_of(path)
    arrow = _arrow() if kind == "parquet" else None
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            count = _jsonl(file, lines) if arrow is None else _parquet(arrow, file, columns, lines, settings)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise SettingsError(f"output {str(path)!r} cannot be written: {error}") from error
    finally:
        with suppress(OSError):  # a disk that cannot be written
            part.unlink()
    return count


def _jsonl(file: BinaryIO, lines: Iterable[Line]) -> int:
    encoder = msgspec.json.Encoder(enc_hook=_plain)
    count = 0
    for line in lines:
        file.write(encoder.encode(line) + b"\n")
        count += 1
    return count


def _plain(value: object) -> object:
    """Return an array as a list; numbers that JSON does not have become null."""
    if isinstance(value, np.ndarray):
        finite = value.dtype.kind != "f" or np.isfinite(value).all()
        return value.tolist() if finite else [None if number != number else number for number in value.tolist()]
    raise NotImplementedError(f"{type(value).__name__} cannot be written as JSON")


def _arrow() -> Any:
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise SettingsError(
            "Parquet needs pyarrow, which is not installed: pip install 'gyre-sdk[train]', or write JSON lines (-o OUT.jsonl)"
        ) from error


def _parquet(
    arrow: Any, file: BinaryIO, columns: Sequence[Column], lines: Iterable[Line], settings: Mapping[str, Any]
) -> int:
    schema = arrow.schema([(column.name, _type(arrow, column.kind)) for column in columns])
    schema = schema.with_metadata({"gyre": json.dumps(dict(settings))})
    count, batch, numbers = 0, list[Line](), 0
    with arrow.parquet.ParquetWriter(file, schema, compression="zstd") as writer:

        def flush() -> None:
            arrays = [
                arrow.array([line[column.name] for line in batch], field.type)
                for column, field in zip(columns, schema, strict=True)
            ]
            writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))
            batch.clear()

        for line in lines:
            batch.append(line)
            count += 1
            numbers += sum(len(value) for value in line.values() if isinstance(value, np.ndarray))
            if len(batch) >= _BATCH_LINES or numbers >= _BATCH_NUMBERS:
                flush()
                numbers = 0
        if batch:
            flush()
    return count


def _type(arrow: Any, kind: Kind) -> Any:
    text = arrow.string()
    function = arrow.struct([("name", text), ("arguments", text)])
    message = arrow.struct(
        [
            ("role", text),
            ("content", text),
            ("reasoning_content", text),
            ("tool_calls", arrow.list_(arrow.struct([("id", text), ("type", text), ("function", function)]))),
            ("tool_call_id", text),
        ]
    )
    return {
        Kind.TEXT: text,
        Kind.INTEGER: arrow.int64(),
        Kind.NUMBER: arrow.float64(),
        Kind.INTEGERS: arrow.list_(arrow.int32()),
        Kind.NUMBERS: arrow.list_(arrow.float64()),
        Kind.LOGPROBS: arrow.list_(arrow.float32()),
        Kind.TEXTS: arrow.list_(text),
        Kind.MESSAGES: arrow.list_(message),
    }[kind]
