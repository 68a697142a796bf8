"""What the report says of known runs, that hostile text stays text, and that large stores make small pages."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import msgspec
import pytest
from cell_events import SMALL
from hypothesis import given
from hypothesis import strategies as st
from report_facts import call, run, step, trained

from gyre_sdk.records import CallStatus, RunStatus
from gyre_sdk.view.escape import counted
from gyre_sdk.view.report import Facts, Spent, document, figures
from gyre_sdk.view.report.figures import quantile
from gyre_sdk.view.report.plot import Curve, curves, figure, histogram, stacked
from gyre_sdk.view.report.tables import moment, seconds
from gyre_sdk.view.timeline import timeline

VOID = {"meta"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>&\x1b[2J\u202e"
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


class Reader(HTMLParser):
    """Reads a page: its elements, its text, and whether every element is closed where it should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_head_adds_up():
    head = figures(trained()).head
    assert (head.began, head.ended) == (1000.0, 2003.0)
    assert head.statuses == {"completed": 6, "scorer_error": 2, "workspace_error": 1, "running": 1}
    assert (head.calls, head.sampled, head.versions) == (4, 15, (0, 2))
    assert head.mean == pytest.approx((0 + 1 + 1 + 0 + 0.5 + 1) / 6)
    assert (head.hosted, head.dollars, head.unpriced) == (0, 0.0, 0)


def test_what_ends_last_may_be_a_call():
    running = run("r", status=RunStatus.RUNNING)
    head = figures(Facts("s", [running], [call("r", ended_at=1234.5), call("r", ended_at=None)])).head
    assert (head.began, head.ended) == (1000.0, 1234.5)


def test_rewards_by_task():
    rows = {(row.task, row.split): row for row in figures(trained()).tasks}
    hard = rows["hard", "train"]
    assert (hard.runs, hard.going, hard.scored, hard.placeholders, hard.infrastructure, hard.unscored) == (
        6,
        1,
        2,
        1,
        2,
        0,
    )
    assert (hard.mean, hard.std, hard.best, hard.solved) == (0.25, 0.25, 0.5, 0)
    easy = rows["easy", "train"]
    assert (easy.mean, easy.std, easy.solved, easy.runs) == (1.0, 0.0, 2, 2)
    assert [row.task for row in figures(trained()).tasks[:2]] == ["hard", "easy"], "the lowest mean first"


@pytest.mark.parametrize(
    ("more", "column"),
    [
        ({"status": RunStatus.AGENT_ERROR, "error": "infrastructure: the engine is away"}, "infrastructure"),
        ({"status": RunStatus.AGENT_ERROR, "error": "KeyError"}, "unscored"),
        ({"status": RunStatus.WORKSPACE_ERROR}, "infrastructure"),
        ({"status": RunStatus.WORKSPACE_ERROR, "reward": 0.0, "placeholder": True}, "placeholders"),
        ({"status": RunStatus.COMPLETED, "reward": math.nan}, "unscored"),
    ],
)
def test_a_run_without_a_reward_counts_once(more, column):
    (row,) = figures(Facts("s", [run("r", **more)], [])).tasks
    found = {name: getattr(row, name) for name in ("scored", "placeholders", "infrastructure", "unscored")}
    assert found == dict.fromkeys(found, 0) | {column: 1}


def test_lengths_and_the_slowest():
    found = figures(trained())
    spreads = {spread.name: spread for spread in found.lengths}
    assert (spreads["seconds"].p50, spreads["seconds"].p90, spreads["seconds"].most) == (10.0, 30.0, 30.0)
    assert (spreads["calls"].most, spreads["sampled tokens"].most) == (2.0, 10.0)
    assert [(row.run, row.seconds, row.calls, row.sampled) for row in found.slowest[:2]] == [
        ("a1", 30.0, 2, 10),
        ("b2", 20.0, 0, 0),
    ]
    assert len(figures(Facts("s", [run(f"r{n}") for n in range(30)], [])).slowest) == 10


