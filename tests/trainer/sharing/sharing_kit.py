"""Satellites in processes of their own, which fail in the ways that they are told, and a tiny policy for them.

A process is forked from a server that has the heavy imports done, and serves one schedule after the other until it dies.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from gyre_sdk.trainer.sharing import tensors
from gyre_sdk.trainer.sharing.part import Part
from gyre_sdk.trainer.sharing.satellite import Satellite
from gyre_sdk.trainer.sharing.wire import Counted, Offer, Ruled
from gyre_sdk.trainer.units import Unit

KEY = b"the key of these tests"
SECONDS = 30.0
"""That anything may take before a test gives up on it."""
BUCKET = 16
"""Numbers of a message in schedules, so that a tiny gradient passes in several."""


class Tiny(nn.Module):
    """Two layers in float64 of which a unit uses one or both, weights that are not trained, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 3)
        self.seldom = nn.Linear(8, 3)
        self.never = nn.Linear(2, 2)
        self.fixed = nn.Parameter(torch.eye(4), requires_grad=False)
        self.register_buffer("scale", torch.rand(1))
        self.double()

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        hidden = (self.first(x @ self.fixed) * self.scale).tanh()
        return (self.seldom if seldom else self.second)(hidden)


def unit(number: int, tokens: int) -> Unit:
    """A unit whose content follows from its id."""
    return Unit(f"u{number}", "g", (), 1, tokens)


