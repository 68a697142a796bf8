"""The tables that are written: names, types and meaning of their columns, one list per format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Type of a column."""

    TEXT = "string"
    INTEGER = "int64"
    NUMBER = "float64"
    INTEGERS = "list<int32>"
    NUMBERS = "list<float64>"
    LOGPROBS = "list<float32>"
    TEXTS = "list<string>"
    MESSAGES = "list<message>"


@dataclass(frozen=True, slots=True)
class Column:
    """A column."""

    name: str
    kind: Kind
    meaning: str


_RUN = (
    Column("run", Kind.TEXT, "Id of the run."),
    Column("group", Kind.TEXT, "Id of its group; null outside groups."),
    Column("task", Kind.TEXT, "Name of its task."),
    Column("reward", Kind.NUMBER, "Reward of the run; null when unscored."),
    Column("role", Kind.TEXT, "Role that the trajectory was drawn from."),
    Column("leaf", Kind.TEXT, "Id of the call that ends it."),
)

TRAJECTORIES = (
    *_RUN,
    Column("member", Kind.INTEGER, "Index of the run in its group."),
    Column("advantage", Kind.NUMBER, "Advantage of the run; null where it has none (with --all)."),
    Column("ids", Kind.INTEGERS, "Token ids of the path, T."),
    Column("targets", Kind.INTEGERS, "Positions in `ids` that are trained, K, ascending."),
    Column("weights", Kind.NUMBERS, "Loss weight per target, K; sums to 1 over the rows of a run."),
    Column("logprobs", Kind.LOGPROBS, "Log-prob (nats) at sampling per target, K."),
    Column("versions", Kind.INTEGERS, "Policy version that sampled each target, K."),
    Column("advantages", Kind.NUMBERS, "Advantage per target, K."),
    Column("temperatures", Kind.NUMBERS, "Temperature of sampling per target, K."),
    Column("calls", Kind.INTEGERS, "Index into `call_ids` per target, K."),
    Column("call_ids", Kind.TEXTS, "Calls that sampled the targets."),
    Column("call_roles", Kind.TEXTS, "Their roles."),
)

TRL = (
    Column("input_ids", Kind.INTEGERS, "Token ids of the path, T."),
    Column("labels", Kind.INTEGERS, "The same, -100 where the token is not trained, T: what `SFTTrainer` takes."),
    Column("completion_mask", Kind.INTEGERS, "1 where the token is trained, T."),
    Column("old_log_probs", Kind.LOGPROBS, "Log-prob (nats) at sampling, 0 where the token is not trained, T."),
    Column("advantage", Kind.NUMBER, "Advantage of the run."),
    Column("advantages", Kind.NUMBERS, "Advantage per token, 0 where it is not trained, T."),
    Column("weights", Kind.NUMBERS, "Loss weight per token, T; sums to 1 over the rows of a run."),
    Column("model_version", Kind.INTEGER, "Oldest policy version among the targets."),
    Column("group_id", Kind.INTEGER, "Number of the group in this file, from 0."),
    *_RUN,
)

SFT = (
    Column("messages", Kind.MESSAGES, "The conversation that the trajectory ends with, its answer included."),
    Column("tools", Kind.TEXT, "Definitions of the tools that the model was shown, as JSON; null without tools."),
    *_RUN,
)

DPO = (
    Column("prompt", Kind.MESSAGES, "Messages that both runs have in common."),
    Column("chosen", Kind.MESSAGES, "What the run with the higher reward answered to them."),
    Column("rejected", Kind.MESSAGES, "What the run with the lower reward answered to them."),
    Column("tools", Kind.TEXT, "Definitions of the tools that the model was shown, as JSON; null without tools."),
    Column("group", Kind.TEXT, "Id of the group of both runs."),
    Column("task", Kind.TEXT, "Name of their task."),
    Column("chosen_run", Kind.TEXT, "Id of the run with the higher reward."),
    Column("rejected_run", Kind.TEXT, "Id of the other."),
    Column("chosen_reward", Kind.NUMBER, "Its reward."),
    Column("rejected_reward", Kind.NUMBER, "Its reward."),
)

TABLES: Mapping[str, tuple[Column, ...]] = {"parquet": TRAJECTORIES, "trl": TRL, "sft": SFT, "dpo": DPO}
"""Format -> its columns."""

MESSAGE = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
"""Keys of a message; tool calls have `id`, `type` and `function` with `name` and `arguments`, a JSON text. Each message has
the keys that say something; in Parquet the others are null."""