@given(st.lists(st.integers(0, 100), min_size=1), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_quantile_is_what_a_share_does_not_exceed(values, share):
    found = quantile(sorted(values), share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


def test_groups_without_contrast_and_what_was_not_trained():
    found = figures(trained())
    assert found.groups == 2
    (flat,) = found.without_contrast
    assert (flat.group, flat.reason, flat.scored, flat.reward) == ("g1", "flat", 2, 1.0)
    assert found.untrained == {"call_unselected": 4, "group_flat": 3}
    assert "1 of 2 groups without contrast" in document(found) and "1 solved by all runs" in document(found)
    alone = Facts("s", trained().runs, [], groups=trained().groups)
    assert figures(alone).untrained == {"run_unscored": 2, "group_flat": 1}


def test_steps_and_evaluations():
    found = figures(trained()).training
    assert found is not None
    first, second, third = found.steps
    assert (first.reward, first.std, first.low, first.high, first.solved) == (0.5, 0.5, 0.0, 1.0, 0.5)
    assert (first.waiting_s, first.training_s, first.publishing_s) == (6.0, 3.0, 0.25)
    assert second.skipped and math.isnan(second.reward) and math.isnan(third.publishing_s)
    assert (found.skipped, found.tokens) == (1, 200)
    assert [(one.name, one.step, one.tasks, one.reward) for one in found.evaluations] == [
        ("before", 0, 1, 0.0),
        ("after", 3, 1, 1.0),
    ]


def test_a_training_that_was_taken_up_again_and_its_worst_mismatch():
    distance = "sampling/sampling_logp_difference/"
    metrics = {f"{distance}mean": 0.25, f"{distance}p99": 2.0, f"{distance}max": 7.5}
    steps = (step(1, (1.0,), metrics={f"{distance}mean": 0.125}), step(2, (1.0,), metrics=metrics), step(3, (1.0,)))
    page = Reader(document(figures(Facts("s", [run("r")], [], steps=steps, resumed=2, read_at=0.0)))).text
    assert "3 steps, 300 tokens trained; taken up again 2 times." in page
    assert "largest at step 2, 0.250 nats (99% of the tokens below 2.00, one at 7.50)" in page
    assert "read 1970-01-01 00:00:00 UTC" in page
    assert "Trainer against engine: the" not in document(figures(trained()))


def test_an_evaluation_takes_of_each_task_the_run_with_a_score():
    runs = [
        run("1", "x", None, status=RunStatus.SCORER_ERROR, metadata={"split": "e"}),
        run("2", "x", 1.0, metadata={"split": "e"}),
        run("3", "y", None, status=RunStatus.SCORER_ERROR, metadata={"split": "e"}),
        run("4", "z", 1.0, status=RunStatus.CANCELLED, metadata={"split": "e"}),
    ]
    (found,) = figures(Facts("s", runs, [], steps=(step(1, (1.0,)),))).evaluations
    assert (found.tasks, found.scored, found.reward, found.solved, found.step) == (2, 1, 0.5, 0.5, None)


def test_problems_are_grouped_by_their_first_line():
    found = figures(trained()).problems
    assert [(row.state, row.error, row.count, row.tasks) for row in found.runs] == [
        ("scorer_error", "no number 17", 2, 1),
        ("workspace_error", "no image", 1, 1),
    ]
    assert [(row.state, row.error, row.runs) for row in found.calls] == [("aborted", "the agent hung up", ("b1",))]
    assert (found.forks, found.calls_in_all) == ({"compaction": 1}, 4)


def test_the_page_has_a_section_for_what_there_is():
    facts = trained()
    page = Reader(document(figures(facts), timeline(SMALL)))
    ids = [attributes["id"] for tag, attributes in page.elements if tag == "h2"]
    assert ids == ["training", "tasks", "lengths", "groups", "cells", "problems"]
    linked = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert linked == [f"#{name}" for name in ids]
    assert "3 steps, 200 tokens trained; 1 step skipped" in page.text
    alone = Reader(document(figures(Facts("s", facts.runs[1:3], facts.calls[:1]))))
    ids = [attributes["id"] for tag, attributes in alone.elements if tag == "h2"]
    assert ids == ["tasks", "lengths", "problems"]
    assert "None: all runs that ended completed" in alone.text


def test_of_runs_that_go_on_nothing_is_claimed():
    going = run("r", status=RunStatus.RUNNING)
    said = "no history branched."
    assert f"None: no run has ended, all calls that ended were answered, {said}" in document(
        figures(Facts("s", [going], [], {})), None
    )
    page = document(figures(Facts("s", [going, run("q", reward=1.0)], [], {})), None)
    assert "None: all runs that ended completed" in page and "1 run still going" in page


def test_an_empty_store_says_so():
    page = Reader(document(figures(Facts("nothing", [], []))))
    assert "nothing" in page.text and "no runs yet" in page.text and not [1 for tag, _ in page.elements if tag == "h2"]


def test_the_page_needs_nothing_and_hostile_text_stays_text():
    runs = [
        run(
            f"r{HOSTILE}", f"task {HOSTILE}", 0.0, status=RunStatus.AGENT_ERROR, error=f"error {HOSTILE}", group=HOSTILE
        ),
        run("e", f"other {HOSTILE}", 1.0, metadata={"split": f"split {HOSTILE}"}),
    ]
    calls = [call(runs[0].run, status=CallStatus.FAILED, error=HOSTILE, fork=HOSTILE)]
    facts = Facts(
        f"store {HOSTILE}",
        runs,
        calls,
        groups={HOSTILE: [runs[0].run]},
        steps=(step(1, (1.0,), metrics={f"untrained/{HOSTILE}": 2.0}),),
        versions={0: 0},
        tampered={runs[0].run: [HOSTILE]},
    )
    cells = [msgspec.structs.replace(event, cell=HOSTILE) if hasattr(event, "cell") else event for event in SMALL]
    cells = [msgspec.structs.replace(event, state=HOSTILE) if hasattr(event, "state") else event for event in cells]
    whole = document(figures(facts), timeline(cells))
    page = Reader(whole)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "form", "input"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "action")]
        assert (attributes.get("href") or "#").startswith("#")
    assert page.text.count("<script>alert(1)</script>") >= 9, "it is shown, as text"
    assert (
        whole.replace("\n", "").isprintable() and "url(" not in whole and "@import" not in whole and "http" not in whole
    )


