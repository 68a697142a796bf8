"""Decides the lane of a request by rules: the first one that fits wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gyre_sdk.harness.proxy.lanes import SIDE, Asked, Assigned, CallView, Classifier, LaneView
from gyre_sdk.harness.proxy.lanes.evidence import (
    Start,
    answered_last,
    by_thread,
    conversations,
    is_summary,
    last_assistant,
    quoted_lane,
    repeats,
    resumed_lane,
    same_agent,
    start_of,
)
from gyre_sdk.harness.proxy.lanes.facts import Preset, header, system_messages
from gyre_sdk.records import SUBAGENT, SUMMARY_SUFFIX, CallId, LaneId

_ONE_SHOT = 64
"""Requests for no more tokens than this are side calls, where they have no tools and continue nothing."""


class RuleClassifier(Classifier):
    """Decides by what is recorded, with the preset of the program that a request comes from."""

    def __init__(self, presets: Sequence[Preset], otherwise: Preset) -> None:
        self._presets = tuple(presets)
        self._otherwise = otherwise

    def preset(self, asked: Asked) -> Preset:
        """Return the preset whose signs a request shows."""
        for preset in self._presets:
            if any(sign.shown(asked) for sign in preset.program):
                return preset
        return self._otherwise

    def assign(self, asked: Asked, lanes: Sequence[LaneView], calls: Sequence[CallView]) -> Assigned:
        """See `Classifier.assign`."""
        case = _Case(self.preset(asked), asked, lanes, calls)
        found = (rule(case) for rule in _RULES)
        return next(assigned for assigned in found if assigned is not None)


@dataclass(frozen=True, slots=True)
class _Case:
    """A request, all that it is judged by, and what several rules need."""

    preset: Preset
    asked: Asked
    lanes: Sequence[LaneView]
    calls: Sequence[CallView]

    @property
    def thread(self) -> str:
        """The program's name of the conversation; empty where it gives none."""
        known = self.preset.thread
        parts = [self.asked.headers.get(name, "") for name in known.names] if known else []
        return "/".join(parts) if any(parts) else ""

    @property
    def parent_thread(self) -> str:
        """The program's name of the conversation that started this one; empty unless this is a sub-agent's."""
        known = self.preset.thread
        if known is None or not self.child:
            return ""
        if known.parent:
            return self.asked.headers.get(known.parent, "")
        return "/".join("" if name == known.child else self.asked.headers.get(name, "") for name in known.names)

    @property
    def child(self) -> str:
        """What the program calls the sub-agent that asks; empty where it is none."""
        known = self.preset.thread
        return header(self.asked.headers, known.child) if known and known.child else ""

    def lane(self, name: LaneId | None) -> LaneView | None:
        """Return a lane by its id."""
        return next((lane for lane in self.lanes if lane.lane == name), None)

    def same(self, lane: LaneView, reason: str) -> Assigned:
        """Assign the request to a lane that exists."""
        thread = "" if lane.role == SIDE or is_summary(lane) else self.thread
        return Assigned(lane.lane, lane.role, lane.name, lane.parent, None, reason, thread)

    def beside(self, role: str, name: str, parent: LaneView, call: CallId | None, reason: str) -> Assigned:
        """Assign the request to the lane of its kind beside another, opened when it is the first of its kind."""
        for lane in self.lanes:
            if (lane.role, lane.name, lane.parent) == (role, name, parent.lane):
                return self.same(lane, reason)
        return Assigned(None, role, name, parent.lane, call, reason)

    def subagent(self, name: str, parent: LaneView, start: Start | CallId | None, reason: str) -> Assigned:
        """Open a lane for a sub-agent."""
        call = start.call.call if isinstance(start, Start) else start
        tool_call = start.tool_call.id if isinstance(start, Start) else ""
        return Assigned(None, SUBAGENT, name, parent.lane, call, reason, self.thread, tool_call)


def _side(case: _Case) -> Assigned | None:
    """A side call of the program."""
    for kind in case.preset.sides:
        if all(sign.shown(case.asked) for sign in kind.signs):
            return case.beside(SIDE, kind.name, case.lanes[0], None, f"side call: {kind.name}")
    return None


def _summary(case: _Case) -> Assigned | None:
    """Asks to sum up a conversation: that of its thread, that which it repeats, or that which it quotes."""
    if not any(sign.shown(case.asked) for sign in case.preset.summaries):
        return None
    if case.preset.guess and case.asked.continues is not None:
        return None
    used = conversations(case.lanes)
    lane = by_thread(case.lanes, case.thread) or case.lane(case.asked.continues_lane)
    lane = (
        lane or next((item for item in used if repeats(case.asked, item)), None) or quoted_lane(case.asked, case.lanes)
    )
    if lane is None and not case.preset.guess and used:
        lane = used[0]
    if lane is None or lane.role == SIDE:
        return None
    if is_summary(lane):
        return case.same(lane, "summary, asked again")
    return case.beside(lane.role + SUMMARY_SUFFIX, f"{lane.name}-summary", lane, lane.last_call, "summary")


