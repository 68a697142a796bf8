"""One call as a sans-I/O state machine: events in, commands out.

    received ──Routed─> dispatched ──Sampled──> streaming ──Ended──> complete ──Delivered──> delivered
        └──────────────────┴───────────────────────┴──Ended──> failed | aborted

What it promises, whatever the order of events:

* nothing is released to the agent before it is durable (`Release` follows `Stored`, `Deliver` follows `Ended`);
* success needs a real finish reason: a stream that merely ends is `Broken`;
* an attempt that breaks off is followed by another one, from the tokens already sampled where that is exact, else from
  the start; tokens given up stay on record as lost;
* the agent's going away changes nothing but the delivery.

The shell that executes commands owns sockets, the store and time. It stops feeding an attempt's events once the
machine has asked for the end of the call.
"""

from gyre_sdk.harness.proxy.exchange.commands import (
    REJECTED,
    AbortAttempt,
    Command,
    Deliver,
    Fail,
    FindReplica,
    PersistAttempt,
    PersistAttemptEnd,
    PersistDelivered,
    PersistEnd,
    PersistIntent,
    PersistTokens,
    Release,
    Send,
)
from gyre_sdk.harness.proxy.exchange.events import (
    AgentGone,
    Broken,
    Cancelled,
    Delivered,
    Ended,
    Event,
    Finished,
    Rejected,
    Routed,
    Sampled,
    Stored,
    StoreFailed,
    Unserved,
)
from gyre_sdk.harness.proxy.exchange.machine import FINISHES, TRANSITIONS, Exchange, IllegalTransition
from gyre_sdk.harness.proxy.exchange.spans import cut_spans, join_spans

__all__ = [
    "FINISHES",
    "REJECTED",
    "TRANSITIONS",
    "AbortAttempt",
    "AgentGone",
    "Broken",
    "Cancelled",
    "Command",
    "Deliver",
    "Delivered",
    "Ended",
    "Event",
    "Exchange",
    "Fail",
    "FindReplica",
    "Finished",
    "IllegalTransition",
    "PersistAttempt",
    "PersistAttemptEnd",
    "PersistDelivered",
    "PersistEnd",
    "PersistIntent",
    "PersistTokens",
    "Rejected",
    "Release",
    "Routed",
    "Sampled",
    "Send",
    "StoreFailed",
    "Stored",
    "Unserved",
    "cut_spans",
    "join_spans",
]
