"""An agent is called, waited for, and left to itself when it hangs."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar

import pytest

from gyre_sdk.errors import LimitExceeded
from gyre_sdk.trainer.agents import calling
from gyre_sdk.trainer.agents.calling import call

said: ContextVar[str] = ContextVar("said")


@pytest.mark.parametrize("seconds", [None, 3600.0])
def test_an_agent_is_waited_for_and_what_it_raises_is_raised(seconds: float | None) -> None:
    seen: list[str] = []

    async def later() -> None:
        await asyncio.sleep(0)
        seen.append(f"later {said.get()}")

    said.set("here")
    call(lambda: seen.append(said.get()), seconds)
    call(later, seconds)
    assert seen == ["here", "later here"]
    for error in (TimeoutError("its own"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()):

        def fail(error: BaseException = error) -> None:
            raise error

        async def fail_later(error: BaseException = error) -> None:
            raise error

        for agent in (fail, fail_later):
            with pytest.raises(type(error)) as caught:
                call(agent, seconds)
            assert str(caught.value) == str(error)


def test_one_that_hangs_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "OVERTIME", 0.05)
    go, gone = threading.Event(), threading.Event()

    def hang() -> None:
        go.wait()
        gone.set()

    try:
        with pytest.raises(LimitExceeded, match=r"not come back .* after its 0\.01 s of wall time: it hangs") as caught:
            call(hang, 0.01)
        assert caught.value.limit == "wall_s"
    finally:
        go.set()
    assert gone.wait(60)


def test_async_agents_do_not_wait_for_each_other() -> None:
    """One that blocks its event loop, as most do somewhere, blocks its own."""
    both = threading.Barrier(2)

    async def blocking() -> None:
        both.wait(60)

    other = threading.Thread(target=call, args=(blocking, None))
    other.start()
    call(blocking, 60.0)
    other.join(60)
    assert not other.is_alive() and not both.broken
