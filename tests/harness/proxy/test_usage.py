"""What usage tells beside prompt and completion: the tokens of the thinking, in the fields of the protocols."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers_kit import CUTS, RELAXED, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from sdk_kit import GO, THINK, ids_of, talking

from gyre_sdk.harness.proxy.answers import WAYS, thinking_tokens

WORDS = st.text(st.sampled_from("ab é<\n"), max_size=8)


@RELAXED
@given(thought=WORDS, said=WORDS, cuts=CUTS, spelled=st.booleans())
def test_thinking_ends_with_its_tag(thought: str, said: str, cuts: object, spelled: bool) -> None:
    """The tag counts, be it one token or spelled in several."""
    vocab = vocabulary("small")
    text = f"{thought}</think>"
    before = [token for letter in text for token in vocab.encode(letter)] if spelled else vocab.encode(text)
    assert thinking_tokens(vocab, WAYS["hermes"], [*before, *vocab.encode(said)]) == len(before)


def test_thinking_without_an_end() -> None:
    """A tool call ends it, or the answer does."""
    vocab = vocabulary("small")
    thought = vocab.encode("<think>one")
    assert thinking_tokens(vocab, WAYS["hermes"], thought) == len(thought)
    called = [*thought, *vocab.encode("<tool_call>{}</tool_call>")]
    assert thinking_tokens(vocab, WAYS["hermes"], called) == len(thought)
    assert thinking_tokens(vocab, WAYS["llama"], called) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_usage_of_chat_and_responses(model: Path, tmp_path: Path, stream: bool) -> None:
    thought = len(ids_of(model, THINK.rstrip()))
    with talking(model, tmp_path, THINK + "go") as talk, talk.openai() as client:
        if stream:
            options = {"include_usage": True}
            *_, last = client.chat.completions.create(model="policy", messages=GO, stream=True, stream_options=options)
            chat = last.usage
            with client.responses.stream(model="policy", input="go") as events:
                response = events.get_final_response().usage
        else:
            chat = client.chat.completions.create(model="policy", messages=GO).usage
            response = client.responses.create(model="policy", input="go").usage
        calls = talk.calls()
    assert chat is not None and chat.completion_tokens_details is not None and response is not None
    assert chat.completion_tokens_details.reasoning_tokens == thought
    assert response.output_tokens_details.reasoning_tokens == thought
    assert chat.completion_tokens == response.output_tokens == len(calls[0].sampled_ids)
