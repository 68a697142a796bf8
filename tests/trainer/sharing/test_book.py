"""The book of a shared batch: cases, and any schedule of joins, deaths, zombies, repeated offers and clock jumps."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre_sdk.errors import TrainerError
from gyre_sdk.trainer.sharing.book import Book, Lease, Refusal, Verdict

SHARED = Path(__file__).parents[4] / "shared" / "cases" / "elastic"
OWN = Path(__file__).parent / "cases"


class Desk:
    """A book, and the sums that whoever commits adds to."""

    def __init__(self, units: list[dict[str, Any]], lease_s: float = 10.0, transfer_s: float | None = None) -> None:
        self.units = units
        self.book = Book(lease_s=lease_s, transfer_s=transfer_s)
        self.book.open(1, 7, "theta-7")
        for unit in units:
            self.book.add(unit["id"], unit["tokens"])
        self.book.close()
        self.held: dict[tuple[str, int], Lease] = {}
        self.offered: dict[str, list[int]] = {}
        self.gradient = self.tokens = 0

    def lease(self, who: str, t: float, count: int = 1, *, digest: str = "theta-7", lasts: float | None = None) -> Any:
        """Return the places that were leased, or the refusal."""
        found = self.book.lease(who, 1, digest, t, count, lasts=lasts)
        self.held |= {(who, lease.place): lease for lease in found.leases}
        return found.refusal or [lease.place for lease in found.leases]

    def offer(self, who: str, t: float, name: str, places: list[int]) -> str:
        leases = [self.held[who, place] for place in places]
        ruling = self.book.offer(name, who, 1, leases, t)
        self.offered[name] = places
        return ruling.refusal or ruling.verdict

    def commit(self, t: float, name: str) -> str:
        ruling = self.book.commit(name, t)
        if ruling.verdict is Verdict.COMMITTED:
            for place in self.offered[name]:
                self.gradient += self.units[place]["gradient_sum"]
                self.tokens += self.units[place]["tokens"]
        return ruling.refusal or ruling.verdict

    def whole(self, who: str, t: float, name: str, places: list[int]) -> str:
        """Offer, transfer, commit."""
        said = self.offer(who, t, name, places)
        return self.commit(t, name) if said == Verdict.SEND else said


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed at once", "by the end of its lease"])
def test_a_late_joiner_a_death_and_a_zombie(noticed: bool) -> None:
    """elastic-late-joiner-death-and-zombie: with B's death noticed at once, and when its lease ends."""
    path = SHARED / "elastic-late-joiner-death-and-zombie.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    case = json.loads(path.read_text())
    expected = case["expected"]
    names = list(case["input"]["units"])
    desk = Desk([{"id": name, **case["input"]["units"][name]} for name in names])
    assert desk.lease("core", 0, lasts=1e9) == [0]
    assert desk.lease("A", 1) == [1] and desk.lease("A", 1) == [2]
    assert desk.whole("core", 2, "core-1", [0]) == "committed"
    assert desk.whole("A", 3, "A-1", [1, 2]) == "committed"
    assert desk.lease("B", 4) == [3]
    assert f"refused: {desk.lease('C', 5, digest='theta-6')}" == expected["C at t=5"]
    assert desk.offer("B", 5.5, "B-1", [3]) == "send"
    if noticed:  # t = 6
        assert desk.book.abandon("B-1") == 1 and desk.book.release("B") == 0
        assert desk.lease("core", 6, lasts=1e9) == [3]
    assert desk.lease("Z", 7, lasts=5) == [4] and desk.lease("Z", 7, lasts=5) == [5]
    assert desk.lease("A", 11) == []
    assert desk.book.counts(13).ready_units == 2
    assert desk.lease("A", 14) == [4] and desk.lease("A", 14) == [5]
    assert f"refused: {desk.offer('Z', 15, 'Z-1', [4, 5])}" == expected["Z at t=15 and t=17"]
    assert desk.whole("A", 16, "A-2", [4, 5]) == "committed"
    assert f"refused: {desk.offer('Z', 17, 'Z-1', [4, 5])}" == expected["Z at t=15 and t=17"]
    if not noticed:
        assert desk.lease("core", 18, lasts=1e9) == [3]
    assert desk.whole("core", 18, "core-2", [3]) == "committed"
    assert desk.offer("A", 19, "A-2", [4, 5]) == "committed"
    assert desk.book.finished
    assert desk.book.owners() == list(expected["owners"].values())
    assert (desk.gradient, desk.tokens) == (expected["gradient_sum"], expected["tokens"])
    assert Fraction(desk.gradient, desk.tokens) == Fraction(expected["final_gradient_token_mean"]["exact"])


