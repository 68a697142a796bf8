"""The message graph of `verifiers` v1: every call prepared and committed, from ready-made messages, ids and spans.

Run with the python of its own environment. Arguments: see `trees/rounds.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trees.histories import History
from trees.rounds import Work, serve
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, UserMessage


def turns_of(run: History) -> list[tuple[list[Any], Response]]:
    """Return each call's messages and its response; lists share their numbers, as one parsed history's would."""
    answers = {call.answer for call in run.calls}
    messages: list[Any] = [
        AssistantMessage(content=f"answer {place}") if place in answers else UserMessage(content=f"message {place}")
        for place in range(len(run.messages))
    ]
    ids = [message.tolist() for message in run.messages]
    made = []
    for call in run.calls:
        prompt: list[int] = []
        spans = []
        for place in call.prompt:
            spans.append((len(prompt), len(prompt) + len(ids[place])))
            prompt += ids[place]
        answer = ids[call.answer]
        tokens = TurnTokens.model_construct(
            prompt_ids=prompt, completion_ids=answer, completion_logprobs=[-0.5] * len(answer), message_spans=spans
        )
        response = Response.model_construct(
            id="r", created=0, model="policy", message=messages[call.answer], finish_reason="stop", tokens=tokens
        )
        made.append(([messages[place] for place in call.prompt], response))
    return made


def prepare(run: History) -> Work:
    """Return what builds the graph of the run."""
    turns = turns_of(run)

    def work() -> Mapping[str, Any]:
        trace = Trace(task=TraceTask(type="Bench", data=TaskData()), agent=AgentInfo(config=AgentConfig()))
        for prompt, response in turns:
            prepare_turn(trace, prompt).commit(response)
        return {"unique": sum(len(node.token_ids) for node in trace.nodes)}

    return work


if __name__ == "__main__":
    serve(prepare)
