"""Text of sampled tokens: nothing lost, nothing shown that a stop string takes back, work linear in the tokens."""

from __future__ import annotations

from itertools import accumulate

import pytest
from answers_kit import CUTS, RELAXED, Vocabulary, added, parser, streamed, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from proxy_toy import Toy
from tokenizers import Tokenizer, decoders, models

from gyre_sdk.harness.proxy.answers import Format, make_parser
from gyre_sdk.harness.proxy.answers.detokenize import Detokenizer, Pieces
from gyre_sdk.harness.proxy.dialects.canonical import Answer, Part, ToolChoice

STOPS = ["STOP", "aab", "ab", "é😀", "\n\n", "aa"]
LETTERS = st.lists(st.sampled_from(["a", "b", "S", "ST", "STOP", "TOP", "é", "😀", "\n", " x"]), max_size=20).map(
    "".join
)


def text_of(ids: list[int], vocab: Vocabulary) -> str:
    """Detokenize one by one."""
    made = Detokenizer(Pieces(vocab))
    return "".join([*(made.feed(token) for token in ids), made.finish()])


@RELAXED
@given(data=st.data())
@pytest.mark.parametrize("name", ["small", "qwen3"])
def test_any_ids_give_their_own_text(name: str, data: st.DataObject) -> None:
    """Bytes of any kind, whole characters or not."""
    vocab = vocabulary(name)
    halves = vocab.encode("😀é日")
    ids = data.draw(st.lists(st.integers(0, vocab.tokenizer.get_vocab_size() - 1) | st.sampled_from(halves)))
    assert text_of(ids, vocab) == vocab.decode(ids)


@RELAXED
@given(data=st.binary(max_size=40))
def test_any_bytes_give_their_own_text(data: bytes) -> None:
    vocab = vocabulary("small")
    letters = {vocab.tokenizer.id_to_token(token): token for token in range(256)}
    alphabet = [letters[letter] for letter in _alphabet()]
    ids = [alphabet[byte] for byte in data]
    assert text_of(ids, vocab) == data.decode("utf-8", "replace")


def _alphabet() -> list[str]:
    """The letters that stand for bytes 0..255 in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(rest)) for byte in range(256)]


def test_a_character_waits_for_its_last_byte() -> None:
    vocab = vocabulary("small")
    made = Detokenizer(Pieces(vocab))
    assert [made.feed(token) for token in vocab.encode("é😀")] == ["", "é", "", "", "", "😀"]


def test_spaces_that_depend_on_the_place_are_kept() -> None:
    """A vocabulary whose decoder drops the space before the first word only."""
    words = {"▁a": 0, "▁b": 1, "c": 2, "▁": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="c"))
    tokenizer.decoder = decoders.Metaspace()
    vocab = Vocabulary(tokenizer)
    for ids in ([0, 1, 2, 0], [3, 3, 0, 1], [2, 3, 1, 1]):
        assert text_of(ids, vocab) == vocab.decode(ids)


def test_characters_made_of_byte_tokens_are_whole() -> None:
    """A vocabulary with byte fallback, whose decoder shows each byte of half a character by itself."""
    letters = {"x": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="x"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    vocab = Vocabulary(tokenizer)
    ids = [0, *(byte + 1 for byte in "😀é€😀".encode()), 0]
    assert text_of(ids, vocab) == vocab.decode(ids) == "x😀é€😀x"


@pytest.mark.parametrize(("text", "stop"), [("xaaab", "aab"), ("xababac", "abac"), ("xaabaabaaa", "aabaaa")])
def test_a_stop_string_may_begin_inside_its_own_beginning(text: str, stop: str) -> None:
    vocab = vocabulary("small")
    made = parser(vocab, stops=[stop])
    assert added(streamed(made, vocab.encode(text), range(len(text)), stop)) == Answer(text[: text.index(stop)])
    assert made.settled == text.index(stop)


def naive(text: str, stops: list[str]) -> int:
    """Where the text begins that is, or may become, a stop string."""
    places = [text.find(stop) for stop in stops if stop in text]
    places += [at for at in range(len(text)) for stop in stops if stop.startswith(text[at:])]
    return min(places, default=len(text))


@RELAXED
@given(text=LETTERS, stops=st.lists(st.sampled_from(STOPS), max_size=3), cuts=CUTS, think=st.booleans())
@pytest.mark.parametrize("name", ["small", "qwen3"])
def test_nothing_of_a_stop_string_is_shown(
    name: str, text: str, stops: list[str], cuts: list[int], think: bool
) -> None:
    """Against a plain search: what is shown while sampling, what is settled, what remains at the end."""
    vocab = vocabulary(name)
    prompt = "<|im_start|>assistant\n" + "<think>" * think
    part = Part.REASONING if think else Part.CONTENT
    ids = vocab.encode(text)
    made, shown = parser(vocab, prompt=prompt, stops=stops), ""
    for count, token in enumerate(ids, 1):
        shown += "".join(delta.text for delta in made.feed([token]) if delta.part is part)
        sofar = vocab.decode(ids[:count]).rstrip("\ufffd")
        safe = naive(sofar, stops)
        ends = [vocab.decode(ids[:end]) for end in range(1, count + 1)]
        whole = [end for end, seen in enumerate(ends, 1) if "\ufffd" not in seen and len(seen) <= safe]
        assert made.settled == max(whole, default=0)
        assert sofar[:safe].strip().startswith(shown)
    for stop in [None, *stops]:
        made = parser(vocab, prompt=prompt, stops=stops)
        rest = added(streamed(made, ids, cuts, stop))
        kept = text.partition(stop)[0] if stop else text
        assert rest == (Answer("", kept.strip()) if think else Answer(kept.strip()))


def test_a_stop_string_ends_arguments_too() -> None:
    vocab = vocabulary("small")
    text = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls STOP"}}'
    made = parser(vocab, stops=["STOP"])
    shown = added(streamed(made, vocab.encode(text), range(len(text)), "STOP"))
    assert [call.arguments for call in shown.tool_calls] == ['{"cmd": "ls ']


def test_special_tokens_do_not_hide_a_stop_string() -> None:
    """The engine looks for it in the text without special tokens; the agent's text has them."""
    vocab = vocabulary("small")
    ids = vocab.encode("one S<|im_start|>TOP two")
    made = parser(vocab, stops=["STOP"])
    assert added(streamed(made, ids, range(len(ids)), "STOP")) == Answer("one")
    assert made.settled == len("one ")
    assert added(streamed(parser(vocab), ids, ())) == Answer("one S<|im_start|>TOP two")


