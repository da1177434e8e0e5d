"""Incremental text: deltas join to the whole decoding, and stops end text, tokens and logprobs at one token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.text import ChoiceText, Delta, Detokenizer, StopStrings, Vocabulary
from core.types import Event, InvalidRequest, SamplingParams, TokenLogprob
from tests.serve.tiny_tokenizers import EOS, WORDS, byte_tokenizer, word_tokenizer

BYTES = byte_tokenizer()
SPM = word_tokenizer()
KE = tuple(len(WORDS) + 1 + byte for byte in "客".encode())


def run(params: SamplingParams, tokens: list[int], groups: list[int], finish: str = "length", prompt=()) -> list[Delta]:
    """Feed `tokens` in events of the sizes in `groups`, over and over."""
    choice = ChoiceText(BYTES, prompt, params)
    deltas, place, turn = [], 0, 0
    while place < len(tokens):
        part = tokens[place : place + groups[turn % len(groups)]]
        place, turn = place + len(part), turn + 1
        reason = finish if place >= len(tokens) else None
        stop_token = tokens[-1] if reason == "stop" else None
        records = tuple(TokenLogprob(token, -1.0) for token in part)
        event = Event("r", 0, tuple(part), records, finish_reason=reason, stop_token=stop_token)
        deltas.append(choice.push(event))
    return deltas


def joined(deltas: list[Delta]) -> Delta:
    whole = Delta()
    for delta in deltas:
        if delta.finish_reason is not None or whole.finish_reason is None:
            whole.join(delta)
    return whole


def decode_as_one(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["🌶ď客", "naïve ☃", "a\u0000b\uffff", "👩‍👩‍👧"])
def test_a_character_split_over_tokens_comes_out_whole(text):
    detokenizer = Detokenizer(BYTES)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert [p for p in pieces if p] == list(text)


def test_an_end_inside_a_character_is_one_replacement():
    detokenizer = Detokenizer(BYTES)
    tokens = list("a🌶".encode())[:-1]
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == decode_as_one(BYTES, tokens) == "a\ufffd"


@given(st.lists(st.integers(0, 257), max_size=40), st.lists(st.integers(0, 257), max_size=4))
def test_deltas_join_to_the_whole_decoding_of_any_bytes(tokens, prompt):
    prompt = [*prompt, *b"ok"]
    detokenizer = Detokenizer(BYTES, prompt)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == decode_as_one(BYTES, prompt + tokens)[len(decode_as_one(BYTES, prompt)) :]
    text.encode()


@given(st.lists(st.sampled_from([*((word,) for word in range(1, len(WORDS) + 1)), KE]), max_size=30))
def test_marked_spaces_survive_between_deltas(pieces):
    tokens = [token for piece in pieces for token in piece]
    prompt = [1, 2]
    detokenizer = Detokenizer(SPM, prompt)
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == decode_as_one(SPM, prompt + tokens)[len(decode_as_one(SPM, prompt)) :]


def test_output_that_completes_the_prompts_last_character_shows_it():
    chilli = list("🌶".encode())
    detokenizer = Detokenizer(BYTES, [*b"hot ", *chilli[:2]])
    assert "".join(detokenizer.push(token) for token in chilli[2:]) == "🌶"


@given(
    st.text("ab.", max_size=40),
    st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_stops_end_where_a_plain_search_says(text, stops, groups):
    """The reference: the shortest prefix of the text that ends in a stop, cut by the longest such stop."""
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    end = ends[0] if ends else len(text)
    cut = max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0) if ends else 0
    deltas = run(SamplingParams(stop=tuple(stops)), list(text.encode()), groups)
    whole = joined(deltas)
    assert whole.text == text[: end - cut]
    if text:
        assert whole.finish_reason == ("stop" if ends else "length")
        assert len(whole.tokens) == len(whole.logprobs) == len(whole.offsets) == end
    released = ""
    for delta in deltas:
        released += delta.text
        assert whole.text.startswith(released)


def test_text_that_never_becomes_a_stop_is_all_sent():
    deltas = run(SamplingParams(stop=("world§",)), list(b"hello world"), [1])
    assert joined(deltas).text == "hello world"
    assert deltas[-1].text == "world"


def test_nothing_is_held_back_longer_than_needed():
    stops = StopStrings(("abc",))
    assert stops.push("xab") == ("x", False)
    assert stops.push("x") == ("abx", False)
    assert stops.push("ab") == ("", False)
    assert stops.flush() == "ab"


def test_a_stop_before_min_tokens_is_text():
    deltas = run(SamplingParams(stop=("b",), min_tokens=4), list(b"abcabc"), [1])
    assert joined(deltas).text == "abca"
    assert len(joined(deltas).tokens) == 5


def test_a_stop_in_the_middle_of_a_block_ends_at_its_token():
    (delta,) = run(SamplingParams(stop=("lo",)), list(b"hello you"), [9])
    assert (delta.text, bytes(delta.tokens), delta.finish_reason) == ("hel", b"hello", "stop")
    assert len(delta.logprobs) == 5


def test_a_stop_token_is_kept_in_tokens_and_not_in_text():
    deltas = run(SamplingParams(stop_token_ids=(ord("d"),)), list(b"abcd"), [2], finish="stop")
    assert joined(deltas).text == "abc"
    assert bytes(joined(deltas).tokens) == b"abcd"
    deltas = run(SamplingParams(stop=("cx",)), [*b"abc", EOS], [1], finish="stop")
    assert joined(deltas).text == "abc"
    assert len(joined(deltas).tokens) == 4


def test_offsets_count_characters_not_tokens():
    (delta,) = run(SamplingParams(), list("é!🌶".encode()), [10])
    assert delta.offsets == [0, 0, 1, 2, 2, 2, 2]


def test_nothing_comes_after_the_end():
    choice = ChoiceText(BYTES, (), SamplingParams(stop=("b",)))
    choice.push(Event("r", 0, tuple(b"abc")))
    assert choice.push(Event("r", 0, tuple(b"def"), finish_reason="length")) == Delta()
    assert choice.num_tokens == 2


def test_a_very_long_stop_is_refused():
    with pytest.raises(InvalidRequest, match="1024") as error:
        ChoiceText(BYTES, (), SamplingParams(stop=("x" * 1025,)))
    assert error.value.param == "stop"


def test_token_bytes_join_to_the_text():
    vocabulary = Vocabulary(BYTES)
    assert b"".join(vocabulary.bytes(token) for token in "é🌶 x".encode()).decode() == "é🌶 x"
    assert vocabulary.string(0xC3) == "\\xc3"
    assert vocabulary.string(EOS) == "<eos>"
    assert vocabulary.special(EOS)
    assert not vocabulary.special(65)
    assert vocabulary.size == 258
    words = Vocabulary(SPM)
    assert [words.string(token) for token in (1, 5, 10 + 0x41)] == [" Hello", "!", "A"]
    assert words.bytes(10 + 0xE5) == b"\xe5"
