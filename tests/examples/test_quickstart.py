"""The demo's tasks are honest, its traces are token-exact, and its agent loop shows all four roles."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))

pytest.importorskip("torch")
import agent
import policy
import tasks
import traces
import warmstart

SHELL = [shutil.which("busybox"), "sh"] if shutil.which("busybox") else ["sh"]


def some_of_each_kind(per_kind: int) -> list[tasks.Task]:
    """Return single-part tasks, `per_kind` of each kind."""
    singles = [task for task in tasks.generate("validation", 900, seed=3) if len(task.parts) == 1]
    return [task for kind in tasks.KINDS for task in [t for t in singles if t.parts[0].kind == kind][:per_kind]]


class Box:
    """A work dir in which `/workspace` and `/logs/verifier` are mapped to a folder of the test."""

    def __init__(self, root: Path, task: tasks.Task) -> None:
        self.work, self.logs, self.task = root / "workspace", root / "logs", task
        for folder in (self.work, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        for name, content in task.files.items():
            (self.work / name).write_text(content)

    def sh(self, script: str) -> SimpleNamespace:
        done = subprocess.run([*SHELL, "-c", script], cwd=self.work, capture_output=True, text=True, timeout=20)
        return SimpleNamespace(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def reward(self) -> float:
        script = self.task.test_script.replace("/workspace", str(self.work)).replace("/logs/verifier", str(self.logs))
        assert self.sh(script).exit_code == 0
        return float((self.logs / "reward.txt").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return policy.make_tokenizer()


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return policy.make_renderer(tokenizer)


def test_generation_is_deterministic_and_splits_share_no_part() -> None:
    drawn = {split: tasks.generate(split, 300, seed=1) for split in tasks.Split}
    assert drawn["train"] == tasks.generate("train", 300, seed=1) != tasks.generate("train", 300, seed=2)
    solutions = {
        split: {tuple(s.command for s in part.right) for task in some for part in task.parts}
        for split, some in drawn.items()
    }
    assert not solutions["train"] & solutions["validation"]
    assert not solutions["train"] & solutions["heldout"]
    assert not solutions["validation"] & solutions["heldout"]
    for some in drawn.values():
        assert len({task.instruction for task in some}) == len({task.name for task in some}) == 300
        assert 0.25 < sum(len(task.parts) == 1 for task in some) / 300 < 0.42
        assert {part.kind for task in some for part in task.parts} == set(tasks.KINDS)


@pytest.mark.parametrize("task", some_of_each_kind(2), ids=lambda task: f"{task.parts[0].kind}-{task.name}")
def test_right_way_scores_one_and_habit_scores_less_and_the_shell_answers_as_stated(tmp_path, task) -> None:
    part = task.parts[0]
    box = Box(tmp_path, task)
    assert box.reward() == 0.0, "nothing done yet"
    for steps, expected in ((part.right, 1.0), (part.wrong, 0.0)):
        box = Box(tmp_path, task)
        for step in steps:
            done = box.sh(step.command)
            assert (done.exit_code, done.stdout.removesuffix("\n")) == (0, step.output), step.command
        assert box.reward() == expected


def test_two_part_tasks_give_half_for_half(tmp_path) -> None:
    pairs = [task for task in tasks.generate("heldout", 30, seed=0) if len(task.parts) == 2][:8]
    for task in pairs:
        box = Box(tmp_path, task)
        for rewards, part in zip((0.5, 1.0), task.parts, strict=True):
            for step in part.right:
                box.sh(step.command)
            assert box.reward() == rewards


def test_folders_are_harbor_tasks(tmp_path) -> None:
    some = tasks.generate("train", 6, seed=0)
    for task, folder in zip(some, tasks.write_folders(tmp_path, some), strict=True):
        config = tomllib.loads((folder / "task.toml").read_text())
        assert config["environment"]["docker_image"] == "gyre/base"
        files = folder / config["metadata"]["gyre"]["files"]
        assert {path.name: path.read_text() for path in files.iterdir()} == task.files
        assert (folder / "instruction.md").read_text().strip() == task.instruction
        assert (folder / "tests" / "test.sh").read_text() == task.test_script
        assert "python" not in task.test_script


def test_tokenizer_keeps_every_text_and_every_word_is_one_token(tokenizer) -> None:
    for text in (*tasks.WORDS, *policy.PHRASES, *policy.SPECIAL, *policy.MARKERS):
        assert len(tokenizer.encode(text).ids) == 1, text
    for text in ("Ünïcode\t\n $HOME {}", *(task.instruction for task in tasks.generate("train", 50, seed=0))):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_rows_are_what_the_proxy_would_render(tokenizer, renderer) -> None:
    """Replay each row turn by turn, from the parsed answers alone."""
    rows = traces.make_rows(tasks.generate("train", 60, seed=5), tokenizer, renderer, seed=5)
    assert len(rows) > 100
    for row in rows:
        turns, start = [], None
        for i, bit in enumerate([*row.mask, 0]):
            if bit and start is None:
                start = i
            elif not bit and start is not None:
                turns.append((start, i))
                start = None
        for (start, stop), following in zip(turns, [*turns[1:], None], strict=True):
            sampled = list(row.ids[start:stop])
            parsed = renderer.parse_response(sampled, tools=agent.TOOLS)
            assert all(call.status.name == "OK" for call in parsed.tool_calls or [])
            again = parsed.content or ""
            for call in parsed.tool_calls or []:
                again += f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps(call.arguments)}}}\n</tool_call>'
            assert tokenizer.encode(again + "<|im_end|>").ids == sampled
            if following:
                between = tokenizer.decode(list(row.ids[stop : following[0]]), skip_special_tokens=False)
                new = [
                    {
                        "role": "tool",
                        "content": text.removeprefix("\n<tool_response>\n").removesuffix("\n</tool_response>"),
                    }
                    if text.startswith("\n<tool_response>")
                    else {"role": "user", "content": text.removeprefix("\n")}
                    for text in (block.split("<|im_end|>")[0] for block in between.split("<|im_start|>user")[1:])
                ]
                bridged = renderer.bridge_to_next_turn(list(row.ids[:start]), sampled, new, tools=agent.TOOLS)
                assert list(bridged.token_ids) == list(row.ids[: following[0]])


def test_every_sampled_token_is_trained_once(tokenizer, renderer) -> None:
    for task in tasks.generate("train", 40, seed=6):
        scripted = traces.ScriptedAgent(task, tokenizer, renderer, random.Random(task.name))
        rows = scripted.play()
        assert sum(sum(row.mask) for row in rows) == sum(sampled for _, _, sampled in scripted.calls)
        assert len(rows) <= 5


def test_all_four_roles_appear_often_and_runs_stay_short(tokenizer, renderer) -> None:
    runs: Counter[str] = Counter()
    calls = 0
    some = tasks.generate("train", 200, seed=7)
    for task in some:
        scripted = traces.ScriptedAgent(task, tokenizer, renderer, None)
        scripted.play()
        runs.update({role for role, _, _ in scripted.calls})
        calls += len(scripted.calls)
    assert runs["main"] == 200 and runs["subagent"] > 100
    assert min(runs["main-summary"], runs["subagent-summary"]) >= 20
    assert calls / len(some) <= 6


def test_the_loop_solves_tasks_for_real_when_the_policy_is_right(tmp_path, tokenizer, renderer) -> None:
    for task in tasks.generate("validation", 25, seed=8):
        box = Box(tmp_path, task)
        scripted = traces.ScriptedAgent(task, tokenizer, renderer, None)
        scripted.workspace = SimpleNamespace(exec=lambda command, timeout, box=box: box.sh(command))
        scripted.play()
        assert box.reward() == 1.0


@pytest.mark.parametrize("arguments", ["", "{", "[]", '{"command": 3}', "{}", "null"])
def test_a_malformed_call_is_an_error_that_the_policy_reads(arguments) -> None:
    assert agent._run(None, arguments) == "error"


def test_warm_start_gives_a_folder_that_transformers_loads_and_is_cached(tmp_path, tokenizer, renderer) -> None:
    pytest.importorskip("trl")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = warmstart.WarmStart(seed=1, traces=12)
    lines: list[str] = []
    out = warmstart.warm_start(tmp_path / "a", settings, tmp_path / "cache", lines.append)
    assert not any("cached" in line for line in lines)
    warmstart.warm_start(tmp_path / "b", settings, tmp_path / "cache", lines.append)
    assert "cached" in lines[-1]
    names = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names <= {path.name for path in out.iterdir()}
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    fast = AutoTokenizer.from_pretrained(out)
    messages = agent._opening("set fox to red in oak.conf ; sort pine.txt into elm.txt")
    templated = fast.apply_chat_template(messages, tools=agent.TOOLS, add_generation_prompt=True, return_dict=False)
    assert templated == renderer.render_ids(messages, tools=agent.TOOLS, add_generation_prompt=True)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.vocab_size == tokenizer.get_vocab_size() == len(fast)
