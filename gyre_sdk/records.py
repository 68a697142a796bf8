"""Every value that crosses a process or the disk: frozen structs, a unit per field.

Times are seconds since the Unix epoch (UTC), as floats, passed in by the caller: nothing here reads a clock.
Token ids are `int32` numpy arrays in memory and little-endian `int32` bytes in the store.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NewType

import msgspec

RunId = NewType("RunId", str)
LaneId = NewType("LaneId", str)
CallId = NewType("CallId", str)
GroupId = NewType("GroupId", str)
Version = NewType("Version", int)
"""Number of a published set of policy weights; monotone, never reused. 0 is the starting policy."""

MAIN = "main"
SUBAGENT = "subagent"
SUMMARY_SUFFIX = "-summary"
LEAST_TEMPERATURE = 0.01
"""Below it engines sample greedily (0) or at this temperature (vLLM)."""
_NEUTRAL: tuple[object, ...] = (None, 0, 0.0, False, {}, [])
ROLE_ORDER: tuple[str, ...] = ("main", "main-summary", "subagent", "subagent-summary")
"""Default priority of roles in selection (arXiv:2609.33848): first is claimed first."""


class RunStatus(StrEnum):
    """State of a run; every value but `RUNNING` is terminal."""

    RUNNING = "running"
    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    """Its budget of wall time ran out."""
    LIMIT = "limit"
    """Its budget of tokens, turns or cost ran out."""
    AGENT_ERROR = "agent_error"
    WORKSPACE_ERROR = "workspace_error"
    SCORER_ERROR = "scorer_error"
    CANCELLED = "cancelled"


class CallStatus(StrEnum):
    """State of a call; `DELIVERED`, `ABORTED` and `FAILED` are terminal."""

    RECEIVED = "received"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    COMPLETE = "complete"
    DELIVERED = "delivered"
    ABORTED = "aborted"
    FAILED = "failed"


class ForkReason(StrEnum):
    """Why a call does not continue a recorded path token by token."""

    COMPACTION = "compaction"
    CLIENT_EDIT = "client_edit"
    TEMPLATE = "template"
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    RETRY = "retry"
    ROUTES = "routes"
    """The same tokens, computed by other experts."""
    UNKNOWN = "unknown"


class VersionSpan(msgspec.Struct, frozen=True):
    """Weights version of a stretch of sampled tokens."""

    version: int
    """Policy version that sampled the tokens."""
    start: int
    """First sampled token of the stretch, 0-based in the call's sampled ids."""
    end: int
    """One past its last sampled token."""


class Sampling(msgspec.Struct, frozen=True):
    """Resolved sampling parameters of a call: what the engine was told."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    max_tokens: int = 512
    """Limit on sampled tokens of the call."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = {}
    """Further fields that change the sampled distribution (`min_p`, `logit_bias`, penalties), as sent."""

    @property
    def irreproducible(self) -> str | None:
        """What keeps a trainer from computing the sampled distribution, as `name=value`; None when it can.

        It can where every token was drawn from `softmax(logits / temperature)` over the whole vocabulary.
        """
        if self.temperature < LEAST_TEMPERATURE:
            return f"temperature={self.temperature:g}"
        if self.top_p != 1.0:
            return f"top_p={self.top_p:g}"
        if self.top_k > 0:
            return f"top_k={self.top_k}"
        for name, value in sorted(self.extra.items()):
            if value not in _NEUTRAL and not (name == "repetition_penalty" and value == 1.0):
                return f"{name}={value}"
        return None