@pytest.mark.parametrize("path", sorted(OWN.glob("*.json")), ids=lambda path: path.stem)
def test_a_case_of_our_own(path: Path) -> None:
    case = json.loads(path.read_text())
    given, expected = case["input"], case["expected"]
    desk = Desk(given["units"], given["lease_seconds"], given["transfer_seconds"])
    for event in given["events"]:
        who, t, name, places = event["who"], event["t"], event.get("as", ""), event.get("places", [])
        match event["does"]:
            case "lease":
                assert desk.lease(who, t, event["count"]) == event["gets"], event
            case "offer":
                assert desk.offer(who, t, name, places) == event["ruling"], event
            case "commit":
                assert desk.commit(t, name) == event["ruling"], event
            case "abandon":
                assert desk.book.abandon(name) == event["frees"], event
            case "release":
                assert desk.book.release(who) == event["frees"], event
            case "give_back":
                assert desk.book.give_back(who, [desk.held[who, place] for place in places]) == len(places), event
    assert desk.book.finished
    assert desk.book.owners() == expected["owners"]
    assert (desk.gradient, desk.tokens) == (expected["gradient_sum"], expected["tokens"])


@pytest.mark.parametrize("taken", [True, False], ids=["another has computed its unit", "nobody has"])
def test_a_transfer_that_took_too_long_is_not_committed(taken: bool) -> None:
    desk = Desk([{"id": "u", "tokens": 3, "gradient_sum": 5}], transfer_s=15.0)
    assert desk.lease("A", 0) == [0] and desk.offer("A", 9, "a", [0]) == "send"
    assert desk.lease("B", 23.9) == []
    if taken:
        assert desk.lease("B", 24) == [0] and desk.whole("B", 24, "b", [0]) == "committed"
    assert desk.commit(24, "a") == "expired lease"
    assert desk.gradient == (5 if taken else 0)


def test_chunks_shrink_towards_the_end() -> None:
    """Nobody leases more than half of an equal share of what is free, and at least one."""
    desk = Desk([{"id": f"u{number}", "tokens": 1} for number in range(100)])
    sizes = []
    while desk.book.counts(0).ready_units:
        for who in ("A", "B"):
            sizes.append(len(desk.lease(who, 0, 1000)))
    assert sizes[:3] == [50, 12, 9]  # the first one did not know of the second
    assert sizes == sorted(sizes, reverse=True) and set(sizes[-4:-1]) == {1}


def test_a_holder_that_computes_several_at_a_time_gets_as_many() -> None:
    """Near the end too, where a share would leave its ranks without work; never more than it asked for, or than there are."""
    book = Book(lease_s=10)
    book.open(1, 7, "theta")
    for number in range(9):
        book.add(f"u{number}", 1)
    sizes = [
        len(book.lease(who, 1, "theta", 0, 4, least=least).leases) for who, least in (("A", 1), ("B", 3), ("B", 9))
    ]
    assert sizes == [4, 3, 2]


def test_tokens_of_a_book_that_begins_later_are_higher() -> None:
    """So that no lease of a core that has died holds at the one that replaces it."""
    before, after = Book(lease_s=1), Book(lease_s=1, after=10**6)
    for book in (before, after):
        book.open(1, 0, "theta")
        book.add("u", 1)
    (old,) = before.lease("A", 1, "theta", 0).leases
    (new,) = after.lease("A", 1, "theta", 0).leases
    assert new.token > old.token + 1000
    assert after.offer("c", "A", 1, [old], 0).refusal is Refusal.EXPIRED
    assert after.offer("c", "A", 1, [new], 0).verdict is Verdict.SEND


def test_a_batch_that_is_closed_takes_no_unit() -> None:
    book = Book(lease_s=1)
    with pytest.raises(TrainerError, match="open"):
        book.add("u", 1)
    book.open(4, None, "theta")
    assert not book.finished
    book.close()
    assert book.finished
    with pytest.raises(TrainerError, match="step 4"):
        book.add("u", 1)
    book.end()
    assert book.lease("A", 4, "theta", 0).refusal is Refusal.OTHER_BATCH
    assert book.commit("c", 0).refusal is Refusal.OTHER_BATCH


HOLDERS = st.sampled_from(["A", "B", "C"])
SECONDS = st.sampled_from([0.5, 4.0, 9.0, 11.0, 16.0])
"""A lease lasts 10 s, a transfer 15 s."""


