"""Any model's own chat template, over real vocabularies: as the reference renders it, and exact over whole histories."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary_kit import histories, vocabulary

from gyre_sdk.errors import RenderError
from gyre_sdk.harness.proxy.dialects.canonical import Message, ToolCall
from gyre_sdk.harness.proxy.dialects.history import History
from gyre_sdk.harness.proxy.render import Template, load_template
from gyre_sdk.harness.proxy.render.template import _wire
from gyre_sdk.records import ForkReason

NAMES = ["qwen3", "deepseek_v3", "mistral_nemo", "llama3_1"]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "bash", "description": "run", "parameters": {"type": "object", "properties": {}}},
}
SYSTEM, USER, GO = Message("system", "Be brief."), Message("user", "hi"), Message("user", "go")


@functools.cache
def own(name: str, retention: str = "all") -> Template:
    return load_template(vocabulary(name), "template", {"thinking_retention": retention})


@functools.cache
def reference(name: str) -> Any:
    """The tokenizer class that these templates are written for."""
    transformers = pytest.importorskip("transformers")
    folder = vocabulary(name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        named |= {key: text} if text else {}
    made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **named)
    made.chat_template = config["chat_template"]
    return made


def reference_ids(name: str, messages: list[Message], tools: list[Any]) -> list[int]:
    template = own(name).renderer
    from gyre_sdk.harness.proxy.render.chat_template import _styled

    wires = list(_styled([_wire(message) for message in messages], template.style))
    ids = reference(name).apply_chat_template(
        wires, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return list(ids)


def bridge(
    template: Template, prompt: list[int], sampled: list[int], new: list[Message], past: list[Message], tools: Any = ()
) -> list[int] | None:
    whole = np.array(prompt + sampled, dtype=np.int32)
    found = template.bridge(whole, len(prompt), new, list(tools), past)
    if found is None:
        return None
    assert np.array_equal(found[: len(whole)], whole)
    return found[len(whole) :].tolist()


# -- as the reference ------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "",
        " ",
        "\n",
        "\n\n",
        "\t",
        "a",
        "Hello world",
        "naïve",
        "北京",
        "🙂",
        "e\u0301",
        "12345",
        "  x  ",
        "{",
        '"',
        "\\",
        "</",
        "\u200d",
    ]
)
TEXTS = st.lists(PIECES | st.text(st.characters(codec="utf-8"), max_size=5), max_size=5).map("".join)
VALUES = st.dictionaries(
    st.sampled_from(["a", "b"]), st.text(st.characters(codec="utf-8"), max_size=4) | st.integers(), max_size=2
)


@st.composite
def talks(draw: st.DrawFn, calls: bool) -> list[Message]:
    """A system message or none, then rounds of a question, calls with results, and an answer; a question at the end."""
    done = [Message("system", draw(TEXTS))] if draw(st.booleans()) else []
    for number in range(draw(st.integers(0, 2))):
        done.append(Message("user", draw(TEXTS)))
        if calls and draw(st.booleans()):
            made = tuple(
                ToolCall(f"call_{number}{place}", "bash", json.dumps(draw(VALUES)))
                for place in range(draw(st.integers(1, 2)))
            )
            done.append(Message("assistant", "", tool_calls=made))
            done += [Message("tool", draw(TEXTS), tool_call_id=call.id) for call in made]
        done.append(Message("assistant", draw(TEXTS) or "."))
    return [*done, Message("user", draw(TEXTS))]


def plain(template: Template, messages: list[Message]) -> bool:
    codec = template.renderer.codec
    return not any(codec.control_in(message.content) for message in messages)


@pytest.mark.parametrize("name", NAMES)
def test_renders_as_the_reference(name: str) -> None:
    """The same ids for the same messages, white space, unicode and calls included."""
    template = own(name)
    reference(name)
    calls = template.renderer.shows_calls and template.renderer.style.empty is not None  # it leaves null content out

    @settings(max_examples=60, deadline=None)
    @given(talks(calls=calls), st.booleans())
    def run(messages: list[Message], tooled: bool) -> None:
        tools = [TOOL] if tooled and template.renderer.shows_tools else []
        if plain(template, messages):
            assert template.render(messages, tools) == reference_ids(name, messages, tools)

    run()


@pytest.mark.parametrize("name", NAMES)
def test_text_never_becomes_a_control_token(name: str) -> None:
    """Any control token's text in any message: the same text, and no control token more than without it."""
    template = own(name)
    codec = template.renderer.codec
    named = sorted(codec.control, key=codec.control.get)[:40]
    control = np.array(sorted(codec.control.values()))
    role = st.sampled_from(["user", "system"] if not template.renderer.shows_calls else ["user", "system", "tool"])

    def count(ids: list[int]) -> int:
        return int(np.isin(ids, control).sum())

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(named) | PIECES, min_size=1, max_size=5).map("".join), role)
    def run(text: str, role: str) -> None:
        def talk(content: str) -> list[Message]:
            if role == "system":
                return [Message("system", content), USER]
            if role == "user":
                return [Message("user", content)]
            said = Message("assistant", tool_calls=(ToolCall("call_0", "bash", "{}"),))
            return [USER, said, Message("tool", content, tool_call_id="call_0")]

        ids = template.render(talk(f"x{text}x"), [])
        assert count(ids) == count(template.render(talk("xx"), []))
        assert codec.same(template.renderer.show([_wire(m) for m in talk(f"x{text}x")], [], opened=True).text, ids)

    run()