def test_a_stop_token_ends_the_text() -> None:
    vocab = vocabulary("small")
    ids = vocab.encode("one<|im_end|>\n<|im_start|>user")
    made = parser(vocab)
    assert added(streamed(made, ids, range(len(ids)))) == Answer("one")
    assert made.settled == len(ids)


def test_half_a_character_at_the_end_shows_once() -> None:
    vocab = vocabulary("small")
    ids = vocab.encode("x😀")[:-1]
    made = parser(vocab)
    shown = [made.feed([token]) for token in ids]
    assert [len(deltas) for deltas in shown] == [1, 0, 0, 0]
    assert made.settled == 1
    assert added([*shown[0], *made.finish()]) == Answer("x\ufffd")


def test_the_toy_is_read_too() -> None:
    toy = Toy({"<think>": 300})
    format = Format(frozenset({260}), turn="<|assistant|>")
    made = make_parser(
        toy, format=format, prompt_tail=[259], tools=(), name="", stops=(), choice=ToolChoice.AUTO, parallel=True
    )
    assert added(streamed(made, [300, *toy.encode("é</think>b"), 260], range(20))) == Answer("b", "é")


ALLOWED = 12
"""Tokens and characters decoded, for each token of the answer."""
HARD = {
    "prose": "The quick brown fox. ",
    "characters": "日本語😀",
    "white space": " \n",
    "open tags": "<tool_call>",
    "open objects": '<tool_call>{"',
    "starts of stop strings": "STOSTO",
    "tags of parameters": "<tool_call><function=f><parameter=",
    "thinking": "<think>",
}


@pytest.mark.parametrize("text", HARD.values(), ids=HARD)
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_work_is_linear(family: str, text: str) -> None:
    """However often a text repeats what could begin something, each token is decoded a few times."""
    vocab = Vocabulary(vocabulary("small").tokenizer)
    ids = (vocab.encode(text) * 20_000)[:20_000]
    made = parser(vocab, family, stops=["STOP"])
    vocab.decoded = 0
    deltas = streamed(made, ids, range(len(ids)))
    assert vocab.decoded <= ALLOWED * len(ids)
    assert added(deltas) == made.answer


def test_invalid_bytes_are_linear() -> None:
    vocab = Vocabulary(vocabulary("small").tokenizer)
    token = vocab.tokenizer.token_to_id(_alphabet()[0xE2])
    made = Detokenizer(Pieces(vocab))
    counts = list(accumulate(len(made.feed(token)) for _ in range(20_000)))
    assert counts[-1] >= 19_990
    assert vocab.decoded <= 40 * 20_000
