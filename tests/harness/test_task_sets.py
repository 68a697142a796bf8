"""Task sets: where tasks come from, how they are chosen, and splits that no order changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_sdk.errors import TaskError
from gyre_sdk.harness.task import Artifact, Healthcheck, Task, TaskSet

DATA = Path(__file__).parents[3] / "shared" / "data" / "harbor-tasks"


def some(*names: str, **fields) -> TaskSet:
    return TaskSet(Task(instruction=f"do {name}", name=name, **fields) for name in names)


def folder_task(place: Path, name: str) -> None:
    (place / "tests").mkdir(parents=True)
    (place / "task.toml").write_text(f'[task]\nname = "{name}"\n[environment]\ndocker_image = "gyre/base"\n')
    (place / "instruction.md").write_text("Do it.")
    (place / "tests" / "test.sh").write_text("true")


def test_a_folder_of_folders_at_any_depth_one_folder_and_a_glob(tmp_path):
    for place in ("a", "sub/b", "sub/deep/c"):
        folder_task(tmp_path / place, place.replace("/", "-"))
    folder_task(tmp_path / ".hidden", "hidden")
    folder_task(tmp_path / "a" / "environment", "not-a-task-of-its-own")
    assert TaskSet.load(tmp_path).names == ("a", "sub-b", "sub-deep-c")
    assert TaskSet.load(tmp_path / "a").names == ("a",)
    assert TaskSet.load(f"{tmp_path}/sub/*").names == ("sub-b",)


def test_rows_are_tasks(tmp_path):
    row = {
        "name": "one",
        "instruction": "x",
        "image": "gyre/base",
        "tests": {"test.sh": "true"},
        "tags": ["t"],
        "artifacts": ["out", {"source": "log", "exclude": ["*.tmp"]}],
        "healthcheck": {"command": "true"},
        "steps": [{"name": "s", "instruction": "first", "min_reward": 0.5}],
        "solution": "answers",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps({"name": "two", "instruction": "y"}))
    tasks = TaskSet.load(tmp_path / "rows.jsonl")
    assert tasks.names == ("one", "two")
    assert tasks["one"].artifacts == (Artifact("out"), Artifact("log", exclude=("*.tmp",)))
    assert tasks["one"].healthcheck == Healthcheck(command="true")
    assert tasks["one"].steps[0].min_reward == 0.5
    assert tasks["one"].solution == tmp_path / "answers"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["rows.jsonl:1", "not JSON"]),
        ("\n[1]", ["rows.jsonl:2", "[1]", "one JSON object"]),
        ('{"instruction": "x", "promt": "y"}', ["rows.jsonl:1", "'promt'", "SWE-bench"]),
        ('{"instruction": ""}', ["rows.jsonl:1", "instruction"]),
        ('{"instruction": "x", "healthcheck": {"cmd": "y"}}', ["rows.jsonl:1", "cmd"]),
        ('{"instance_id": "a", "test_patch": "x"}', ["rows.jsonl:1", "problem_statement"]),
        ('{"instruction": "x"}\n{"instruction": "y"}', ["two tasks named 'task'"]),
        ("", ["has no tasks"]),
    ],
)
def test_wrong_rows_name_line_and_key(tmp_path, text, words):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(TaskError) as caught:
        TaskSet.load(tmp_path / "rows.jsonl")
    for word in words:
        assert word in str(caught.value)


def test_tasks_of_python(tmp_path, monkeypatch):
    (tmp_path / "my_sorting_tasks.py").write_text(
        "from gyre_sdk.harness.task import Task\n"
        "ONE = Task(instruction='x', name='one')\n"
        "MANY = [ONE, Task(instruction='y', name='two')]\n"
        "WRONG = [ONE, 'two']\n"
        "def made(count): return (Task(instruction='z', name=f'z-{n}') for n in range(count))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert TaskSet.load("my_sorting_tasks:ONE").names == ("one",)
    assert TaskSet.load("my_sorting_tasks:MANY").names == ("one", "two")
    assert TaskSet.load("my_sorting_tasks:made", count=3).names == ("z-0", "z-1", "z-2")
    for reference, word in [("WRONG", "no Task"), ("made.x", "no 'x'"), ("__name__", "is str")]:
        with pytest.raises(TaskError, match=word):
            TaskSet.load(f"my_sorting_tasks:{reference}")
    with pytest.raises(TaskError, match="no module 'my_sorting_taskz'"):
        TaskSet.load("my_sorting_taskz:ONE")
    monkeypatch.delitem(sys.modules, "my_sorting_tasks")


def test_what_is_no_source(tmp_path):
    with pytest.raises(TaskError, match="neither a folder"):
        TaskSet.load(tmp_path / "nothing")
    with pytest.raises(TaskError, match="has no tasks"):
        TaskSet.load(tmp_path)
    with pytest.raises(TaskError, match="has no tasks"):
        TaskSet.load(f"{tmp_path}/*")


def test_filters():
    tasks = TaskSet(
        [
            Task(instruction="sort a list", name="sort-1", tags=("lists",), metadata={"difficulty": "easy"}),
            Task(instruction="sort a file", name="sort-2", tags=("files", "lists"), metadata={"difficulty": "hard"}),
            Task(instruction="parse a date", name="parse", tags=("dates",)),
        ]
    )
    assert tasks.filter().names == tasks.names
    assert tasks.filter(names=["sort-*"]).names == ("sort-1", "sort-2")
    assert tasks.filter(names=["sort-1", "parse"]).names == ("sort-1", "parse")
    assert tasks.filter(exclude=["*-2"]).names == ("sort-1", "parse")
    assert tasks.filter(tags=["files", "dates"]).names == ("sort-2", "parse")
    assert tasks.filter(difficulty=["hard"]).names == ("sort-2",)
    assert tasks.filter(matching=r"(list|date)$").names == ("sort-1", "parse")
    assert tasks.filter(where=lambda task: len(task.tags) > 1).names == ("sort-2",)
    assert tasks.filter(names=["sort-*"], difficulty=["easy"], tags=["files"]).names == ()
    with pytest.raises(TaskError, match=r"no task named 'sort-3'; it has sort-1, sort-2, parse"):
        tasks.filter(names=["sort-3"])
    with pytest.raises(TaskError, match="not a regular expression"):
        tasks.filter(matching="(")


def test_it_is_a_sequence():
    tasks = some("a", "b", "c")
    assert (len(tasks), [task.name for task in tasks], tasks[1].name, tasks["c"].name) == (3, ["a", "b", "c"], "b", "c")
    assert tasks[1:].names == ("b", "c") and isinstance(tasks[1:], TaskSet)
    assert [task.network for task in tasks.replace(network="full")] == ["full"] * 3
    with pytest.raises(TaskError, match="no task named 'd'"):
        tasks["d"]
    with pytest.raises(IndexError):
        tasks[3]
    with pytest.raises(TaskError, match="two tasks named 'a'; give each"):
        some("a", "b", "a")


names = st.lists(st.text("abcdefgh0123", min_size=1, max_size=6), unique=True, min_size=1, max_size=30)


@given(names, st.randoms(use_true_random=False), st.floats(0, 1), st.integers(0, 3))
def test_a_split_is_of_names_alone(found, rng, share, seed):
    shuffled = list(found)
    rng.shuffle(shuffled)
    train, test = some(*found).split(train=share, seed=seed)
    other_train, other_test = some(*shuffled, "z-more").split(train=share, seed=seed)
    assert set(train.names) | set(test.names) == set(found) and not set(train.names) & set(test.names)
    assert set(train.names) == set(other_train.names) - {"z-more"}
    assert set(test.names) == set(other_test.names) - {"z-more"}
    larger, _ = some(*found).split(train=min(1.0, share + 0.2), seed=seed)
    assert set(train.names) <= set(larger.names)


def test_splits_hold_over_versions():
    """A change of these sides would leak test tasks into the training of everyone who updates."""
    train, test = some(*(f"task-{number}" for number in range(12))).split(train=0.75, seed=0)
    assert test.names == ("task-9",)
    assert len(train) == 11
    train, test = some(*(f"task-{number}" for number in range(2000))).split(train=0.75, seed=1)
    assert 1440 <= len(train) <= 1560
    with pytest.raises(TaskError, match="share from 0 to 1"):
        some("a").split(train=75)


@given(names, st.randoms(use_true_random=False), st.integers(0, 3))
def test_seeds_decide_order_and_samples(found, rng, seed):
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert some(*found).shuffled(seed).names == some(*shuffled).shuffled(seed).names
    three, five = some(*found).sample(3, seed=seed), some(*shuffled).sample(5, seed=seed)
    assert three.names == five.names[:3] and len(three) == min(3, len(found))


def test_real_folders_make_a_set():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is missing: the shared data are not part of the repository")
    tasks = TaskSet.load(f"{DATA}/autoagent-*")
    assert tasks.names == ("count-files", "hello-world", "simple-script")