def test_a_control_token_that_the_template_rewrites_is_refused(tmp_path: Any) -> None:
    """Where nobody can tell what came from a message, nothing is sent."""
    folder = vocabulary("qwen3")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    source = "{% for m in messages %}<|im_start|>{{ m.content | upper | lower }}<|im_end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "chat_template.jinja").write_text(source)
    template = load_template(tmp_path, "template")
    assert template.text(template.render([Message("user", "A")], [])) == "<|im_start|>a<|im_end|>"
    text = template.text(template.render([Message("user", "A<|im_end|>")], []))
    assert text == "<|im_start|>a<|im_end|><|im_end|>"
    (tmp_path / "chat_template.jinja").write_text(
        source.replace("upper | lower", "replace('_', '-') | replace('\ue000', '')")
    )
    with pytest.raises(RenderError, match=r"control token|cannot be followed"):
        load_template(tmp_path, "template").render([Message("user", "A<|im_end|>")], [])


def test_added_tokens_that_are_plain_words_stay_words(tmp_path: Any) -> None:
    """A domain's own vocabulary may hold words that any template's source holds too."""
    folder = vocabulary("qwen3")
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    more = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    last = max(token["id"] for token in tokenizer["added_tokens"])
    tokenizer["added_tokens"] += [
        {"id": last + 1, "content": " in ", **more},
        {"id": last + 2, "content": " endfor", **more},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    )
    template = load_template(tmp_path, "template")
    ids = template.render([Message("user", "the last endfor in here")], [])
    assert {last + 1, last + 2} <= set(ids)
    assert template.text(ids) == "<|im_start|>the last endfor in here<|im_end|>"


# -- which renderer ----------------------------------------------------------------------------------------------------


def test_a_family_is_taken_where_it_writes_the_same() -> None:
    assert type(load_template(vocabulary("qwen3")).renderer).__name__ == "Qwen3Renderer"
    for name in NAMES[1:]:
        assert type(load_template(vocabulary(name)).renderer).__name__ == "ChatTemplate"


@pytest.mark.parametrize("name", ["deepseek_v3", "llama3_1"])
def test_tools_that_the_template_does_not_show_are_refused(name: str) -> None:
    with pytest.raises(RenderError, match="shows no tools; name a `renderer`"):
        own(name).render([USER], [TOOL])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", 'ok\n<tool_call>\n{"name": "bash", "arguments": {"c":  "</tool_call>"}}\n</tool_call><|im_end|>'),
        ("mistral_nemo", 'ok[TOOL_CALLS][{"name": "bash", "arguments": {"c":  "</tool_call>"}}]</s>'),
        (
            "deepseek_v3",
            "ok<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n"
            '{"c":  "</tool_call>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        ),
    ],
)
def test_calls_are_read_as_the_template_writes_them(name: str, text: str) -> None:
    template = own(name)
    answer = template.parse(template.renderer.codec.encode(text), [], name="x")
    assert answer.content == "ok"
    assert answer.tool_calls == (ToolCall("call_x0", "bash", '{"c":  "</tool_call>"}'),)


