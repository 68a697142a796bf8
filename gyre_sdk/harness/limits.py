"""Budgets of a run and of lanes in it, and how a block ended; what follows from that is `scoring.policy`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, fields

from gyre_sdk.errors import LimitExceeded, SettingsError, Vetoed, WorkspaceError
from gyre_sdk.records import End

LIMIT_CODE = "limit_exceeded"
"""Error code of the answer to a call beyond a budget; SDKs do not send such a call again."""

CONTEXT_CODE = "context_length_exceeded"
"""Error code of the answer to a call that the model's context does not hold."""

_OF_REQUESTS = frozenset({"openai.APIError", "anthropic.APIError", "httpx.HTTPError", "httpx2.HTTPError"})
"""What errors of requests derive from, LiteLLM's too. SDKs raise others: for a missing key, an answer that is cut off."""
_OF_CONNECTIONS = frozenset({"openai.APIConnectionError", "anthropic.APIConnectionError"})

_TIME = ("wall_s", "working_s")
"""Budgets whose end is `timed_out`; that of the others is `limit`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run, or a lane with all that it opens, may spend; None means no limit.

    A call beyond a budget is refused in the protocol's own error format, with the code `limit_exceeded`.

    Raises:
        SettingsError: a value is not above 0.
    """

    turns: int | None = None
    """Calls, all lanes together."""
    tokens: int | None = None
    """Prompt plus sampled tokens over all calls."""
    cost_usd: float | None = None
    """US dollars over all calls, at the service's prices; of hosted models at litellm's, where it has them."""
    wall_s: float | None = None
    """Wall time of the block, from the first line in it."""
    working_s: float | None = None
    """Wall time without that in which model calls were in flight: waiting for replicas, in their queues, sampling.
    What is left is the agent's own code and its tools."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not 0 < value < float("inf"):
                raise SettingsError(f"limits: {field.name} = {value!r}; give a number above 0, or None for no limit")

    @property
    def metered(self) -> bool:
        """Whether any is set that the service does not enforce."""
        return self.working_s is not None

    def any(self) -> bool:
        """Tell whether anything is limited."""
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True, slots=True)
class Ending:
    """How a block ended, before its work product is scored."""

    end: End
    error: str | None
    swallow: bool
    """Whether the exception is the run's own outcome and stops at the `with` block."""


def classify(error: BaseException | None) -> Ending:
    """Return how a block that raised `error` (None: it did not) ended.

    A budget that ran out is an outcome, scored like any other (arXiv:2609.33848, partial scoring) and not raised
    further. An agent's own error, a full context among them, is scored and raised. A broken connection to the model or a
    broken workspace says nothing about the agent: not scored, raised.
    """
    if error is None:
        return Ending(End.COMPLETED, None, swallow=False)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, LimitExceeded):
        return Ending(spent_end(error.limit), text, swallow=True)
    if is_limit(error):
        return Ending(End.LIMIT, text, swallow=True)
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | asyncio.CancelledError | Vetoed):
        return Ending(End.CANCELLED, text, swallow=False)
    if isinstance(error, WorkspaceError):
        return Ending(End.WORKSPACE_LOST, text, swallow=False)
    if _model_failed(error):
        return Ending(End.MODEL_FAILED, f"infrastructure: {text}", swallow=False)
    if _error_code(error) == CONTEXT_CODE:
        return Ending(End.CONTEXT_FULL, f"context limit: {text}", swallow=False)
    return Ending(End.AGENT_FAILED, text, swallow=False)


def spent_end(limit: str) -> End:
    """Return the end of a run whose budget of this name ran out."""
    return End.TIMED_OUT if limit in _TIME else End.LIMIT


def is_limit(error: BaseException) -> bool:
    """Tell whether an error is a budget that ran out, as gyre raises it or as an SDK of a provider does."""
    return isinstance(error, LimitExceeded) or _error_code(error) == LIMIT_CODE


def is_refused(error: BaseException) -> bool:
    """Tell whether an error can come of a spent budget: it is one, or an SDK found its key closed."""
    return is_limit(error) or getattr(error, "status_code", None) == 401


def _error_code(error: BaseException) -> object:
    """Return the service's error code, as the SDKs of OpenAI and Anthropic hold it."""
    code = getattr(error, "code", None)
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, Mapping) else None
    return code or (inner.get("code") if isinstance(inner, Mapping) else None)


def _model_failed(error: BaseException) -> bool:
    """Tell whether an SDK gave up on the model side: no connection, a broken stream, or a 5xx until its retries ended."""
    kinds = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    if not kinds & _OF_REQUESTS:
        return False
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status is None or int(status) >= 500 or not kinds.isdisjoint(_OF_CONNECTIONS)
