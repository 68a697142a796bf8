"""Answers that continue the assistant's own text, sent back in other pieces: the recorded run where they are its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocols_kit import read, send
from proxy_engine import Finish, ScriptedEngine, Tokens, say
from proxy_kit import running
from proxy_toy import toy_template
from test_fidelity_cases import check_path, scripted

from gyre_sdk.harness.proxy.dialects.canonical import Message
from gyre_sdk.harness.proxy.dialects.history import History

PIECES = {"hi": 300, "wa": 301, "ter": 302, "water": 303, "go": 304, "fall": 305}
USER, GO = {"role": "user", "content": "hi"}, {"role": "user", "content": "go"}
ASKED = [257, 300, 260, 10, 258]
"""`hi` and the opening of the model's turn."""
NEXT = [10, 257, 304, 260, 10, 258]
"""What follows an answer that has ended: `go`, and the opening of the model's turn."""


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def body(*messages: dict[str, Any], begun: bool = False) -> dict[str, Any]:
    more = {"continue_final_message": True, "add_generation_prompt": False} if begun else {}
    return {"model": "policy", "max_tokens": 16, "messages": list(messages), **more}


@pytest.mark.parametrize("sent", [["wa", "ter"], ["water"], ["wa\nter"]])
def test_a_prefill_and_its_answer(model: Path, tmp_path: Path, sent: list[str]) -> None:
    """Two messages, one, or one of two parts: the ids that were sampled go on, also after a restart."""
    with ScriptedEngine(lambda request, number: say(302, 260)) as engine:
        for restarted in (False, True):
            with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
                access = access if restarted else proxy.run()  # noqa: F821
                if not restarted:
                    send(proxy, access, "chat", body(USER, said("wa"), begun=True)).raise_for_status()
                send(proxy, access, "chat", body(USER, *map(said, sent), GO)).raise_for_status()
                calls = proxy.calls()
        with proxy.journal() as journal:
            exchanges = list(journal.exchanges(access["run"]))
    check_path(calls, engine)
    assert [call.prompt_ids for call in calls] == [[*ASKED, 301], *[[*ASKED, 301, 302, 260, *NEXT]] * 2]
    assert [(call.parent, call.fork_reason) for call in calls] == [(None, None), *[(calls[0].call, None)] * 2]
    assert [item["content"] for item in exchanges[1].messages] == ["hi", "water", "go"]
    assert [item["content"] for item in exchanges[1].raw] == ["hi", *sent, "go"]


@pytest.mark.parametrize("sent", [["wa", "ter"], ["water"]])
def test_a_message_and_the_one_sampled_behind_it(model: Path, tmp_path: Path, sent: list[str]) -> None:
    """Where the text was shown as a turn of its own, that is what was sampled from, so that is what goes on."""
    with scripted(model, tmp_path, PIECES, say(302, 260)) as (proxy, engine):
        access = proxy.run()
        send(proxy, access, "chat", body(USER, said("wa"))).raise_for_status()
        send(proxy, access, "chat", body(USER, *map(said, sent), GO)).raise_for_status()
        calls = proxy.calls()
    check_path(calls, engine)
    assert calls[0].prompt_ids == [*ASKED, 301, 260, 10, 258]
    assert calls[1].prompt_ids == [*calls[0].prompt_ids, 302, 260, *NEXT]
    assert (calls[1].parent, calls[1].fork_reason) == (calls[0].call, None)


OTHERS = [["w", "ater"], ["wat", "er"], ["wa ter"], ["wa", "\nter"], ["ter", "wa"], ["", "water"]]


@pytest.mark.parametrize("begun", [True, False])
def test_what_differs_is_no_match(model: Path, tmp_path: Path, begun: bool) -> None:
    """Text that was cut elsewhere, or has anything more or less in it, is the agent's own: a fork."""
    with scripted(model, tmp_path, PIECES, say(302, 260)) as (proxy, _):
        for sent in OTHERS:
            access = proxy.run()
            send(proxy, access, "chat", body(USER, said("wa"), begun=begun)).raise_for_status()
            send(proxy, access, "chat", body(USER, *map(said, sent), GO)).raise_for_status()
            first, second = proxy.calls(access["run"])
            whole = first.prompt_ids + first.sampled_ids
            assert second.fork_reason is not None and second.prompt_ids[: len(whole)] != whole


