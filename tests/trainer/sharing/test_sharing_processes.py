"""Promise 5 with real processes: satellites join late, die anywhere, come back as zombies; the core dies too."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing_kit import (
    BUCKET,
    KEY,
    SECONDS,
    Hand,
    Pool,
    TinyPolicy,
    Trouble,
    gradients,
    one_process,
    sealed,
    some_units,
    unit,
    until,
)

from gyre_sdk import events
from gyre_sdk.errors import SettingsError, TrainerError
from gyre_sdk.trainer.sharing import seat, tensors
from gyre_sdk.trainer.sharing.batch import Batch
from gyre_sdk.trainer.sharing.book import Refusal, Verdict
from gyre_sdk.trainer.sharing.core import Collected, Core
from gyre_sdk.trainer.sharing.satellite import Satellite
from gyre_sdk.trainer.sharing.wire import Beat, Counted, Hello, Welcome, dial
from gyre_sdk.trainer.units import Unit

EPSILON = 1e-12
NONE = Trouble()


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensors, "BUCKET", BUCKET)
        yield found
    found.close()


class Trainer:
    """What the trainer's thread does with a core: one batch."""

    def __init__(self, core: Core, units: Iterator[Unit], step: int = 1, size: int = 1) -> None:
        self.size = size
        self.policy = TinyPolicy()
        self.counted = Counted()
        self.collected: Collected | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, args=(core, units, step), daemon=True)
        self._thread.start()
        until(lambda: core.progress().step == step or not self._thread.is_alive(), "the batch opens")

    def _train(self, core: Core, units: Iterator[Unit], step: int) -> None:
        try:
            for round_ in core.deal(step, 0, self.policy.model, units, size=self.size):
                for one in round_:
                    self.policy.compute(one, 0, self.counted)
            self.collected = core.collect()
            self.collected.sums.add_to(self.policy.model)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the batch does not end"

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()


class Stage:
    """A core whose clock can jump, and satellites of a pool."""

    def __init__(self, pool: Pool, port: int = 0, lease_s: float = 20.0, **more: Any) -> None:
        self.events: list[events.Event] = []
        self.jumped = 0.0
        self._pool = pool
        self.hands: list[Hand] = []
        self.core = Core(
            key=KEY,
            port=port,
            lease_s=lease_s,
            observer=self.events.append,
            clock=lambda: time.monotonic() + self.jumped,
            **more,
        )

    def __enter__(self) -> Stage:
        self.core.__enter__()
        self.core.close_gate()
        return self

    def __exit__(self, *what: Any) -> None:
        self.core.__exit__(*what)
        for hand in self.hands:
            self._pool.put(hand)

    def hand(self, cell: str, trouble: Trouble = NONE, chunk: int = 2, *, admit: bool = True) -> Hand:
        found = self._pool.take()
        found.begin(self.core.address, cell, trouble, chunk)
        self.hands.append(found)
        if admit:
            self.core.admit(cell)
        return found

    @property
    def committed(self) -> list[events.UnitsCommitted]:
        return [event for event in self.events if isinstance(event, events.UnitsCommitted)]

    @property
    def own(self) -> int:
        """Units that the core computed."""
        return sum(event.units for event in self.committed if event.cell == "cell-0")

    def has_begun(self, number: int) -> bool:
        """Tell whether one of the batch's units so far was leased."""
        seen = self.core.progress()
        return seen.ready_units < number

    def check(self, trainer: Trainer, units: list[Unit]) -> None:
        """The gradient is that of one process, and every unit was committed once."""
        trainer.end()
        if trainer.error is not None:
            raise trainer.error
        assert trainer.collected is not None
        assert trainer.collected.names == [one.id for one in units]
        assert trainer.counted.totals.targets + trainer.collected.totals.targets == sum(one.tokens for one in units)
        committed = self.committed
        assert sum(event.units for event in committed) == len(units)
        assert sum(event.tokens for event in committed) == sum(one.tokens for one in units)
        same(gradients(trainer.policy.model), one_process(units))
        for hand in self.hands:
            assert not hand.heard("failed"), hand.heard("failed")


def same(found: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor | None]) -> None:
    for name, gradient in wanted.items():
        other = found[name]
        assert (other is None) == (gradient is None), name
        if gradient is not None and other is not None:
            assert float((other - gradient).norm()) <= EPSILON * float(gradient.norm()), name


