"""Budgets of a run, and how the ways a block can end map to terminal states."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gyre_sdk.errors import LimitExceeded, WorkspaceError
from gyre_sdk.records import RunStatus

LIMIT_CODE = "limit_exceeded"
"""Error code of the proxy's answer to a call beyond a budget."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may spend; None means no limit. The proxy enforces them, in the protocol's own error format."""

    tokens: int | None = None
    """Prompt plus sampled tokens over all calls of the run."""
    turns: int | None = None
    """Calls of the run, all lanes together."""
    seconds: float | None = None
    """Wall time of the block, from the first line in it."""
    cost: float | None = None
    """US dollars over all calls of the run, at the service's prices."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a block ended, before its work product is scored."""

    status: RunStatus
    error: str | None
    scorable: bool
    """Whether the retained work product says something about the agent."""
    swallow: bool
    """Whether the exception is the run's own outcome and stops at the `with` block."""


def classify(error: BaseException | None) -> Ending:
    """Return how a block that raised `error` (None: it did not) ended.

    A budget that ran out is an outcome, scored like any other (arXiv:2609.33848, partial scoring) and not raised
    further; the service knows which one it was and turns `limit` into `timed_out` for wall time. An agent's own error is scored and raised. A broken connection to the model or a broken workspace says
    nothing about the agent: not scored, raised.
    """
    if error is None:
        return Ending(RunStatus.COMPLETED, None, scorable=True, swallow=False)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, LimitExceeded):
        return Ending(RunStatus.TIMED_OUT, text, scorable=True, swallow=True)
    if _error_code(error) == LIMIT_CODE:
        return Ending(RunStatus.LIMIT, text, scorable=True, swallow=True)
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError):
        return Ending(RunStatus.CANCELLED, text, scorable=False, swallow=False)
    if isinstance(error, WorkspaceError):
        return Ending(RunStatus.WORKSPACE_ERROR, text, scorable=False, swallow=False)
    if _model_failed(error):
        return Ending(RunStatus.AGENT_ERROR, f"infrastructure: {text}", scorable=False, swallow=False)
    return Ending(RunStatus.AGENT_ERROR, text, scorable=True, swallow=False)


def _error_code(error: BaseException) -> object:
    """Return the service's error code, as the SDKs of OpenAI and Anthropic hold it."""
    code = getattr(error, "code", None)
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, dict) else None
    return code or (inner.get("code") if isinstance(inner, dict) else None)


def _model_failed(error: BaseException) -> bool:
    """Tell whether an SDK gave up on the model side: no connection, or a 5xx until its retries ended."""
    if type(error).__module__.partition(".")[0] not in ("openai", "anthropic", "httpx"):
        return False
    status = getattr(error, "status_code", None)
    return status is None or int(status) >= 500
