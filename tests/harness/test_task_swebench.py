"""SWE-bench-style rows: real rows become tasks, real test logs are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_sdk.errors import ScoringError, TaskError
from gyre_sdk.harness.task import SwebenchOptions, Task, TaskSet, swebench_task
from gyre_sdk.harness.task.swebench import SwebenchScorer, names, touched
from gyre_sdk.harness.task.testlogs import passed, pytest_outcomes, sympy_outcomes, unittest_outcomes
from gyre_sdk.harness.workspace import open_workspace
from gyre_sdk.records import ExecResult

ROWS = Path(__file__).parents[3] / "shared" / "data" / "swebench" / "swebench_verified_5_rows.jsonl"


def rows() -> dict[str, dict]:
    if not ROWS.is_file():
        pytest.skip(f"{ROWS} is missing: the shared data are not part of the repository")
    return {row["instance_id"]: row for row in map(json.loads, ROWS.read_text().splitlines())}


def scorer(name: str, **options) -> SwebenchScorer:
    found = swebench_task(rows()[name], SwebenchOptions(**options)).scorer
    assert isinstance(found, SwebenchScorer)
    return found


def test_real_rows_are_tasks():
    tasks = TaskSet.load(ROWS) if rows() else None
    assert tasks is not None and len(tasks) == 5
    task = tasks["sympy__sympy-20916"]
    assert task.image == "swebench/sweb.eval.x86_64.sympy_1776_sympy-20916:latest"
    assert task.instruction.startswith("pprint unicode does not format subscripts")
    assert (task.workdir, task.tags) == ("/testbed", ("sympy/sympy", "verified"))
    assert sorted(task.solution_files()) == ["patch.diff", "solve.sh"]
    assert tasks.filter(difficulty=["<15 min fix"]).names == (
        "sphinx-doc__sphinx-8595",
        "sympy__sympy-20916",
        "scikit-learn__scikit-learn-14141",
    )
    assert all(task.scorer.fail_to_pass for task in tasks)
    hidden = (task.solution_files()["patch.diff"].decode(), task.scorer.test_patch)
    assert not any(text in str(value) for text in hidden for value in (task.instruction, task.files, task.metadata))


def test_images_are_named_by_the_user_or_the_row():
    row = rows()["django__django-10973"]
    assert swebench_task(row, SwebenchOptions(image="mine/{repo}:{version}-{instance_id}")).image == (
        "mine/django/django:3.0-django__django-10973"
    )
    assert swebench_task({**row, "image_name": "own:1"}).image == "own:1"
    assert swebench_task(row, SwebenchOptions(fields={"memory_mb": 4096})).memory_mb == 4096


@pytest.mark.parametrize("value", [["a", "b"], '["a", "b"]', "['a', 'b']"])
def test_names_in_every_spelling(value):
    assert names({"FAIL_TO_PASS": value}, "FAIL_TO_PASS") == ("a", "b")


@pytest.mark.parametrize("value", ["a b", "{'a'}", [1], 3, "__import__('os')"])
def test_names_that_are_none(value):
    with pytest.raises(TaskError, match=r"FAIL_TO_PASS.*JSON list of strings"):
        names({"FAIL_TO_PASS": value}, "FAIL_TO_PASS")


def test_what_a_patch_touches():
    found = touched(rows()["sphinx-doc__sphinx-8595"]["test_patch"])
    assert found == ("tests/roots/test-ext-autodoc/target/empty_all.py", "tests/test_ext_autodoc_automodule.py")


PYTEST_LOG = """
\x1b[32mPASSED\x1b[0m tests/test_a.py::test_one
PASSED tests/test_a.py::test_two[a - b]
FAILED tests/test_a.py::test_three[1] - AssertionError: assert 1 == 2
ERROR tests/test_b.py - ModuleNotFoundError: No module named 'x'
XFAIL tests/test_a.py::test_four - not yet
SKIPPED [1] tests/test_a.py:3: no network
"""
DJANGO_LOG = """
test_accent (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase) ... ok
test_basic (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase)
SIGINT is ignored in Python and passed to psql to abort queries. ... ok
test_column (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase) ... FAIL
test_nopass (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase) ... skipped 'none'
test_parameters (dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase) ... ERROR
"""
SYMPY_LOG = """
sympy/printing/tests/test_conventions.py[2]
test_super_sub ok
test_requires_partial F                                                    [FAIL]
"""


def test_logs_of_real_runners():
    assert pytest_outcomes(PYTEST_LOG) == {
        "tests/test_a.py::test_one": True,
        "tests/test_a.py::test_two[a - b]": True,
        "tests/test_a.py::test_three[1]": False,
        "tests/test_b.py": False,
        "tests/test_a.py::test_four": True,
        "[1] tests/test_a.py:3: no network": False,
    }
    where = "(dbshell.test_postgresql.PostgreSqlDbshellCommandTestCase)"
    assert unittest_outcomes(DJANGO_LOG) == {
        f"test_accent {where}": True,
        f"test_basic {where}": True,
        f"test_column {where}": False,
        f"test_nopass {where}": False,
        f"test_parameters {where}": False,
    }
    assert sympy_outcomes(SYMPY_LOG) == {"test_super_sub": True, "test_requires_partial": False}


def test_a_name_without_file_stands_for_all_of_that_name():
    outcomes = {"a.py::test_x[1]": True, "b.py::test_x": False, "b.py::test_y": True}
    assert passed(outcomes, ["test_x"]) == 0
    assert passed(outcomes, ["test_y", "a.py::test_x[1]", "test_z"]) == 2


@pytest.mark.parametrize(
    ("log", "reward", "partial", "shares"),
    [
        ("test_super_sub ok\ntest_requires_partial ok", 1.0, 1.0, (1.0, 1.0)),
        ("test_super_sub ok\ntest_requires_partial F", 0.0, 0.0, (1.0, 0.0)),
        ("test_super_sub E\ntest_requires_partial ok", 0.0, 0.0, (0.0, 1.0)),
        ("SyntaxError: the agent broke the file", 0.0, 0.0, (0.0, 0.0)),
    ],
)
def test_rewards_and_partial_credit(log, reward, partial, shares):
    ran = ExecResult(exit_code=0, stdout=log, stderr="")
    score = scorer("sympy__sympy-20916").grade(ran)
    assert (score.reward, score.parts["fail_to_pass"], score.parts["pass_to_pass"]) == (reward, *shares)
    assert scorer("sympy__sympy-20916", reward="partial").grade(ran).reward == partial


def test_partial_credit_is_the_share_of_tests_turned():
    log = DJANGO_LOG.replace("SIGINT is ignored in Python and passed to psql to abort queries. ... ok", "")
    grader = scorer("django__django-10973", reward="partial")
    score = grader.grade(ExecResult(exit_code=1, stdout="", stderr=log))
    assert 0 < score.reward == score.parts["fail_to_pass"] < 1 and score.parts["resolved"] == 0
    assert f"of {len(grader.fail_to_pass)} FAIL_TO_PASS" in score.explanation


TESTED = """value=$(cat value)
told() { [ "$1" = "$value" ] && echo "PASSED check.py::$2" || echo "FAILED check.py::$2 - is $value"; }
told "$value" test_old
"""
PATCH = """diff --git a/check.py b/check.py
--- a/check.py
+++ b/check.py
@@ -1,3 +1,4 @@
 value=$(cat value)
 told() { [ "$1" = "$value" ] && echo "PASSED check.py::$2" || echo "FAILED check.py::$2 - is $value"; }
 told "$value" test_old
+told 2 test_new
diff --git a/more/check.py b/more/check.py
new file mode 100644
--- /dev/null
+++ b/more/check.py
@@ -0,0 +1 @@
+grep -q 2 value && grep -q done notes && echo "PASSED more/check.py::test_more" || echo "FAILED more/check.py::test_more"
"""


@pytest.fixture(scope="module")
def repository():
    """A workspace with a git repository, and the commit that an instance starts from."""
    workspace = open_workspace(Task(instruction="x"), kind="local")
    workspace.write_many({"value": b"1\n", "check.py": TESTED.encode()}, ".")
    workspace.exec("git init -q . && git add -A && git -c user.name=a -c user.email=a@b commit -qm base", check=True)
    yield workspace, workspace.exec("git rev-parse HEAD", check=True).stdout.strip()
    workspace.close()


@pytest.mark.parametrize(
    ("agent", "turned", "kept"),
    [
        ("true", 0.0, 1.0),
        ("echo 2 >value; echo done >notes", 1.0, 1.0),
        ("echo 2 >value", 0.5, 1.0),
        ("echo 'echo PASSED check.py::test_new' >check.py; git commit -qam forged", 0.0, 1.0),
        ("mkdir more; echo 'echo PASSED more/check.py::test_more' >more/check.py", 0.0, 1.0),
        ("rm check.py; mkdir check.py; ln -s /etc more; echo 2 >value; echo done >notes", 1.0, 1.0),
        ("echo 'exit 1' >.git/hooks/post-checkout; chmod +x .git/hooks/post-checkout; echo 2 >value", 0.5, 1.0),
    ],
)
def test_a_repository_is_graded_by_its_own_tests_whatever_the_agent_made_of_them(repository, agent, turned, kept):
    workspace, commit = repository
    workspace.exec(f"git reset -q --hard {commit}; git clean -qfdx; rm -f .git/hooks/*", check=True)
    workspace.exec(f"export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a\n{agent}")
    score = graded(commit)(workspace)
    assert (score.parts["fail_to_pass"], score.parts["pass_to_pass"]) == (turned, kept), score.output
    assert score.reward == score.parts["resolved"] == float(turned == 1.0)


def graded(commit: str, **changes: str) -> SwebenchScorer:
    row = {
        "instance_id": "a__b-1",
        "problem_statement": "make it 2",
        "base_commit": commit,
        "test_patch": PATCH,
        "FAIL_TO_PASS": ["check.py::test_new", "more/check.py::test_more"],
        "PASS_TO_PASS": '["check.py::test_old"]',
    }
    task = swebench_task(row | changes, SwebenchOptions(test_command="for f in {files}; do sh $f; done"))
    assert isinstance(task.scorer, SwebenchScorer)
    return task.scorer


def test_what_is_no_fault_of_the_agent_is_no_reward(repository):
    workspace, commit = repository
    workspace.exec(f"git reset -q --hard {commit}; git clean -qfdx; rm -f .git/hooks/*", check=True)
    with pytest.raises(ScoringError, match="'a__b-1': its test files cannot be taken from commit " + "0" * 40):
        graded("0" * 40)(workspace)
    with pytest.raises(ScoringError, match="its test patch does not apply"):
        graded(commit, test_patch=PATCH.replace("\n ", "\n other "))(workspace)
    task = swebench_task(
        {
            "instance_id": "c",
            "problem_statement": "x",
            "base_commit": commit,
            "test_patch": PATCH,
            "FAIL_TO_PASS": ["a"],
        },
        SwebenchOptions(test_command="no-such-runner {files}"),
    )
    with pytest.raises(ScoringError, match=r"its test command cannot run: 'no-such-runner check\.py more/check\.py'"):
        task.scorer(workspace)
