"""The tables of a store and how a file is opened.

`application_id` marks a gyre store, `user_version` its format. `blobs.py` says how ids and log-probs are written.

* A prompt, the digests of a call's messages and those of its raw items are stored as what they add to the parent
  call's: `*shared` leading items, then the rest.
* `message` finds a body by digest: `size` bytes from `start` on in a `pack`, the zstd frame of all bodies that one
  write brought. Answers, sampling parameters and large parts of requests are bodies too.
* `prompt` and `sampled` are written once per call, in tables of their own: a change of a call's state then rewrites
  little, and the pages of large rows stay full. Sampled tokens of an open call are in `chunk`.
* Ids of prompts are compressed after the tokens of their path before them, from `context_start` on, as a dictionary.
* `prompt_crc` is the CRC-32 of the prompt's ids from `context_start(shared)` on, `sampled_crc` that of the sampled ids
  followed by their log-probs, both as little-endian 32-bit numbers.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from shlex import quote as quoted
from typing import Literal
from urllib.parse import quote

from gyre_sdk.errors import JournalError

APPLICATION_ID = 0x67797265  # "gyre"
FORMAT = 2
STORE_NAME = "gyre.db"
"""File of a store that is given as a directory."""
_PATIENCE = 30.0
"""Seconds to wait for another process that holds the store."""

_TABLES = """
CREATE TABLE run (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL UNIQUE, task TEXT NOT NULL, grp TEXT, member INTEGER NOT NULL,
  dispatch_version INTEGER NOT NULL, status TEXT NOT NULL, created_at REAL NOT NULL, ended_at REAL, reward REAL,
  placeholder INTEGER NOT NULL, parts BLOB NOT NULL, error TEXT, owner TEXT NOT NULL, metadata BLOB NOT NULL, spent TEXT);
CREATE INDEX run_group ON run(grp);
CREATE TABLE lane (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, lane TEXT NOT NULL UNIQUE, run TEXT NOT NULL REFERENCES run(run), role TEXT NOT NULL,
  name TEXT NOT NULL, parent TEXT, key_digest TEXT NOT NULL UNIQUE, created_at REAL NOT NULL,
  parent_call TEXT);
CREATE INDEX lane_run ON lane(run);
CREATE TABLE call (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, call TEXT NOT NULL UNIQUE, run TEXT NOT NULL REFERENCES run(run), lane TEXT NOT NULL,
  role TEXT NOT NULL, status TEXT NOT NULL, parent TEXT, fork_reason TEXT, shared INTEGER NOT NULL,
  prompt_len INTEGER NOT NULL, prompt_crc INTEGER NOT NULL, sampled_len INTEGER NOT NULL, sampled_crc INTEGER NOT NULL,
  versions BLOB NOT NULL, sampling BLOB NOT NULL, request BLOB NOT NULL,
  messages_shared INTEGER NOT NULL, messages BLOB NOT NULL, raw_shared INTEGER NOT NULL, raw BLOB NOT NULL, answer BLOB,
  finish_reason TEXT, received_at REAL NOT NULL, ended_at REAL, error TEXT);
CREATE INDEX call_run ON call(run, seq);
CREATE TABLE prompt (seq INTEGER PRIMARY KEY REFERENCES call(seq), ids BLOB NOT NULL);
CREATE TABLE sampled (seq INTEGER PRIMARY KEY REFERENCES call(seq), ids BLOB NOT NULL, logprobs BLOB NOT NULL);
CREATE TABLE chunk (
  call TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
  PRIMARY KEY (call, start)) WITHOUT ROWID;
CREATE TABLE attempt (
  call TEXT NOT NULL, number INTEGER NOT NULL, replica TEXT NOT NULL, request_id TEXT NOT NULL,
  tokens_from INTEGER NOT NULL, tokens_to INTEGER NOT NULL, end TEXT NOT NULL, lost BLOB NOT NULL,
  PRIMARY KEY (call, number)) WITHOUT ROWID;