WHERE = ["take", "compute", "offer", "accepted", "transfer", "committed"]


@pytest.mark.parametrize("where", WHERE)
def test_a_satellite_that_dies_changes_nothing(pool: Pool, where: str) -> None:
    """Before its lease, in a unit, before and after its offer was accepted, in its transfer, after its commit."""
    deaths = sum(_death(pool, where, random.Random(f"{where}{seed}")) for seed in range(6))
    assert deaths >= 3


def _death(pool: Pool, where: str, draw: random.Random) -> bool:
    units = some_units(draw)
    with Stage(pool) as stage:
        victim = stage.hand("victim", Trouble(where, draw.choice(["exit", "kill"])), draw.randint(1, 4))
        trainer = Trainer(stage.core, sealed(units, draw.randint(1, 3), lambda number: stage.has_begun(number)))
        if draw.random() < 0.6:
            until(lambda: not victim.alive, "the victim dies")
        others = [stage.hand(f"late{number}", chunk=draw.randint(1, 4)) for number in range(draw.randint(0, 2))]
        if not others or draw.random() < 0.7:
            until(lambda: not victim.alive or trainer.ended, "the victim dies, or has no occasion to")
            stage.core.open_gate()
        stage.check(trainer, units)
        return not victim.alive


@pytest.mark.parametrize("where", ["compute", "offer", "accepted", "transfer"])
def test_a_zombie_is_refused_and_nothing_of_it_counts(pool: Pool, where: str) -> None:
    """It wakes up when its leases are over: before or after others computed its units, or in the next batch."""
    for seed in range(6):
        draw = random.Random(f"{where}{seed}")
        units = some_units(draw)
        with Stage(pool) as stage:
            zombie = stage.hand("zombie", Trouble(where, "sleep"), draw.randint(1, 4))
            trainer = Trainer(stage.core, iter(units))
            until(lambda zombie=zombie: zombie.heard("asleep"), "the zombie holds leases")  # type: ignore[misc]
            stage.jumped += 1000.0
            when = draw.choice(["early", "late", "next"])
            if when == "early":
                zombie.wake()
                until(lambda zombie=zombie: zombie.heard("refused"), "its offer is refused")  # type: ignore[misc]
            stage.core.open_gate()
            stage.check(trainer, units)
            if when == "late":
                zombie.wake()
            if when == "next":
                _next_batch(stage, zombie)


def _next_batch(stage: Stage, zombie: Hand) -> None:
    """Let it wake up in a batch with the same weights, whose units have the places of those that it computed."""
    stage.core.close_gate()
    stage.events.clear()
    units = some_units(random.Random(0))
    trainer = Trainer(stage.core, iter(units), step=2)
    zombie.wake()
    until(lambda: stage.core.joined("zombie") or trainer.ended, "it joins the new batch")
    stage.core.open_gate()
    stage.check(trainer, units)


def test_a_satellite_that_is_silent_is_given_up_and_comes_back(pool: Pool) -> None:
    """Frozen with its line open, for longer than the lease; nobody waits for it, and it joins again when it thaws."""
    for where in ("compute", "offer"):
        units = some_units(random.Random(where))
        with Stage(pool, lease_s=0.5) as stage:
            frozen = stage.hand("frozen", Trouble(where, "freeze"))
            trainer = Trainer(stage.core, iter(units))
            until(lambda frozen=frozen: frozen.heard("asleep"), "it is frozen")  # type: ignore[misc]
            until(lambda stage=stage: "frozen" not in stage.core.waiting(), "it is given up")  # type: ignore[misc]
            assert stage.core.progress().leased_tokens == 0
            frozen.wake()
            stage.check(trainer, units)  # with the core's gate closed: it has computed them all
            assert not stage.own


def test_a_gradient_that_came_damaged_is_thrown_away(pool: Pool) -> None:
    """The satellite computes its units anew, on another line."""
    for seed in range(3):
        units = some_units(random.Random(seed))
        with Stage(pool) as stage:
            stage.hand("damaged", Trouble("transfer", "damage", nth=2))
            trainer = Trainer(stage.core, iter(units))
            stage.check(trainer, units)
            assert not stage.own