class RunRecord(msgspec.Struct, frozen=True):
    """One attempt at a task by an agent."""

    run: RunId
    task: str
    """Name of the task."""
    created_at: float
    group: GroupId | None = None
    """The runs of one task whose rewards are compared, or None."""
    member: int = 0
    """Index of the run in its group, from 0."""
    dispatch_version: int = 0
    """Policy version that was being served when the run started."""
    status: RunStatus = RunStatus.RUNNING
    ended_at: float | None = None
    reward: float | None = None
    """Score of the retained work product. None means unscored, which is not 0."""
    placeholder: bool = False
    """True when the run had nothing to evaluate at all (it never started) and its reward is the placeholder 0."""
    parts: dict[str, float] = {}
    """Named parts of the score."""
    error: str | None = None
    """What ended the run when it did not complete, or why it has no reward."""
    owner: str = ""
    """Process that opened the run (host:pid:start), to find orphans."""
    metadata: dict[str, Any] = {}


class LaneRecord(msgspec.Struct, frozen=True):
    """One conversation stream inside a run."""

    lane: LaneId
    run: RunId
    role: str
    name: str
    parent: LaneId | None
    created_at: float
    parent_call: CallId | None = None
    """The call whose answer started this lane (a sub-agent's tool call), where it is known."""


class CallRecord(msgspec.Struct, frozen=True):
    """One model request by the agent and its answer, with exact token ids."""

    call: CallId
    run: RunId
    lane: LaneId
    role: str
    status: CallStatus
    prompt_ids: list[int]
    """Ids sent to the engine."""
    sampled_ids: list[int]
    """Ids sampled by the engine, stop token included."""
    logprobs: list[float | None]
    """Behaviour log-prob (nats) per sampled id, of the sampling distribution; None where the engine gave none."""
    versions: list[VersionSpan]
    """Cover `sampled_ids` without gaps, in order."""
    parent: CallId | None
    """The call whose path this one continues or forks from, or None for a root."""
    fork_reason: ForkReason | None
    """None when the prompt extends the parent's prompt + sampled ids token by token, or the call is a root."""
    shared: int
    """Tokens shared with the parent's prompt + sampled ids (0 for a root)."""
    sampling: Sampling
    finish_reason: str | None
    """`stop`, `length` or `tool_calls` as the agent saw it; None while open or failed."""
    received_at: float
    ended_at: float | None = None
    error: str | None = None


class AttemptRecord(msgspec.Struct, frozen=True):
    """One engine request made for a call."""

    call: CallId
    number: int
    """0 for the first attempt of a call."""
    replica: str
    request_id: str
    """Id sent to the engine; unique per attempt."""
    tokens_from: int
    """Sampled tokens the call already had when the attempt started (continued from); 0 for a restart."""
    tokens_to: int
    """Sampled tokens the call had when it ended."""
    end: str
    """`finished`, `aborted`, `broken` or `abandoned` (its tokens were given up by a restart); `open` while it runs."""


class ExecResult(msgspec.Struct, frozen=True):
    """What a command in a workspace did."""

    exit_code: int
    """Exit status of the command; 137 when it was killed for its time limit."""
    stdout: str
    """Captured standard output, undecodable bytes replaced, at most the output limit."""
    stderr: str
    timed_out: bool = False
    truncated: bool = False
    """True when output beyond the limit was dropped."""
    duration_s: float = 0.0
    """Wall time, seconds."""
    stdout_total: int | None = None
    """Bytes written to standard output, those dropped included; None when nobody counted."""
    stderr_total: int | None = None
    oom_killed: bool = False
    """True when a process of the workspace was killed for memory while the command ran, whatever the exit code."""
    undecoded: tuple[bytes, bytes] | None = None
    """Both outputs as they came, where one is not UTF-8."""

    @property
    def stdout_bytes(self) -> bytes:
        """Captured standard output as it came."""
        return self.undecoded[0] if self.undecoded else self.stdout.encode()

    @property
    def stderr_bytes(self) -> bytes:
        """Captured error output as it came."""
        return self.undecoded[1] if self.undecoded else self.stderr.encode()