@pytest.mark.parametrize("protocol", ["chat", "messages"])
@pytest.mark.parametrize("pieces", [["wa", "ter", "fall", "go"], ["water", "fall", "go"], ["waterfallgo"]])
def test_an_answer_cut_off_again_and_again(model: Path, tmp_path: Path, protocol: str, pieces: list[str]) -> None:
    """Each part is sampled from the ids of those before, and kept as a message of its own, or not."""
    cut = [[Tokens([number]), Finish("length")] for number in (302, 305)]
    with scripted(model, tmp_path, PIECES, *cut, say(304, 260), say(300, 260)) as (proxy, engine):
        access, talk = proxy.run(), [said("wa")]
        for _ in range(3):
            request = body(USER, *talk, begun=protocol == "chat")
            talk.append(said(read(protocol, send(proxy, access, protocol, request)).text))
        again = send(proxy, access, protocol, request, **{"x-stainless-retry-count": "1"})
        assert read(protocol, again).text == "go"
        send(proxy, access, protocol, body(USER, *map(said, pieces), GO)).raise_for_status()
        calls = proxy.calls()
        with proxy.journal() as journal:
            answers = [item.answer["content"] for item in journal.exchanges(access["run"]) if item.answer]
    check_path(calls, engine)
    assert [item["content"] for item in talk] == ["wa", "ter", "fall", "go"]
    assert answers[:3] == ["water", "waterfall", "waterfallgo"]
    assert calls[3].prompt_ids == [*ASKED, 301, 302, 305, 304, 260, *NEXT]
    assert [call.parent for call in calls[1:]] == [call.call for call in calls[:3]]
    assert [call.fork_reason for call in calls] == [None] * 4


def test_a_retry_of_pieces_after_a_restart(model: Path, tmp_path: Path) -> None:
    """The agent gets what it was told before, though its prefill is on record in another form."""
    play = [[Tokens([302]), Finish("length")], say(305, 260)]
    with ScriptedEngine(lambda request, number: play[number - 1]) as engine:
        with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
            access = proxy.run()
            send(proxy, access, "chat", body(USER, said("wa"), begun=True)).raise_for_status()
            request = body(USER, said("wa"), said("ter"), begun=True)
            assert read("chat", send(proxy, access, "chat", request)).text == "fall"
        with running(model, tmp_path / "store.db", engine.url, template=toy_template(PIECES)) as proxy:
            again = send(proxy, access, "chat", request, **{"x-stainless-retry-count": "1"})
            assert read("chat", again).text == "fall"
        assert len(engine.log) == 2


def test_prompts_as_the_template_writes_them(model: Path, tmp_path: Path) -> None:
    """Under `as_template` the model is shown the messages that the agent sent, divided as it sent them."""
    with ScriptedEngine(lambda request, number: say(302, 260)) as engine:
        options: dict[str, Any] = {"template": toy_template(PIECES), "history": "as_template"}
        with running(model, tmp_path / "store.db", engine.url, **options) as proxy:
            access = proxy.run()
            send(proxy, access, "chat", body(USER, said("wa"))).raise_for_status()
            send(proxy, access, "chat", body(USER, said("water"), GO)).raise_for_status()
            calls = proxy.calls()
    assert calls[1].prompt_ids == [*ASKED, 303, 260, *NEXT] and calls[1].fork_reason is not None


TEXTS = st.text("ab\n", min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(TEXTS, TEXTS, st.lists(st.text("ab\n", max_size=4), min_size=1, max_size=3))
def test_only_the_recorded_text_matches(prefill: str, rest: str, sent: list[str]) -> None:
    """Whatever is sent: it matches as one message, as two cut at the prefill, or with the line feed of blocks."""
    history, user = History(), Message("user", "u")
    history.add("c", "l", [], [user], Message("assistant", prefill + rest), [1], [2], None, 0, prefill=prefill)
    match = history.match("l", [], [user, *(Message("assistant", text) for text in sent), Message("user", "v")])
    wanted = sent in ([prefill + rest], [prefill, rest], [f"{prefill}\n{rest}"])
    longest = match.recorded is not None and match.consumed == len(match.messages) - 1
    assert longest == wanted
    if wanted:
        assert [item.content for item in match.messages] == ["u", prefill + rest, "v"]