def test_weights_that_came_damaged_are_computed_with_by_nobody(pool: Pool) -> None:
    """The satellite pulls again."""
    units = some_units(random.Random(5))
    with Stage(pool) as stage:
        hand = stage.hand("one", Trouble("pull", "damage"))
        stage.check(Trainer(stage.core, iter(units)), units)
        assert not stage.own and not hand.heard("refused") and stage.core._passed.pulls.count == 2


def test_a_lease_outlives_the_digest_of_a_large_gradient(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece of it takes more than half a lease; nothing is heard of the satellite in the meantime."""
    digest, units = tensors.fingerprint, some_units(random.Random(4))
    with Stage(pool) as stage:

        def slowly(found: Any, alive: Any = lambda: None) -> str:
            def piece() -> None:
                stage.jumped += 11.0
                alive()

            return digest(found, piece)

        monkeypatch.setattr(seat, "fingerprint", slowly)
        hand = stage.hand("one", chunk=4)
        stage.check(Trainer(stage.core, iter(units)), units)
        assert stage.jumped > 20.0 and not stage.own and not hand.heard("refused")


def test_an_offer_made_twice_is_acknowledged_and_added_once(pool: Pool) -> None:
    for seed in range(8):
        draw = random.Random(seed)
        units = some_units(draw)
        with Stage(pool) as stage:
            hands = [stage.hand(f"twice{number}", Trouble(repeat=True), draw.randint(1, 4)) for number in range(2)]
            trainer = Trainer(stage.core, sealed(units, 2, stage.has_begun))
            stage.check(trainer, units)
            again = [said for hand in hands for said in hand.heard("again")]
            assert again
            for _, second, first in again:
                assert first.verdict == "committed"
                assert second.verdict == "committed" or second.refusal == "not the open batch"


def test_satellites_join_late_and_leave_early(pool: Pool) -> None:
    """Every order of joining, leaving and the core's own work; a dismissed one may come back."""
    own = 0
    for seed in range(24):
        draw = random.Random(seed)
        units = some_units(draw, most=24)
        with Stage(pool) as stage:
            cells = [f"cell{number}" for number in range(draw.randint(1, 3))]
            hands = [stage.hand(cell, chunk=draw.randint(1, 4), admit=False) for cell in cells]
            until(lambda stage=stage, cells=cells: stage.core.waiting() == set(cells), "all dial in")  # type: ignore[misc]
            trainer = Trainer(stage.core, sealed(units, draw.randint(1, 4), stage.has_begun), size=draw.randint(1, 3))
            for _ in range(draw.randint(0, 6)):
                cell = draw.choice(cells)
                match draw.choice(["admit", "dismiss", "join", "open", "close"]):
                    case "admit":
                        stage.core.admit(cell)
                    case "dismiss":
                        assert stage.core.dismiss(cell, SECONDS)
                        assert not stage.core.joined(cell)
                    case "join":
                        stage.core.admit(cell)
                        assert stage.core.join_wait(cell, SECONDS)
                    case "open":
                        stage.core.open_gate()
                    case "close":
                        stage.core.close_gate()
                        assert not stage.core._batch.computing
            if draw.random() < 0.5:
                stage.core.open_gate()
            else:
                stage.core.admit(draw.choice(cells))
            stage.check(trainer, units)
            own += bool(stage.own)
            for cell in cells:
                assert stage.core.dismiss(cell, SECONDS)
            assert all(hand.alive for hand in hands)
    assert 0 < own < 24


troubles = st.builds(
    Trouble,
    st.sampled_from(["", *WHERE]),
    st.sampled_from(["kill", "exit", "sleep"]),
    st.integers(1, 2),
    st.booleans(),
)
members = st.lists(st.tuples(troubles, st.integers(1, 4), st.booleans()), min_size=1, max_size=3)
"""Of each satellite: what happens to it, units that it leases at a time, and whether it joins late."""


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10**6), st.integers(1, 3), members, st.booleans(), st.booleans())
def test_any_schedule_gives_the_gradient_of_one_process(
    pool: Pool, seed: int, parts: int, members: list[Any], wakes: bool, restarts: bool
) -> None:
    """Several of them die, fall asleep past their leases, repeat offers and come late, all in one batch; the core dies too."""
    units = some_units(random.Random(seed))
    with Stage(pool) as first:
        port, stage = first.core.address[1], first
        hands = [first.hand(f"c{n}", one, chunk) for n, (one, chunk, late) in enumerate(members) if not late]
        trainer = Trainer(first.core, sealed(units, parts, first.has_begun))
        hands += [first.hand(f"c{n}", one, chunk) for n, (one, chunk, late) in enumerate(members) if late]
        if restarts:
            until(lambda: first.has_begun(len(units)) or not any(hand.alive for hand in hands), "somebody works")
            first.hands = []
            first.core.__exit__(None, None, None)
            stage = Stage(pool, port)
            stage.hands = hands
        with stage if restarts else nullcontext():
            if restarts:
                for number in range(len(members)):
                    stage.core.admit(f"c{number}")
                trainer = Trainer(stage.core, sealed(units, parts, stage.has_begun))
            stage.core.open_gate()
            give_up = time.monotonic() + SECONDS
            while not trainer.ended and time.monotonic() < give_up:
                stage.jumped += 1.0  # leases of who sleeps end; beats of all others are taken meanwhile
                time.sleep(0.01)
            for hand in hands:
                if wakes and hand.alive and hand.heard("asleep"):
                    hand.wake()
            stage.check(trainer, units)