class FileKind(StrEnum):
    """What an entry of a folder is."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class FileInfo(msgspec.Struct, frozen=True):
    """An entry of a folder in a workspace."""

    name: str
    """Without its folder; bytes that are not UTF-8 are escaped as by `os.fsdecode`."""
    kind: FileKind
    size: int
    """Bytes."""
    mode: int
    """Permission bits, for example 0o644."""
    modified_at: float
    """Seconds since the epoch."""


class End(StrEnum):
    """How a run ended, finer than its state: what follows from each is one table, `harness.scoring.policy`."""

    COMPLETED = "completed"
    AGENT_FAILED = "agent_failed"
    """The agent's own error, or its exit status."""
    TIMED_OUT = "timed_out"
    """Its budget of wall time ran out."""
    LIMIT = "limit"
    """Its budget of tokens, turns or cost ran out."""
    CONTEXT_FULL = "context_full"
    """The model's context was full."""
    MODEL_FAILED = "model_failed"
    """The model side failed until the agent's retries ended: not the agent's fault."""
    NEVER_STARTED = "never_started"
    """Its workspace could not be opened: there is nothing to evaluate."""
    WORKSPACE_LOST = "workspace_lost"
    """The workspace died, and what the agent had done with it."""
    SCORER_FAILED = "scorer_failed"
    """Every evaluation within the budget failed."""
    CUT_OFF = "cut_off"
    """The overall limit of agent and evaluation together was reached during the evaluation."""
    CANCELLED = "cancelled"


class ScoreStatus(StrEnum):
    """What an evaluation came to."""

    SCORED = "scored"
    FAILED = "failed"
    """Every evaluation within the budget failed: no reward."""
    LOST = "lost"
    """What was to be evaluated was gone: no reward."""
    CUT_OFF = "cut_off"
    """The overall limit was reached before an evaluation ended: no reward."""


class Score(msgspec.Struct, frozen=True):
    """Outcome of an evaluation."""

    reward: float | None
    """Finite number; higher is better. None: there is no reward, which is not 0."""
    parts: dict[str, float] = {}
    """Named components."""
    explanation: str = ""
    """Of a failed evaluation: why."""
    status: ScoreStatus = ScoreStatus.SCORED
    tampered: tuple[str, ...] = ()
    """What was found that could have steered the evaluation, and was kept from it; hostile text: escape it before showing it."""
    output: str = ""
    """What the tests printed, its middle left out when it is long; hostile text."""
    evaluations: int = 1
    """How often it was tried."""
    mode: str = ""
    """`separate` (a fresh workspace) or `shared` (the agent's own); empty where nothing was run."""
    snapshot: str | None = None
    """Id of the kept snapshot of what the agent left, to score again from."""


class RunResult(msgspec.Struct, frozen=True):
    """What `agent.result` holds once a session has ended."""

    run: RunId
    status: RunStatus
    reward: float | None
    """None means unscored."""
    parts: dict[str, float] = {}
    error: str | None = None
    calls: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    """Wall time from start to terminal state."""
    placeholder: bool = False
    tampered: tuple[str, ...] = ()
    """See `Score.tampered`."""
    snapshot: str | None = None
    """See `Score.snapshot`."""


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """A root-to-leaf path chosen for training, with its loss weights."""

    run: RunId
    leaf: CallId
    """The call that ends the path."""
    role: str
    path_ids: list[int]
    owned: list[int]
    """0/1 per path token: 1 where the token is a target of this trajectory."""
    weights: list[float]
    """Loss weight per path token; over all trajectories of a run they sum to 1."""
    advantage: float | None
    """Group-relative advantage of the run; None when it has none (no group, unscored, flat group)."""
    logprobs: list[float]
    """Behaviour log-prob (nats) per path token; 0.0 where not owned."""
    versions: list[int]
    """Policy version per path token; -1 where not owned."""
    advantages: list[float | None] = []
    """Advantage per path token, 0.0 where not owned: the run's, unless roles or calls have rewards of their own."""
    temperatures: list[float] = []
    """Temperature that each path token was sampled with; 1.0 where not owned."""
    calls: list[CallId | None] = []
    """Call that sampled each path token; None where not owned."""