# -- bridges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_bridge_is_what_the_template_writes(name: str) -> None:
    """Over the template's own closed turn, the bridged ids are the ids of the whole conversation."""
    template = own(name)

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, st.sampled_from(["water", "x", "北"]), TEXTS)
    def run(ask: str, answer: str, more: str) -> None:
        said = Message("assistant", answer)
        first, new = Message("user", ask), Message("user", more)
        if not plain(template, [first, new]):
            return
        prompt = template.render([first], [])
        sampled = [*template.renderer.codec.encode(answer, first=False), template.stop_ids[0]]
        rest = bridge(template, prompt, sampled, [new], [first, said])
        assert rest is not None
        assert prompt + sampled + rest == template.render([first, said, new], [])
        cut = bridge(template, prompt, sampled[:-1], [new], [first, said])
        assert cut == [template.stop_ids[0], *rest]

    run()


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no-tools", "tools"])
def test_the_difference_is_the_family_bridge(tools: list[Any]) -> None:
    """Two independent ways to the same ids: Qwen3's renderer, and the difference over Qwen3's own template."""
    family = load_template(vocabulary("qwen3"), "qwen3", {"thinking_retention": "all"})
    template = own("qwen3")
    call = ToolCall("call_0", "bash", '{"a": 1}')
    said = [
        Message("assistant", "ok"),
        Message("assistant", "", tool_calls=(call,)),
        Message("assistant", "a", tool_calls=(call,) * 2),
    ]
    results = [Message("tool", "A<|im_end|>", tool_call_id="call_0"), Message("tool", "B", tool_call_id="call_0")]
    for past in (said[0], said[1], said[2]):
        for new in ([GO], [results[0]], results, [results[0], GO], [Message("system", "late"), GO]):
            for end in ([family.stop_ids[0]], []):
                for opening in ([USER], [SYSTEM, USER]):
                    prompt = family.render(opening, tools)
                    ids = [*family.tokenizer.encode("water"), *end]
                    want = bridge(family, prompt, ids, new, [*opening, past], tools)
                    assert bridge(template, prompt, ids, new, [*opening, past], tools) == want


def test_a_template_that_moves_things_is_not_bridged() -> None:
    """Mistral shows tools and the system message in the last user turn: what stands before would change."""
    template, said = own("mistral_nemo"), Message("assistant", "ok")
    end = list(template.stop_ids[:1])
    for opening, tools in (([USER], [TOOL]), ([SYSTEM, USER], [])):
        assert bridge(template, template.render(opening, tools), end, [GO], [*opening, said], tools) is None
    calls = Message("assistant", tool_calls=(ToolCall("call_0", "bash", "{}"),))
    result = Message("tool", "A", tool_call_id="call_0")
    assert bridge(template, template.render([USER], [TOOL]), end, [result], [USER, calls], [TOOL]) is not None


def test_a_stop_token_that_opens_the_next_turn_is_not_doubled(tmp_path: Any) -> None:
    """Templates without a token that closes a turn: the stop sampled is the next turn's first token (miles#784)."""
    folder = vocabulary("qwen3")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    opener = {"user": "<|im_start|>", "assistant": "<|object_ref_start|>", "tool": "<|box_start|>"}
    source = "{% set o = OPENER %}{% for m in messages %}{{ o[m.role] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ o.assistant }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(source.replace("OPENER", json.dumps(opener)))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [151644, 151648]}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    template = load_template(tmp_path, "template", {"thinking_retention": "all"})
    user, tool = template.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|box_start|>"])
    prompt, said = template.render([USER], []), Message("assistant", "ok")
    word = template.tokenizer.encode("ok")
    for ids, want in ((word, "<|im_start|>go"), ([*word, user], "go")):
        rest = bridge(template, prompt, ids, [GO], [USER, said])
        assert rest is not None and template.text(rest) == want + "<|object_ref_start|>"
    assert bridge(template, prompt, [*word, tool], [GO], [USER, said]) is None
    rest = bridge(template, prompt, [*word, tool], [Message("tool", "A")], [USER, said])
    assert rest is not None and template.text(rest) == "A<|object_ref_start|>"


def test_thinking_that_the_template_drops() -> None:
    """history = as_template: a new question drops old thinking, so there is no bridge; a tool result keeps it."""
    think = "<think>\nplan\n</think>\n\nok<|im_end|>"
    call = Message("assistant", "", "plan", (ToolCall("call_0", "bash", "{}"),))
    result = Message("tool", "A", tool_call_id="call_0")
    for retention, want in (("all", True), ("template", False)):
        template = own("qwen3", retention)
        prompt, ids = template.render([USER], []), template.renderer.codec.encode(think)
        assert (bridge(template, prompt, ids, [GO], [USER, Message("assistant", "ok", "plan")]) is not None) == want
        assert bridge(template, prompt, ids, [result], [USER, call]) is not None
        assert bridge(template, prompt, ids[-2:], [GO], [USER, Message("assistant", "ok")]) is not None


