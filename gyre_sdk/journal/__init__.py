"""The durable store of a project: one SQLite file in WAL mode; append, replay, query.

Invariants:

* a write is durable (fsync) when its future resolves; many writes share one commit (group commit);
* the ids of a call's prompt are stored once: a call keeps only what its parent's path does not have, so a run of T
  tokens costs O(T) bytes whatever its number of calls;
* so are messages: each is stored once, whatever the number of calls that send it, and a call keeps only which ones it
  adds to its parent's list;
* a run has exactly one terminal state: a second, different one is refused;
* several processes may hold the file open at once (SQLite locks), each with one writer thread.
"""

from gyre_sdk.journal.schema import store_file
from gyre_sdk.journal.store import Journal
from gyre_sdk.journal.values import CallEnd, CallIntent, CallSummary, Entry, RecordedExchange, TokenChunk
from gyre_sdk.journal.writer import Write

__all__ = [
    "CallEnd",
    "CallIntent",
    "CallSummary",
    "Entry",
    "Journal",
    "RecordedExchange",
    "TokenChunk",
    "Write",
    "store_file",
]