def test_a_core_that_dies_begins_the_batch_anew(pool: Pool) -> None:
    """Satellites dial in to the next one by themselves; what they had computed for the first counts nowhere."""
    for seed in range(10):
        draw = random.Random(seed)
        units = some_units(draw)
        with Stage(pool) as first:
            port = first.core.address[1]
            asleep = Trouble("offer", "sleep") if draw.random() < 0.5 else NONE
            hands = [first.hand("one", asleep, draw.randint(1, 4))]
            lost = Trainer(first.core, sealed(units, 2, lambda number: False))
            until(lambda first=first: first.core.progress().done_tokens or first.core.progress().leased_tokens, "work")  # type: ignore[misc]
            if asleep.how:
                until(lambda hands=hands: hands[0].heard("asleep"), "one holds a contribution")  # type: ignore[misc]
            hands.append(first.hand("two", chunk=draw.randint(1, 4)))
            first.hands = []
            first.core.__exit__(None, None, None)
            with Stage(pool, port) as second:
                second.hands = hands
                trainer = Trainer(second.core, iter(units))
                if asleep.how:
                    hands[0].wake()
                second.core.admit("one")
                second.core.admit("two")
                until(lambda second=second: second.core.waiting() == {"one", "two"}, "both come back")  # type: ignore[misc]
                second.core.open_gate()
                second.check(trainer, units)
            del lost


def test_a_transfer_through_files_gives_the_same(pool: Pool, tmp_path: Path) -> None:
    units = some_units(random.Random(1))
    with Stage(pool, link="files", folder=tmp_path) as stage:
        stage.hand("one")
        trainer = Trainer(stage.core, iter(units))
        stage.check(trainer, units)
        assert not stage.own
        assert stage.core.dismiss("one", SECONDS)
        until(lambda: not list(tmp_path.iterdir()), "the files are removed")


def test_progress_counts_what_is_where(pool: Pool) -> None:
    units = some_units(random.Random(2))
    tokens = sum(one.tokens for one in units)
    with Stage(pool) as stage:
        nothing = stage.core.progress()
        assert (nothing.step, nothing.ready_units, nothing.sealed_all, nothing.tokens_per_second) == (0, 0, False, {})
        assert stage.core.join_wait("nobody", 0.0)
        trainer = Trainer(stage.core, iter(units))
        until(lambda: stage.core.progress().sealed_all, "all units are sealed")
        seen = stage.core.progress()
        assert (seen.ready_units, seen.ready_tokens, seen.leased_tokens, seen.done_tokens) == (len(units), tokens, 0, 0)
        assert not stage.core.join_wait("nobody", 0.0)
        hand = stage.hand("one", Trouble("offer", "sleep"), chunk=1)
        until(lambda: hand.heard("asleep"), "it has computed a unit")
        seen = stage.core.progress()
        assert seen.leased_tokens > 0 and seen.ready_tokens + seen.leased_tokens == tokens
        hand.wake()
        stage.check(trainer, units)
        seen = stage.core.progress()
        assert seen.tokens_per_second["one"] > 0 and seen.pull_s > 0 and seen.push_s > 0


def test_what_the_source_of_units_raises_is_raised_in_deal() -> None:
    def broken() -> Iterator[Unit]:
        yield from some_units(random.Random(0))
        raise ValueError("no further group")

    with Core(key=KEY) as core, pytest.raises(ValueError, match="no further group"):
        for _ in core.deal(1, 0, TinyPolicy().model, broken()):
            pass