def test_a_large_store_makes_a_small_page():
    runs = [
        run(
            f"r{n}",
            f"task {n % 3000}",
            n % 7 / 7,
            group=f"g{n // 4}",
            error=f"kind {chr(97 + n % 26)} {'x' * (n % 90)}",
        )
        for n in range(10_000)
    ]
    groups: dict[str, list[str]] = {}
    for one in runs:
        groups.setdefault(str(one.group), []).append(one.run)
    steps = [
        step(n, (n % 5 / 5, 1.0), metrics={"ratio": 1 + n % 9, "ratio/min": 0.5, "ratio/max": 9.0})
        for n in range(1, 3000)
    ]
    facts = Facts(
        "s", runs, [call(one.run) for one in runs for _ in range(5)], groups=groups, steps=steps, versions={0: 0}
    )
    found = figures(facts)
    whole = document(found)
    Reader(whole)
    assert len(whole) < 1_000_000
    assert "2,960 of 3,000 tasks are not shown" in whole and "2,979 of 2,999 steps are not shown" in whole
    assert len(found.tasks) == 3000, "the figures have all of them"


def test_cells_with_very_many_stretches_are_cut():
    events = []
    for number in range(40):
        cell = [event for event in SMALL if getattr(event, "cell", "core") == "core"]
        for turn in range(100):
            events += [
                msgspec.structs.replace(event, at=event.at + 40 * turn, cell=f"cell-{number}")
                if hasattr(event, "cell")
                else msgspec.structs.replace(event, at=event.at + 40 * turn)
                for event in (cell if number == 0 else cell[2:5])
                if "Recording" not in type(event).__name__
            ]
    events.sort(key=lambda event: event.at)
    whole = document(figures(trained()), timeline(events))
    assert "not drawn; see" in whole and len(whole) < 3_000_000


@given(st.lists(st.tuples(st.integers(0, 10_000), NUMBERS, NUMBERS, NUMBERS), max_size=50))
def test_a_chart_of_any_numbers_is_sound(values):
    points = [(float(x), y) for x, y, _, _ in values]
    band = [(float(x), min(low, high), max(low, high)) for x, _, low, high in values if low == low and high == high]
    drawn = curves("t", [Curve("a", points, 1, band), Curve("b", points[:4], 2, dots=True)])
    assert bool(drawn) == any(abs(y) < 1e100 for _, y in points)
    for made in (
        drawn,
        histogram("t", [abs(y) for _, y in points]),
        stacked("t", ("a", "b"), [(x, (abs(y), 1.0)) for x, y in sorted(points)], unit="s"),
    ):
        Reader(made)
        assert "nan" not in made and "inf" not in made


def test_a_curve_is_where_its_numbers_are():
    drawn = curves("t", [Curve("a", [(1.0, 0.0), (2.0, 5.0), (3.0, 10.0)])])
    assert 'points="52.0,180.0 301.0,95.0 550.0,10.0"' in drawn
    assert re.findall(r'text-anchor="end">([^<]*)<', drawn) == ["0", "2", "4", "6", "8", "10", "step"]
    assert re.findall(r'text-anchor="middle">([^<]*)<', drawn) == ["1", "2", "3"]
    assert "step 2: a 5" in drawn