class Schedules(RuleBasedStateMachine):
    """Any order of what holders, the network and the clock can do. What a holder says may be old, repeated or mixed up."""

    @initialize(units=st.lists(st.integers(1, 9), min_size=1, max_size=8))
    def begin(self, units: list[int]) -> None:
        self.now = 0.0
        self.step = 1
        self.book = Book(lease_s=10.0, transfer_s=15.0)
        self.known: list[tuple[str, Lease, int]] = []  # every lease ever given, with its holder and batch
        self.tokens: set[int] = set()
        self.open(units)

    def open(self, units: list[int]) -> None:
        self.units = units
        self.closed = False
        self.sealed = 0
        self.added: list[int] = []  # places, each time that a commit adds it
        self.offers: dict[str, list[int]] = {}
        self.counter = 0
        self.book.open(self.step, 0, f"theta-{self.step}")

    @rule()
    def seal(self) -> None:
        if self.sealed < len(self.units):
            assert self.book.add("same", self.units[self.sealed]) == self.sealed
            self.sealed += 1
        elif not self.closed:
            self.book.close()
            self.closed = True

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=HOLDERS, count=st.integers(1, 4))
    def lease(self, who: str, count: int) -> None:
        found = self.book.lease(who, self.step, f"theta-{self.step}", self.now, count)
        assert found.refusal is None and len(found.leases) <= count
        for lease in found.leases:
            assert lease.token not in self.tokens and lease.token > max(self.tokens, default=0)
            assert lease.place not in self.added
            self.tokens.add(lease.token)
            self.known.append((who, lease, self.step))

    @rule(who=HOLDERS)
    def lease_with_other_weights(self, who: str) -> None:
        assert self.book.lease(who, self.step, "theta-old", self.now).refusal is Refusal.WRONG_WEIGHTS
        digest = f"theta-{self.step}"
        assert self.book.lease(who, self.step - 1, digest, self.now).refusal is Refusal.OTHER_BATCH

    @rule(who=HOLDERS, count=st.integers(1, 4))
    def compute(self, who: str, count: int) -> None:
        """All that goes well: lease, offer, transfer, commit."""
        before = len(self.known)
        self.lease(who, count)
        leases = [lease for _, lease, _ in self.known[before:]]
        if leases:
            self.counter += 1
            name = f"{self.step}-{self.counter}"
            assert self.book.offer(name, who, self.step, leases, self.now).verdict is Verdict.SEND
            assert self.book.commit(name, self.now).verdict is Verdict.COMMITTED
            self.added += [lease.place for lease in leases]

    @rule(who=HOLDERS)
    def beat(self, who: str) -> None:
        self.book.renew(who, self.now)

    @rule(who=HOLDERS)
    def die(self, who: str) -> None:
        self.book.release(who)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        who, lease, _ = data.draw(st.sampled_from(self.known))
        self.book.give_back(who, [lease])

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        """Leases of one holder, of now or long ago, each once or twice."""
        who = data.draw(st.sampled_from(sorted({one for one, _, _ in self.known})))
        own = [(lease, step) for one, lease, step in self.known if one == who]
        chosen = data.draw(st.lists(st.sampled_from(own[-4:]), min_size=1, max_size=3))
        step = chosen[0][1]
        self.counter += 1
        name = f"{self.step}-{self.counter}"
        ruling = self.book.offer(name, who, step, [lease for lease, _ in chosen], self.now)
        if ruling.verdict is Verdict.SEND:
            places = [lease.place for lease, _ in chosen]
            assert step == self.step and len(set(places)) == len(places) and not set(places) & set(self.added)
            self.offers[name] = places

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """Whether its transfer went well before or after others did anything, once or again."""
        name = data.draw(st.sampled_from(sorted(self.offers)))
        if self.book.commit(name, self.now).verdict is Verdict.COMMITTED:
            self.added += self.offers[name]
            repeated = self.book.offer(name, "A", self.step, [], self.now)
            assert repeated.verdict is Verdict.COMMITTED
            assert self.book.commit(name, self.now).refusal is Refusal.AGAIN

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        self.book.abandon(data.draw(st.sampled_from(sorted(self.offers))))

    @precondition(lambda self: self.book.finished)
    @rule(units=st.lists(st.integers(1, 9), min_size=1, max_size=8))
    def next_batch(self, units: list[int]) -> None:
        self.check_whole()
        self.step += 1
        self.open(units)

    def teardown(self) -> None:
        """Who is left can always end the batch: nothing is stuck for longer than leases and transfers last."""
        if not hasattr(self, "book"):
            return
        while self.sealed < len(self.units) or not self.closed:
            self.seal()
        self.now += 15.0
        for number in range(len(self.units) + 1):
            leases = self.book.lease("last", self.step, f"theta-{self.step}", self.now).leases
            for lease in leases:
                assert self.book.offer(f"last-{number}", "last", self.step, [lease], self.now).verdict is Verdict.SEND
                assert self.book.commit(f"last-{number}", self.now).verdict is Verdict.COMMITTED
                self.added.append(lease.place)
        assert self.book.finished
        self.check_whole()

    def check_whole(self) -> None:
        assert sorted(self.added) == list(range(len(self.units)))
        assert None not in self.book.owners()

    @invariant()
    def every_unit_is_in_one_place(self) -> None:
        counts = self.book.counts(self.now)
        assert counts.ready_units + counts.leased_units + counts.done_units == self.sealed
        assert counts.ready_tokens + counts.leased_tokens + counts.done_tokens == sum(self.units[: self.sealed])
        assert counts.done_units == len(self.added) == len(set(self.added))
        assert counts.done_tokens == sum(self.units[place] for place in self.added)
        assert self.book.finished == (self.closed and len(self.added) == len(self.units))


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