def _thread(case: _Case) -> Assigned | None:
    """Belongs to a conversation that the program has named before, unless it is a side call of no known kind."""
    lane = by_thread(case.lanes, case.thread)
    if lane is None or (
        case.asked.continues is None and not case.asked.tools and lane.tools and not repeats(case.asked, lane)
    ):
        return None
    return case.same(lane, "thread")


def _child(case: _Case) -> Assigned | None:
    """Comes from a sub-agent, as the program says."""
    if not case.child:
        return None
    start = start_of(case.asked, case.preset, case.lanes, case.calls)
    if start is not None:
        parent = case.lane(start.call.lane) or case.lanes[0]
        return case.subagent(start.name, parent, start, "the program says sub-agent; its tool call is known")
    parent = by_thread(case.lanes, case.parent_thread) or case.lanes[0]
    return case.subagent(SUBAGENT, parent, None, "the program says sub-agent")


def _handed_over(case: _Case) -> Assigned | None:
    """Another agent takes the conversation over after a tool call that hands it over."""
    last, pattern = last_assistant(case.asked), case.preset.handoff
    found = next(
        (got for call in (last.tool_calls if last else ()) if pattern and (got := pattern.search(call.name))), None
    )
    if found is None:
        return None
    before = answered_last(case.asked, case.lanes, case.calls)
    if before is None or case.asked.continues_lane not in (None, before[0].lane):
        return None
    lane, call = before
    for other in case.lanes:
        if (other.role, other.name) == (SUBAGENT, found[1]) and other.lane != lane.lane:
            return case.same(other, "hand-off, again")
    return case.subagent(found[1], lane, call.call if call else lane.last_call, "hand-off")


def _continued(case: _Case) -> Assigned | None:
    """Repeats a recorded answer."""
    lane = case.lane(case.asked.continues_lane)
    return case.same(lane, "continues") if lane is not None else None


def _resumed(case: _Case) -> Assigned | None:
    """Begins with the summary of a conversation: that goes on."""
    lane = resumed_lane(case.asked, case.preset, case.lanes, case.calls)
    return case.same(lane, "begins with the lane's summary") if lane is not None else None


def _started(case: _Case) -> Assigned | None:
    """Begins with the prompt of a tool call."""
    start = start_of(case.asked, case.preset, case.lanes, case.calls)
    if start is None:
        return None
    return case.subagent(
        start.name, case.lane(start.call.lane) or case.lanes[0], start, "begins with a tool call's prompt"
    )


def _first(case: _Case) -> Assigned | None:
    """Nothing was asked in the key's own lane yet."""
    return None if case.lanes[0].opening else case.same(case.lanes[0], "first")


def _edited(case: _Case) -> Assigned | None:
    """Repeats how a lane began, under the same system prompt or with the same tools: its history was edited."""
    for lane in conversations(case.lanes):
        if same_agent(case.asked, lane) and repeats(case.asked, lane):
            return case.same(lane, "repeats the lane's opening")
    return None


def _taken_over(case: _Case) -> Assigned | None:
    """Repeats a recorded answer last, but not what was before it: a cut history, or another agent's turn."""
    before = answered_last(case.asked, case.lanes, case.calls)
    if before is None:
        return None
    lane, call = before
    if same_agent(case.asked, lane):
        return case.same(lane, "repeats the lane's last answer")
    return case.subagent(SUBAGENT, lane, call.call if call else lane.last_call, "another agent takes over")


def _one_shot(case: _Case) -> Assigned | None:
    """Has no tools beside lanes that have some, or wants next to nothing: a side call of no known kind."""
    asked, used = case.asked, conversations(case.lanes)
    spoken = len(asked.messages) - len(system_messages(asked))
    if asked.tools or not used or spoken > 2 or last_assistant(asked) is not None:
        return None
    if not any(lane.tools for lane in used) and not 0 < _limit(asked) <= _ONE_SHOT:
        return None
    return case.beside(SIDE, SIDE, case.lanes[0], None, "one shot without tools")


def _another_session(case: _Case) -> Assigned | None:
    """Has a thread of its own, which nothing started: the program was started once more."""
    if not case.thread:
        return None
    main = case.lanes[0]
    return Assigned(None, main.role, main.name, main.parent, None, "another session", case.thread)


def _unknown(case: _Case) -> Assigned:
    """Nothing is known but that it is another conversation."""
    return case.subagent(SUBAGENT, case.lanes[0], None, "continues nothing")


_RULES: tuple[Callable[[_Case], Assigned | None], ...] = (
    _side,
    _summary,
    _thread,
    _child,
    _handed_over,
    _continued,
    _resumed,
    _started,
    _first,
    _edited,
    _taken_over,
    _one_shot,
    _another_session,
    _unknown,
)
"""In order; the last one always fits."""


def _limit(asked: Asked) -> int:
    """Return how many tokens a request allows, 0 where it does not say."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = asked.fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


__all__ = ["RuleClassifier"]