def test_a_histogram_counts_every_value_once():
    made = histogram("t", [-1.0, -1.0, 0.0, 0.5, 0.5, 0.5, 1.0], centred=True)
    assert re.findall(r"<title>([^<]*)</title>", made) == [
        "-1.05 to -0.95: 2",
        "-0.05 to 0.05: 1",
        "0.45 to 0.55: 3",
        "0.95 to 1.05: 1",
    ]
    assert re.findall(r"<title>([^<]*)</title>", histogram("t", [0, 1, 1, 4])) == ["0: 1", "1: 2", "4: 1"]
    assert re.findall(r"<title>([^<]*)</title>", histogram("t", [0.0, 11.9])) == ["0 to 0.5: 1", "11.5 to 12: 1"]


def test_axes_of_counts_have_whole_numbers():
    """Also where one run made one call, or all made none."""
    for values in ([0.0] * 9, [1.0], [1.0, 2.0, 2.0]):
        ticks = re.findall(r"<text[^>]*>([^<]*)</text>", histogram("Calls", values))
        assert len(ticks) >= 2 and all(tick == str(int(tick)) for tick in ticks)


def test_rewards_are_drawn_without_those_of_evaluations():
    assert figures(trained()).rewards == (0.0, 0.5, 1.0, 1.0)
    assert "<b>Rewards</b>" in document(figures(trained()))
    assert "<b>Rewards</b>" not in document(figures(Facts("s", [run("r")], [])))


def test_a_long_curve_keeps_what_stands_out():
    values = [(float(n), 0.1) for n in range(20_000)]
    values[12_345] = (12_345.0, 7.0)
    drawn = curves("t", [Curve("a", values)])
    assert len(drawn) < 20_000 and ",31.2 " in drawn, "7 of 8, on a height of 170"
    assert re.findall(r'text-anchor="end">([^<]*)<', drawn)[-2:] == ["8", "step"]


def test_numbers_in_words():
    assert [figure(value) for value in (0.0, 0.25, 12.34, 123.4, 1234.0, 1.2e-5, math.nan)] == [
        "0",
        "0.25",
        "12.3",
        "123.4",
        "1,234",
        "1.2e-05",
        "–",
    ]
    assert [seconds(value) for value in (0.0, 4e-5, 0.25, 12.34, 125.0, 3723.0)] == [
        "0 s",
        "0.000 s",
        "0.250 s",
        "12.3 s",
        "2:05",
        "1:02:03",
    ]
    assert [counted(1, "run"), counted(1200, "run"), counted(2, "reply", "replies")] == [
        "1 run",
        "1,200 runs",
        "2 replies",
    ]
    assert moment(0.0) == "1970-01-01 00:00:00 UTC" and moment(None) == "–" and moment(1e30) == "1e+30"


def test_what_hosted_models_cost():
    spent = (Spent("r", 20, 0.25), Spent("r", 30, 0.5), Spent("r", 1, None))
    found = figures(Facts("s", [run("r", reward=1.0)], [call("r", 0, -1)] * 3, spent=spent))
    assert (found.head.hosted, found.head.dollars, found.head.unpriced, found.head.sampled) == (3, 0.75, 1, 51)
    assert "$0.75" in document(found) and "of 1 nobody knows the cost" in document(found)
    little = figures(Facts("s", [run("r")], [call("r", 0, -1)], spent=(Spent("r", 1, 1.26e-5),)))
    assert "$0.000013" in document(little)
    unknown = figures(Facts("s", [run("r")], [call("r", 0, -1)], spent=spent[2:]))
    assert "$" not in document(unknown) and "unknown" in document(unknown)


def test_labels_of_dots_beside_each_other_do_not_overlap() -> None:
    """Three evaluations of about one reward at the same step; each label stays on the picture."""
    dots = Curve(
        "evaluations", [(40.0, 0.985), (40.0, 0.98), (40.0, 0.9)], 2, dots=True, labels=["first", "second", "third"]
    )
    page = curves("Reward", [dots, Curve("mean", [(0.0, 0.0), (40.0, 1.0)], 1)])
    heights = {
        name: float(height)
        for height, name in re.findall(r'<text class="label" x="[\d.]+" y="([\d.]+)"[^>]*>(\w+)', page)
    }
    assert sorted(heights, key=lambda name: heights[name]) == ["first", "second", "third"]
    first, second, third = (heights[name] for name in ("first", "second", "third"))
    assert 15 <= first <= second - 12 and second <= third - 12