@pytest.mark.parametrize("kind", ["family", "own"])
def test_words_put_into_the_models_mouth_are_context(kind: str) -> None:
    """An edited answer behind a recorded one: recorded ids verbatim, the agent's words as the template shows them."""
    template = load_template(
        vocabulary("qwen3"), "qwen3" if kind == "family" else "template", {"thinking_retention": "all"}
    )
    said, forged = Message("assistant", "ok"), Message("assistant", "forged")
    prompt = template.render([SYSTEM, USER], [])
    odd = [template.tokenizer.encode(letter)[0] for letter in "water"]
    rest = bridge(template, prompt, [*odd, template.stop_ids[0]], [GO, forged, USER], [SYSTEM, USER, said])
    assert rest is not None
    assert template.text(rest) == (
        "\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nforged<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_family_is_shown_the_end_of_a_prompt_only() -> None:
    """The bridge over a long prompt is the one that the family gives for all of it."""
    template = load_template(vocabulary("qwen3"), "qwen3", {"thinking_retention": "all"})
    past = [SYSTEM] + [
        Message(role, f"{role} {number} " * 30) for number in range(40) for role in ("user", "assistant")
    ]
    prompt = template.render([*past, USER], [])
    for text in ("ok<|im_end|>", "ok", "<think>\nplan", "<think>\nplan\n</think>\n\nok<|im_end|>"):
        sampled = own("qwen3").renderer.codec.encode(text)
        whole = template.renderer.bridge_to_next_turn(prompt, sampled, [_wire(GO)], tools=None)
        rest = bridge(template, prompt, sampled, [GO], [*past, USER, Message("assistant", "ok")])
        assert rest == (None if whole is None else list(whole.token_ids)[len(prompt) + len(sampled) :])


# -- whole histories -----------------------------------------------------------------------------------------------------


def sampled_for(template: Template, message: Message, odd: bool) -> list[int]:
    """Ids that a model may have sampled for an answer; `odd` cuts its text into letters where it can."""
    text = message.content
    for call in message.tool_calls:
        text += f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
    codec = template.renderer.codec if hasattr(template.renderer, "codec") else template.tokenizer
    head, tail = (text[:40], text[40:]) if odd else ("", text)
    return [token for piece in (*head, tail) for token in codec.encode(piece)] + [template.stop_ids[0]]


def shown(template: Template, messages: list[Message]) -> list[Message]:
    """Leave out what this template cannot show: its tests are above."""
    if template.difference is None or template.renderer.shows_both:
        return messages
    done: list[Message] = []
    for message in messages:
        if message.role == "tool" and not template.renderer.shows_calls:
            message = Message("user", message.content)
        if message.tool_calls:
            keep = () if message.content or not template.renderer.shows_calls else message.tool_calls
            message = Message("assistant", message.content or "...", tool_calls=keep)
        done.append(message)
    return done


@pytest.mark.parametrize("odd", [False, True], ids=["canonical", "odd"])
@pytest.mark.parametrize("name", ["qwen3-family", *NAMES])
def test_real_histories_stay_on_their_path(name: str, odd: bool) -> None:
    """Replayed turn by turn, every prompt extends the recorded path or forks with a reason; no text is lost or doubled."""
    if name == "qwen3-family":
        template = load_template(vocabulary("qwen3"), "qwen3", {"thinking_retention": "all"})
    else:
        template = own(name)
    talks = histories()
    if not talks:
        pytest.skip("data/histories is missing: real agent histories")
    calls = extended = 0
    for title, talk in talks:
        messages, history = shown(template, talk), History()
        for place, answer in enumerate(messages):
            if answer.role != "assistant":
                continue
            request = messages[:place]
            match = history.match("l", [], request)
            past, new = match.messages[: match.consumed], match.messages[match.consumed :]
            try:
                found = (
                    template.bridge(match.recorded.whole, match.recorded.prompt_len, new, [], past)
                    if match.recorded
                    else None
                )
                prompt = found if found is not None else np.array(template.render(match.messages, []), np.int32)
            except RenderError:
                break  # strict templates refuse some histories (roles that do not alternate): nothing is recorded
            origin = history.origin("l", [], request, match, prompt)
            calls += 1
            if calls and origin.parent is not None:
                if origin.fork is None:
                    extended += 1
                    assert np.array_equal(prompt[: origin.shared], origin.parent.whole), title
                    assert origin.shared == len(origin.parent.whole)
                else:
                    assert origin.fork in (ForkReason.TEMPLATE, ForkReason.RETRY), (title, origin.fork)
            in_order(template.text(prompt.tolist()), request, title)
            sampled = sampled_for(template, answer, odd)
            parent = origin.parent.call if origin.parent else None
            history.add(f"c{place}", "l", [], match.messages, answer, prompt, sampled, parent, origin.shared)
    assert calls > 20
    assert extended > 10 or name == "mistral_nemo"


def in_order(text: str, messages: list[Message], title: str) -> None:
    at = 0
    for message in messages:
        if message.role == "assistant":
            continue
        content = message.content.strip()
        if message.role == "system" or not content:
            continue
        found = text.find(content, at)
        assert found >= 0, (title, message.role, content[:80])
        at = found + len(content)
