"""What passes by itself on an engine whose machine is slow or busy, and how long it is waited for: one client for all requests.

An engine that waits for a disk or for its runtime fails now what it does a moment later. Such a failure is not the run's. So every
request is made again, for a bounded time, where that does no harm, and what still fails is a `WorkspaceError`, whoever asked.
A failure that does not pass, like an image that cannot be run, is told at once.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from gyre_sdk.errors import WorkspaceError

PATIENCE = 30.0
"""Seconds, from its first failure, that something is tried again for. A disk that is busy answers in a few."""
SLOW = 1800.0
"""Seconds of silence allowed to what reads or writes all of a container's files."""
_FIRST, _LONGEST = 0.05, 1.0
"""Seconds between two tries; doubled each time."""
_PASSING = re.compile(
    r"deadline exceeded|device or resource busy|resource temporarily unavailable|already in progress|ttrpc: closed|timed out"
    r"|i/o timeout|transport is closing|code = unavailable|did not receive an exit event|to freeze",
    re.IGNORECASE,
)
"""What engines and their runtimes say of a machine that did not get to it."""


class Again(StrEnum):
    """When a request may be made again."""

    ALWAYS = "always"
    """Made twice, it does what it does made once."""
    REFUSED = "refused"
    """Once the engine has said that it was not done."""
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of request is treated."""

    method: str
    path: re.Pattern[str]
    again: Again
    slow: bool = False
    """Whether it takes as long as the files of a container are many."""


_RULES = (
    Rule("GET", re.compile(r"/containers/json\?.*size=1|/changes"), Again.ALWAYS, slow=True),
    Rule("GET", re.compile(""), Again.ALWAYS),
    Rule("HEAD", re.compile(""), Again.ALWAYS),
    Rule("PUT", re.compile(r"/archive"), Again.ALWAYS, slow=True),
    Rule("DELETE", re.compile(""), Again.ALWAYS, slow=True),
    Rule("POST", re.compile(r"/commit\?"), Again.REFUSED, slow=True),
    Rule("POST", re.compile(r"/(containers|networks)/create|/containers/[^/]+/(exec|pause|unpause)$"), Again.REFUSED),
)
"""The first that fits. Anything else, like a start (a container that did not start is gone), is made once: see `Patience`."""
_ONCE = Rule("", re.compile(""), Again.NEVER)


class Patience:
    """Says for how long something is tried again."""

    def __init__(self) -> None:
        self._until = 0.0
        self._delay = _FIRST

    def again(self) -> bool:
        """Wait a little after a failure and return True; False once the time is over."""
        now = time.monotonic()
        self._until = self._until or now + PATIENCE
        if now + self._delay > self._until:
            return False
        time.sleep(self._delay)
        self._delay = min(2 * self._delay, _LONGEST)
        return True


def passes(failure: object) -> bool:
    """Tell whether what an engine or its runtime said, or this module raised, is about a machine that did not get to it."""
    if isinstance(failure, APIError):
        failure = failure.explanation or failure
    return isinstance(failure, EngineSilent) or _PASSING.search(str(failure)) is not None


def rule_of(method: str, path: str) -> Rule:
    """Return how a request is treated. Pure."""
    return next((rule for rule in _RULES if rule.method == method and rule.path.search(path)), _ONCE)


class EngineSilent(WorkspaceError, DockerException):  # type: ignore[misc]
    """The engine did not answer in time."""


class EngineGone(WorkspaceError, DockerException):  # type: ignore[misc]
    """The engine cannot be reached, or the connection to it broke."""


_REFUSALS: dict[type[APIError], type[APIError]] = {
    kind: type(kind.__name__, (WorkspaceError, kind), {}) for kind in (APIError, NotFound, ImageNotFound)
}
"""docker-py's errors, each as one that is also a `WorkspaceError`: no engine's answer reaches a run as anything else."""


class PatientAPI(docker.APIClient):  # type: ignore[misc]
    """docker-py's client, whose requests are made again as `rule_of` says."""

    def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
        """Make a request.

        Raises:
            EngineSilent, EngineGone: there is no answer.
        """
        rule, patience = rule_of(str(request.method), request.path_url), Patience()
        if rule.slow and kwargs.get("timeout") == self.timeout:
            kwargs["timeout"] = max(SLOW, self.timeout)
        whole = request.body is None or isinstance(request.body, bytes | str)  # what was a stream is used up
        while True:
            try:
                answer: requests.Response = super().send(request, **kwargs)
            except requests.exceptions.Timeout as error:
                raise EngineSilent(
                    f"the Docker engine did not answer {_name(request)} within {kwargs.get('timeout'):g} s; it, or its disk,"
                    " is overloaded: run less at a time"
                ) from error
            except requests.exceptions.ConnectionError as error:
                below = _below(error)
                full = any(isinstance(one, BlockingIOError) for one in below)  # no room in its queue: nothing was sent
                broke = any(isinstance(one, ConnectionResetError | BrokenPipeError) for one in below)
                if whole and (full or (broke and rule.again is Again.ALWAYS)) and patience.again():
                    continue
                raise EngineGone(f"the Docker engine cannot be asked ({_name(request)}): {error}") from error
            refused = answer.status_code >= 500 or answer.status_code == 409
            if not (refused and whole and rule.again is not Again.NEVER and passes(answer.text) and patience.again()):
                return answer

    def _raise_for_status(self, response: requests.Response) -> None:
        try:
            super()._raise_for_status(response)
        except APIError as error:
            raise _REFUSALS[type(error)](
                str(error.args[0]), response=error.response, explanation=error.explanation
            ) from error


class PatientClient(docker.DockerClient):  # type: ignore[misc]
    """docker-py's client over a `PatientAPI`."""

    def __init__(self, **kwargs: Any) -> None:
        self.api = PatientAPI(**kwargs)


def _name(request: requests.PreparedRequest) -> str:
    path = re.sub(r"^/v[\d.]+", "", request.path_url.partition("?")[0])
    return f"{request.method} {path}"


def _below(error: BaseException) -> list[BaseException]:
    """Return an error and what the client's layers made it of."""
    found = [error]
    while (below := found[-1].__cause__ or found[-1].__context__) is not None:
        found.append(below)
    return found
