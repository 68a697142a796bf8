"""Files made of a store: exactly what would be trained, nothing secret, nothing half-written; no torch is needed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_kit import KEY, SYSTEM, TOOLS, USER, Talk, make_store

from gyre_sdk.credit import Baseline
from gyre_sdk.errors import SettingsError
from gyre_sdk.export import export, materialise
from gyre_sdk.export.chats import ends
from gyre_sdk.export.columns import MESSAGE, TABLES
from gyre_sdk.export.tables import Exported, Wanted
from gyre_sdk.journal import Journal
from gyre_sdk.select import Role
from gyre_sdk.trainer.ledger import GroupClosed, GroupPlanned, Ledger, StepCommitted, StepStarted, VersionAllocated
from gyre_sdk.trainer.units import Sealer

MEAN = Sealer(baseline=Baseline.MEAN)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("export") / "gyre.db")


def lines(
    store: Path, folder: Path, form: str, sealer: Sealer = MEAN, **wanted: Any
) -> tuple[list[dict[str, Any]], Exported]:
    out = folder / f"{form}.jsonl"
    with Journal(store, "r") as journal:
        report = export(journal, sealer, form, out, Wanted(**wanted))
    text = out.read_text()
    assert KEY not in text and "api_key" not in text
    found = [json.loads(line) for line in text.splitlines()]
    assert report.lines == len(found) and all(list(line) for line in found)
    for line in found:
        assert set(line) == {column.name for column in TABLES[form]}
    return found, report


def test_what_is_shown_is_what_is_sealed(store: Path) -> None:
    """Rows, advantages and counts of `materialise` are those of the units that training would get."""
    with Journal(store, "r") as journal:
        for sealer in (MEAN, Sealer(rule="all"), Sealer(rule="longest", j_max=1, roles=(Role("main", 2.0),))):
            groups = {found.group: found for found in materialise(journal, sealer)}
            assert list(groups) == ["g", "flat", None]
            for name in ("g", "flat"):
                runs = [run.run for run in groups[name].runs]
                sealed = sealer.seal(journal, name, runs)
                units = [row.record() for unit in sealed.units for row in unit.rows]
                assert [row.record() for row in groups[name].trained] == units
                assert groups[name].dropped == sealed.dropped
                assert groups[name].dropped_tokens == sealed.dropped_tokens
            assert groups["flat"].dropped == {"group_flat": 1} and len(groups["flat"].rows) == 2
            assert groups["g"].dropped["run_unscored"] == 1 and {row.run for row in groups["g"].trained} == set("abc")
            assert groups[None].dropped == {"call_hosted": 2, "run_without_targets": 1}


def test_a_training_on_record_says_which_runs_and_how_old(tmp_path: Path) -> None:
    """Groups are the runs that the training closed them with; versions are as old as they were in the step that used them."""
    with Journal(tmp_path / "gyre.db") as journal:
        for group, version in (("g0", 0), ("g1", 0), ("g2", 1)):
            for member in range(3):
                talk = Talk(journal, f"{group}-{member}", group=group, member=member)
                talk.turn([USER], {"role": "assistant", "content": "x"}, version=version)
                talk.end(float(member))
        log = Ledger(journal)
        for index, group in enumerate(("g0", "g1", "g2")):
            log.add(GroupPlanned(group, index, "task", 2), at=1.0)
            log.add(GroupClosed(group, [f"{group}-0", f"{group}-1"], [0.0, 1.0], 0), at=1.0)
        log.add(StepStarted(1, ["g0"]), at=1.0)
        log.add(StepCommitted(1, []), at=1.0)
        log.add(VersionAllocated(1, 1), at=1.0)
        log.add(StepStarted(2, ["g1"]), at=1.0)
        log.add(StepCommitted(2, []), at=1.0)
        log.add(VersionAllocated(2, 2), at=1.0)
        found = {limit: list(materialise(journal, Sealer(max_staleness=limit))) for limit in (0, 1)}
    stale = {"call_stale": 2, "run_without_targets": 2}
    assert [group.dropped for group in found[0]] == [{}, stale, stale], (
        "g2 waits: it is as old as the newest policy says"
    )
    assert [group.dropped for group in found[1]] == [{}, {}, {}]
    assert [run.run for run in found[0][1].runs] == ["g1-0", "g1-1"]


def test_trajectories_have_every_number(store: Path, tmp_path: Path) -> None:
    found, report = lines(store, tmp_path, "parquet")
    assert [line["run"] for line in found] == ["a", "b", "c"] and report.left_out["rows_without_advantage"] == 3
    with Journal(store, "r") as journal:
        rows = {row.run: row for group in materialise(journal, MEAN) for row in group.trained}
    for line in found:
        row = rows[line["run"]]
        for name in ("ids", "targets", "weights", "logprobs", "versions", "advantages", "temperatures", "calls"):
            assert np.array_equal(np.array(line[name]), getattr(row, name)), name
        assert line["advantage"] == row.advantage and tuple(line["call_ids"]) == row.call_ids
        assert math.fsum(line["weights"]) == pytest.approx(1) and line["task"] == "task-g"
    every, _ = lines(store, tmp_path, "parquet", untrained=True)
    assert {line["run"]: line["advantage"] for line in every} == {
        "a": 0.5, "b": 0.0, "c": -0.5, "u": None, "f0": None, "f1": None
    }  # fmt: skip


def test_the_table_of_trls_names(store: Path, tmp_path: Path) -> None:
    found, _ = lines(store, tmp_path, "trl")
    first = found[0]
    assert (
        len({len(first[name]) for name in ("input_ids", "labels", "completion_mask", "old_log_probs", "weights")}) == 1
    )
    for token, label, mask, logprob in zip(
        first["input_ids"], first["labels"], first["completion_mask"], first["old_log_probs"], strict=True
    ):
        assert (label, logprob) == ((token, -0.5) if mask else (-100, 0.0))
    assert sum(first["completion_mask"]) == 8 and (first["group_id"], first["model_version"]) == (0, 0)


def test_conversations_of_the_best_runs(store: Path, tmp_path: Path) -> None:
    found, report = lines(store, tmp_path, "sft")
    assert [line["run"] for line in found] == ["a"], "the best of each group whose rewards differ"
    assert report.left_out == {
        "group_without_contrast": 1, "run_without_group": 1, "run_unscored": 1, "run_below_the_best": 2
    }  # fmt: skip
    messages = found[0]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert all(set(message) <= set(MESSAGE) for message in messages) and messages[:2] == [SYSTEM, USER]
    called = messages[2]["tool_calls"][0]
    assert called == {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "env"}'}}
    assert messages[2]["reasoning_content"] == "I look." and messages[3]["content"] == "API=[key]"
    assert json.loads(found[0]["tools"]) == TOOLS
    good, _ = lines(store, tmp_path, "sft", min_reward=0.9)
    assert [line["run"] for line in good] == ["a", "f0", "f1", "h"], "hosted runs have conversations too"
    assert good[-1]["messages"][-1]["content"] == "Water, said a hosted model." and good[-1]["group"] is None
    both, _ = lines(store, tmp_path, "sft", min_reward=0.5, best=1)
    assert [line["run"] for line in both] == ["a", "f0", "h"]


def test_preferences_have_the_same_prompt(store: Path, tmp_path: Path) -> None:
    (pair,), report = lines(store, tmp_path, "dpo")
    assert (pair["chosen_run"], pair["rejected_run"], pair["chosen_reward"]) == ("a", "c", 1.0)
    assert pair["prompt"] == [SYSTEM, USER] and len(pair["chosen"]) == len(pair["rejected"]) == 1
    assert pair["chosen"][0]["tool_calls"] and pair["rejected"][0]["content"] == "Wine."
    assert report.left_out["pair_without_contrast"] == 1 and report.left_out["run_without_group"] == 1
    (whole,), _ = lines(store, tmp_path, "dpo", whole=True)
    assert [message["role"] for message in whole["chosen"]] == ["assistant", "tool", "assistant"]
    again, more = lines(store, tmp_path, "dpo", best=9)
    assert again == [pair] and more.left_out == report.left_out, "no run is compared twice"
    none, report = lines(store, tmp_path, "dpo", min_reward=2.0)
    assert none == [] and report.left_out["pair_below_min_reward"] == 1


def test_the_guide_lists_every_column() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "guide.md").read_text()
    for form, columns in TABLES.items():
        table = "\n".join(f"| `{column.name}` | {column.kind} | {column.meaning} |" for column in columns)
        assert table in guide, form


def test_the_longest_common_prompt_is_taken(tmp_path: Path) -> None:
    """Two runs that answered the first message alike differ at the second: that is where they are compared."""
    with Journal(tmp_path / "gyre.db") as journal:
        for member, (run, said, reward) in enumerate([("a", "Water.", 1.0), ("b", "Wine.", 0.0), ("c", "Tea.", 0.5)]):
            talk = Talk(journal, run, group="g", member=member)
            talk.turn([SYSTEM, USER], {"role": "assistant", "content": "What?"})
            talk.turn([{"role": "user", "content": "A word."}], {"role": "assistant", "content": said})
            talk.end(reward)
    (pair,), _ = lines(tmp_path / "gyre.db", tmp_path, "dpo")
    assert len(pair["prompt"]) == 4 and (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == (
        "Water.",
        "Wine.",
    )


def test_a_conversation_ends_with_the_last_answer_though_a_call_failed_after_it(tmp_path: Path) -> None:
    with Journal(tmp_path / "gyre.db") as journal:
        for member, (run, said) in enumerate([("a", "Water."), ("b", "Wine.")]):
            talk = Talk(journal, run, group="g", member=member)
            talk.turn([SYSTEM, USER], {"role": "assistant", "content": said})
            talk.fails([{"role": "user", "content": "Go on."}])
            talk.end(1.0 - member)
    (line,), _ = lines(tmp_path / "gyre.db", tmp_path, "sft")
    assert line["messages"][-1]["content"] == "Water." and line["leaf"] == "a-c0"
    (pair,), _ = lines(tmp_path / "gyre.db", tmp_path, "dpo")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("Water.", "Wine.")


def test_runs_that_give_nothing_are_counted(tmp_path: Path) -> None:
    with Journal(tmp_path / "gyre.db") as journal:
        for member in range(2):
            talk = Talk(journal, f"r{member}", group="g", member=member)
            talk.fails([SYSTEM, USER])
            talk.end(float(member))
    for form, reasons in {
        "parquet": {"run_without_targets": 2},
        "trl": {"run_without_targets": 2},
        "sft": {"run_without_conversation": 1, "run_below_the_best": 1},
        "dpo": {"pair_without_common_prompt": 1},
    }.items():
        found, report = lines(tmp_path / "gyre.db", tmp_path, form)
        assert found == [] and report.left_out == reasons, form


def test_ends_of_conversations(tmp_path: Path) -> None:
    with Journal(tmp_path / "gyre.db") as journal:
        talk = Talk(journal, "h", group=None)
        talk.turn([USER], {"role": "assistant", "content": "One."}, hosted=True)
        last = talk.turn([USER], {"role": "assistant", "content": "Two."}, hosted=True)
        talk.messages = [SYSTEM]  # the history is replaced
        other = talk.turn([USER], {"role": "assistant", "content": "Three."}, hosted=True)
        assert [one.call for one in ends(journal.exchanges("h"))] == [last, other]


def test_secrets_of_the_environment_are_taken_out(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATER_TOKEN", "Say water.")
    (line,), _ = lines(store, tmp_path, "sft")
    assert line["messages"][1]["content"] == "[WATER_TOKEN]"


def test_files_appear_whole_or_not_at_all(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("before")

    def failing(run: Any, calls: Any) -> Any:
        raise RuntimeError("no")

    with Journal(store, "r") as journal:
        with pytest.raises(Exception, match="credit hook"):
            export(journal, Sealer(credit_hook=failing), "parquet", out)
        places = [("out.csv", "ends in .parquet or .jsonl")]
        places += [(name, "cannot be written") for name in ("absent/out.jsonl", "out.jsonl/below.jsonl")]
        for name, said in places:
            with pytest.raises(SettingsError, match=said):
                export(journal, MEAN, "parquet", tmp_path / name)
        with pytest.raises(SettingsError, match="format 'xml' is unknown"):
            export(journal, MEAN, "xml", out)
        with pytest.raises(SettingsError, match="no training is on record"):
            export(journal, Sealer(max_staleness=1), "parquet", out)
    assert out.read_text() == "before" and [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


_WITHOUT = """
import json, sys
for name in ("pyarrow", "torch", "datasets", "trl", "transformers"):
    sys.modules[name] = None