def test_a_core_that_waits_asks_whether_anything_can_come() -> None:
    """Its gate is closed, all units are ready, no satellite is there, and nobody is left who would open it."""

    def check() -> None:
        if core.progress().sealed_all:
            raise TrainerError("the manager of cells ended")

    with Core(key=KEY) as core:
        core.close_gate()
        core.check = check
        with pytest.raises(TrainerError, match="the manager of cells ended"):
            list(core.deal(1, 0, TinyPolicy().model, some_units(random.Random(0))))
        assert core.progress().step == 0


def test_the_gate_of_a_core_whose_unit_hangs_is_closed_within_a_bound() -> None:
    """It takes no other unit when that one ends after all, and the whole batch once the gate is open again."""
    taken: list[str] = []
    hung, go_on = threading.Event(), threading.Event()

    def train() -> None:
        for units in core.deal(1, 0, TinyPolicy().model, [unit(0, 3), unit(1, 3)]):
            taken.extend(one.id for one in units)
            if taken and not hung.is_set():
                hung.set()
                assert go_on.wait(SECONDS)

    with Core(key=KEY) as core, ThreadPoolExecutor(1) as pool:
        trainer = pool.submit(train)
        assert hung.wait(SECONDS)
        assert not core.close_gate(0.01) and not core.close_gate(0.0)
        go_on.set()
        assert core.close_gate(SECONDS) and core.close_gate(0.0)
        until(lambda: core.progress().ready_units == 1, "it has rested")
        assert taken == ["u0"]
        core.open_gate()
        trainer.result(SECONDS)
    assert taken == ["u0", "u1"]


def test_a_sum_that_broke_ends_the_step() -> None:
    """What is committed is in the gradient, or there is no step."""
    model = TinyPolicy().model
    batch = Batch(SECONDS, lambda event: None, time.monotonic)
    batch.begin(1, 0, model, [unit(0, 3), unit(1, 3)])
    until(lambda: batch.counts()[1].closed, "all units are there")
    for name, size in (("fits", 2), ("does not", 3)):
        taken = batch.take("one", 1, tensors.fingerprint(tensors.weights(model)), 1, 0.0, lambda: False)
        assert not isinstance(taken, Refusal)
        assert batch.offer(name, "one", 1, taken[0]).verdict is Verdict.SEND
        with nullcontext() if name == "fits" else pytest.raises(RuntimeError, match="size"):
            batch.commit(name, "one", "one", taken[0], Counted(), {"first.bias": torch.zeros(size)}, 0.1)
    for end in (batch.take_own, lambda: (batch.end(), batch.collect())):
        with pytest.raises(RuntimeError, match="size"):
            end()


def test_beats_alone_keep_no_units() -> None:
    """A worker that hangs still beats, in another thread; it is named with its process, which is to be replaced."""
    with Core(key=KEY, lease_s=0.2, stuck_s=0.4) as core:
        line = dial(core.address, KEY, SECONDS)
        line.send(Hello("one", 17))
        assert isinstance(line.receive(SECONDS), Welcome)

        def beats() -> bool:
            line.send(Beat())
            return line.receive(0.02) is not None

        with pytest.raises(ConnectionError):
            until(beats, "it is given up")
        until(lambda: core.waiting() == set(), "nobody is there")
        found = core.hung("one")
        assert found is not None and found.pid == 17 and "longer than the 0 s" in found.reason
        assert core.hung("another") is None
        core.close_gate()
        core.admit("one")
        trainer = Trainer(core, iter(some_units(random.Random(0))))
        assert not core.join_wait("one", 1e6)  # who is lost is not waited for
        core.open_gate()
        trainer.end()


def test_who_has_another_key_or_another_base_model_is_not_let_in() -> None:
    policy = TinyPolicy(base=2.0)
    with Core(key=KEY) as core:
        with pytest.raises(ConnectionError):
            dial(core.address, b"another key", 5.0)
        core.admit("other")
        core.close_gate()
        trainer = Trainer(core, iter(some_units(random.Random(0))))
        with pytest.raises(SettingsError, match=r"policy\.model"):
            Satellite(core.address, KEY, "other", policy).run()
        core.open_gate()
        trainer.end()
        assert trainer.error is None