class TinyPolicy(Part):
    """What a satellite, or the core, computes with."""

    def __init__(self, seed: int = 0, base: float = 1.0) -> None:
        """`base`: of the weights that are not trained."""
        model = Tiny(seed)
        with torch.no_grad():
            model.fixed.mul_(base)
        super().__init__(model)
        self.entered = False

    def occupy(self) -> None:
        assert not self.entered
        self.entered = True

    def free(self) -> None:
        assert self.entered
        self.entered = False

    def compute(self, unit: Unit | None, version: int | None, counted: Counted) -> None:
        assert unit is not None
        draw = torch.Generator().manual_seed(int(unit.id[1:]))
        x = torch.randn(unit.tokens, 4, generator=draw, dtype=torch.float64)
        self.model(x, seldom=int(unit.id[1:]) % 7 == 3).log_softmax(-1)[:, 0].sum().backward()
        counted.totals.add(runs=unit.runs, rows=1, targets=unit.tokens, calls=1)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> None:
    """Wait for a condition."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not in {seconds:.0f} s"
        time.sleep(0.002)


@dataclass(frozen=True)
class Trouble:
    """What happens to a satellite, once."""

    where: str = ""
    """`pull` (damage only), `take`, `compute`, `offer` (before), `accepted` (before the transfer), `transfer`, `committed`; empty: nothing."""
    how: str = ""
    """`exit`, `kill`; `sleep` waits for `wake`, showing that it lives; `freeze` does so without; `damage` sends another
    number than it has."""
    nth: int = 1
    """The how manieth time that it comes by."""
    repeat: bool = False
    """Every offer that was accepted is made a second time."""


class _Troubled(Satellite):
    """A satellite that reaches its trouble."""

    def __init__(self, *arguments: Any, trouble: Trouble, tell: Callable[..., None], **more: Any) -> None:
        self._trouble = trouble
        self._tell = tell
        self._passed = 0
        self._frozen = False
        self._wake = threading.Event()
        super().__init__(*arguments, **more)
        inner = self._part.compute

        def compute(unit: Unit | None, version: int | None, counted: Counted) -> None:
            self._come_by("compute")
            inner(unit, version, counted)

        self._part.compute = compute  # type: ignore[method-assign]

    def wake(self) -> None:
        self._frozen = False
        self._wake.set()

    def _come_by(self, where: str) -> bool:
        """Meet the trouble if it is here; tell whether what is sent now is to be damaged."""
        if where != self._trouble.where:
            return False
        self._passed += 1
        if self._passed != self._trouble.nth:
            return False
        if self._trouble.how == "exit":
            os._exit(9)
        if self._trouble.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._trouble.how == "damage":
            return True
        self._frozen = self._trouble.how == "freeze"
        self._tell("asleep")
        self._wake.wait(SECONDS)
        return False

    def _beat(self, line: Any, quiet: threading.Event) -> None:
        super()._beat(_Breath(lambda: self._frozen, line), quiet)  # type: ignore[arg-type]

    def _pull(self, pull: Any) -> bool:
        part, damage = self._part, self._come_by("pull")

        def damaged(tensors: Any) -> None:
            assert self._link is not None
            self._link.receive(tensors)
            next(iter(tensors.values())).view(-1)[0] += 1e-9

        if damage:
            pulled = part.pull
            part.pull = lambda receive, digest: pulled(damaged, digest)  # type: ignore[method-assign]
        try:
            return super()._pull(pull)
        finally:
            if damage:
                part.pull = pulled  # type: ignore[method-assign]

    def _ask(self, question: Any) -> Any:
        if type(question).__name__ == "Take":
            self._come_by("take")
        return super()._ask(question)

    def _ruling(self, offer: Offer | None) -> Any:
        if offer is not None:
            self._offered = offer
            self._come_by("offer")
        ruling = super()._ruling(offer)
        if ruling.verdict == "refused":
            self._tell("refused", ruling)
        elif offer is None:
            self._come_by("committed")
            if self._trouble.repeat:
                again = self._ask(self._offered)
                assert isinstance(again, Ruled)
                self._tell("again", again.ruling, ruling)
        elif ruling.verdict == "send":
            self._come_by("accepted")
            self._link = _Slow(self._link, self._come_by)  # type: ignore[assignment]
        return ruling


@dataclass(frozen=True)
class _Breath:
    """A line that says nothing while its process is frozen."""

    held: Callable[[], bool]
    line: Any

    def send(self, message: Any) -> None:
        if not self.held():
            self.line.send(message)


class _Slow:
    """A link whose sending passes by trouble after every tensor."""

    def __init__(self, link: Any, come_by: Callable[[str], bool]) -> None:
        self._inner = link._inner if isinstance(link, _Slow) else link
        self._come_by = come_by

    def send(self, found: dict[str, torch.Tensor]) -> None:
        put = self._inner._put

        def passing(bucket: torch.Tensor) -> None:
            put(bucket + 1e-9 if self._come_by("transfer") else bucket)

        self._inner._put = passing
        try:
            self._inner.send(found)
        finally:
            self._inner._put = put

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _life(commands: Connection) -> None:
    """Serve satellites one after the other, as told."""
    torch.set_num_threads(1)
    tensors.BUCKET = BUCKET
    speaking = threading.Lock()

    def tell(*words: Any) -> None:
        with speaking:
            commands.send(words)

    while True:
        try:
            _, address, cell, trouble, chunk = commands.recv()
        except EOFError:
            return
        policy = TinyPolicy()
        with torch.no_grad():
            for weight in policy.model.parameters():
                if weight.requires_grad:
                    weight.fill_(7.0)  # what it has before it pulls
        satellite = _Troubled(address, KEY, cell, policy, trouble=trouble, tell=tell, chunk=chunk)

        def serve(satellite: Satellite = satellite) -> None:
            try:
                satellite.run()
            except BaseException as error:
                tell("failed", repr(error))
                raise

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for word in iter(lambda: commands.recv()[0], "stop"):
            assert word == "wake"
            satellite.wake()
        satellite.stop()
        satellite.wake()
        thread.join(SECONDS)
        tell("idle", thread.is_alive())


class Hand:
    """A process that is a satellite when asked."""

    def __init__(self, context: Any) -> None:
        self.commands, inside = context.Pipe()
        self.process = context.Process(target=_life, args=(inside,), daemon=True)
        self.process.start()
        inside.close()
        self.said: list[tuple[Any, ...]] = []

    def begin(self, address: tuple[str, int], cell: str, trouble: Trouble, chunk: int) -> None:
        self.said = []
        self.commands.send(("serve", address, cell, trouble, chunk))

    def heard(self, word: str) -> list[tuple[Any, ...]]:
        """What it said under this word so far."""
        try:
            while self.commands.poll(0):
                self.said.append(self.commands.recv())
        except (EOFError, OSError):
            pass
        return [said for said in self.said if said[0] == word]

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    def wake(self) -> None:
        self.commands.send(("wake",))

    def end(self) -> None:
        """Make it idle, if it lives."""
        if not self.alive:
            return
        try:
            self.commands.send(("stop",))
            until(lambda: self.heard("idle") or not self.alive, "a satellite stops")
        except (BrokenPipeError, ConnectionResetError):
            self.process.join(SECONDS)


class Pool:
    """Processes that live from schedule to schedule; those that died are replaced."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["__main__", "pytest", "torch", "gyre_sdk.trainer.sharing.satellite", "sharing_kit"]
        )
        self._idle: list[Hand] = []

    def take(self) -> Hand:
        while self._idle:
            hand = self._idle.pop()
            if hand.alive:
                return hand
        return Hand(self._context)

    def put(self, hand: Hand) -> None:
        hand.end()
        if hand.alive:
            self._idle.append(hand)

    def close(self) -> None:
        for hand in self._idle:
            hand.process.kill()
            hand.process.join(SECONDS)


def some_units(draw: random.Random, most: int = 16) -> list[Unit]:
    """Units of any sizes; one content may come twice."""
    found = [unit(number, draw.randint(1, 9)) for number in range(draw.randint(3, most))]
    return [*found, found[draw.randrange(len(found))]] if draw.random() < 0.3 else found


def one_process(units: list[Unit]) -> dict[str, torch.Tensor | None]:
    """The gradient that all units have together."""
    policy, counted = TinyPolicy(), Counted()
    for one in units:
        policy.compute(one, 0, counted)
    return gradients(policy.model)


def sealed(units: list[Unit], parts: int, ready: Callable[[int], bool]) -> Iterator[Unit]:
    """Units as groups close: in parts, each when `ready` says so of the number that came before."""
    size = -(-len(units) // parts)
    for place, one in enumerate(units):
        if place and place % size == 0:
            until(lambda place=place: ready(place), "the next group")  # type: ignore[misc]
        yield one
