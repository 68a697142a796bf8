"""Calls to actors of a Ray cluster, and what may come of them. Ray is imported inside functions."""

from __future__ import annotations

from typing import Any

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.cells.launch.terms import Fenced

__all__ = ["CALL", "Lost", "Silent", "ask", "connected"]

CALL = 5.0
"""Seconds that an actor may take to answer one call."""


class Lost(TrainerError):
    """An actor, or its node, is gone."""


class Silent(TrainerError):
    """An actor did not answer in time. It may have done what it was asked."""


def ask(actor: Any, where: str, method: str, *arguments: Any, timeout: float = CALL) -> Any:
    """Call an actor and return its answer.

    Args:
        where: what messages say of its place: `the node 10.0.0.2`.

    Raises:
        Lost: the actor is gone.
        Silent: no answer came in `timeout` seconds.
        Fenced: it answers to another trainer.
        TrainerError: what the call raised there, or the connection was closed.
    """
    ray = connected()
    from ray import exceptions

    try:
        return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout)
    except (exceptions.GetTimeoutError, exceptions.ActorUnavailableError) as error:
        raise Silent(f"the actor on {where} does not answer") from error
    except exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, Fenced):
            raise Fenced(str(cause)) from error
        raise TrainerError(f"on {where}: {type(cause).__name__}: {cause}") from error
    except exceptions.RayError as error:
        raise Lost(f"the actor on {where} is gone: {error}") from error


def connected() -> Any:
    """Return the module; where it is not connected, its calls would start a cluster of their own.

    Raises:
        TrainerError: the connection was closed.
    """
    import ray

    if not ray.is_initialized():
        raise TrainerError("the trainer's connection to the Ray cluster was closed; start the trainer again")
    return ray