from gyre_sdk.cli import main
for arguments in json.load(sys.stdin):
    try:
        main(arguments)
    except SystemExit as end:
        print("status", end.code or 0, flush=True)
"""


def test_json_lines_need_no_extra_and_parquet_says_which(store: Path, tmp_path: Path) -> None:
    out, table = tmp_path / "out.jsonl", tmp_path / "out.parquet"
    commands = [
        ["export", store, "--format", "trl", "-o", out, "--rule", "longest", "--role", "main:2:1"],
        ["export", store, "--format", "parquet", "-o", table],
        ["export", store, "--format", "sft", "-o", out, "--role", "main:much"],
        ["samples", store, "--groups", "--json", "--rule", "all"],
        ["samples", store],
    ]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        input=json.dumps([[str(part) for part in command] for command in commands]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "3 lines (trl)" in done.stdout and len(out.read_text().splitlines()) == 3
    said = done.stderr.splitlines()
    assert "pip install 'gyre-sdk[train]'" in said[0] and "--role 'main:much' is not NAME" in said[1]
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == [
        f"status {code}" for code in (0, 2, 2, 0, 0)
    ]
    groups = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [group["group"] for group in groups] == ["g", "flat", None]
    first = groups[0]
    assert (first["rows"], first["owned_tokens"], first["advantages"]) == (3, 18, {"a": 0.5, "b": 0.0, "c": -0.5})
    assert first["row_tokens"] > first["unique_row_tokens"] and first["raw_tokens"] > first["unique_tokens"]
    assert groups[1]["dropped"] == {"group_flat": 1} and groups[1]["rows"] == 0
    assert groups[2]["dropped_tokens"] == {} and "not trained" in done.stdout