CREATE TABLE pack (
  pack INTEGER PRIMARY KEY AUTOINCREMENT, base INTEGER REFERENCES pack(pack), depth INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE message (
  digest BLOB PRIMARY KEY, pack INTEGER NOT NULL REFERENCES pack(pack), start INTEGER NOT NULL, size INTEGER NOT NULL)
  WITHOUT ROWID;
CREATE TABLE entry (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, stream TEXT NOT NULL, kind TEXT NOT NULL, at REAL NOT NULL, body BLOB NOT NULL);
CREATE INDEX entry_stream ON entry(stream, seq);
"""


def store_file(path: Path | str) -> Path:
    """Return the file of a store: `gyre.db` in a directory, else the path itself.

    A path that does not exist means a directory when it has no suffix.
    """
    path = Path(path)
    if path.is_dir() or not (path.suffix or path.exists()):
        return path / STORE_NAME
    return path


def context_start(shared: int) -> int:
    """Return the first of the tokens before `shared` that new ids are compressed after and a checksum covers."""
    return max(0, shared - 512)


def connect(path: Path, mode: Literal["r", "rw"]) -> sqlite3.Connection:
    """Open a store, creating it in mode `rw`.

    A store that nobody has open, in a folder that this process cannot write to, is read as it lies there: what another
    process writes to it afterwards is not seen.

    Raises:
        JournalError: the file is missing (mode `r`), cannot be made or written (mode `rw`), is not a gyre store, has another
            format, or needs its log, which can only be read beside it in a folder that can be written to.
    """
    if mode == "r" and not path.is_file():
        raise JournalError(f"store {path} does not exist; give the path that `gyre serve --store` or the demo printed")
    if mode == "rw":
        _make_folder(path.parent)
    try:
        return _opened(path, "rwc" if mode == "rw" else "ro")
    except sqlite3.Error as error:
        said = error
        if mode == "r" and not _can_write(path.parent):
            try:
                return _opened(path, "ro&immutable=1", without_log=True)
            except sqlite3.Error as again:
                said = again
        step = "is it a gyre store on a local disk?"
        if mode == "rw" and path.exists() and not (_can_write(path) and _can_write(path.parent)):
            step = "it is written to, so its folder and its file must be writable"
        raise JournalError(f"store {path} cannot be opened: {said}; {step}") from said


def _opened(path: Path, mode: str, *, without_log: bool = False) -> sqlite3.Connection:
    """Return a connection in a mode of SQLite's, to a gyre store of this format.

    Args:
        without_log: read the file alone, which is refused where its log holds something.
    """
    if without_log:
        _require_no_log(path)
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        timeout=_PATIENCE,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if mode == "rwc":
            _use_log(connection)
            connection.execute("PRAGMA synchronous=FULL")
            _create_tables(connection)
        _check_format(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _require_no_log(path: Path) -> None:
    log = path.with_name(f"{path.name}-wal")
    try:
        size = log.stat().st_size
    except FileNotFoundError:
        return
    if size:
        raise JournalError(
            f"store {path} cannot be opened: {log.name} holds {size} bytes that are not in it yet, and its folder cannot be"
            f" written to; copy both files to a folder that can be, and open the copy: cp {quoted(str(path))}* FOLDER"
        )


def _can_write(path: Path) -> bool:
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(
            f"the folder {folder} of the store cannot be made: {error.strerror}; give a path that can be written"
        ) from error


def _use_log(connection: sqlite3.Connection) -> None:
    """Have the store write ahead. SQLite does not wait where another process opens the same new file at the same time."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.01)


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        empty = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0
        if empty:
            for statement in _TABLES.split(";"):
                if statement.strip():
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={FORMAT}")
        connection.execute("COMMIT")
    except sqlite3.Error:
        connection.execute("ROLLBACK")
        raise


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application == 0 and connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0] == 0:
        raise JournalError(f"store {path} is empty: nothing has been recorded yet; try again in a moment")
    if application != APPLICATION_ID:
        raise JournalError(f"{path} is an SQLite file but not a gyre store (application_id {application:#x})")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found != FORMAT:
        raise JournalError(
            f"store {path} has format {found}, this gyre reads format {FORMAT}; use the gyre that wrote it, or record into a new one"
        )
