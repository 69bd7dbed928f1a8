"""Incremental decoding and stop strings against decoding the whole output at once."""

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.detokenizer import incremental
from minisgl.detokenizer.incremental import incremental_decoder
from minisgl.detokenizer.stop import StopFilter
from minisgl.detokenizer.stream import TextStream
from minisgl.text import Tokenizer
from tests.unit.small_tokenizers import KINDS, byte_level, deep_strip, gemma, llama2, word_piece

made = cache(lambda kind: kind())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
some_ids = st.lists(st.integers(0, 10_000), max_size=60)


def ids_of(tokenizer: Tokenizer, drawn: list[int]) -> list[int]:
    """Ids of the vocabulary, and now and then one beyond it."""
    return [i % (tokenizer.vocab_size + 1) for i in drawn]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = incremental_decoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@each_kind
@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=some_ids)
def test_pieces_join_to_the_text_of_the_whole_output(kind: Any, drawn: list[int]) -> None:
    tokenizer = made(kind)
    ids = ids_of(tokenizer, drawn)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@each_kind
@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn=some_ids, byte=st.integers(0, 255), times=st.integers(1, 60))
def test_a_run_of_one_byte_in_the_middle_changes_nothing(
    kind: Any, drawn: list[int], byte: int, times: int
) -> None:
    tokenizer = made(kind)
    ids = ids_of(tokenizer, drawn)
    ids[len(ids) // 2 : len(ids) // 2] = [3 + byte % (tokenizer.vocab_size - 3)] * times
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=30), kind=st.sampled_from([byte_level, llama2, gemma]))
def test_a_text_never_shows_a_replacement_character_that_it_does_not_hold(
    text: str, kind: Any
) -> None:
    tokenizer = made(kind)
    given_out = pieces(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert "".join(given_out).count("\ufffd") <= text.count("\ufffd")


def test_a_strip_that_spans_tokens_is_done_once_and_not_in_each_window() -> None:
    tokenizer = made(deep_strip)
    ids = tokenizer.hf.convert_tokens_to_ids(["\u2581"] * 5 + ["a", "\u2581", "\u2581ab"])
    assert pieces(tokenizer, ids) == ["", "", "", " ", " ", "a", " ", " ab", ""]


def test_a_character_goes_out_with_its_last_byte_and_waits_for_no_space() -> None:
    tokenizer = made(byte_level)
    ids = [tokenizer.encode(c)[0] for c in "a"] + [
        tokenizer.hf.convert_tokens_to_ids(c) for c in "Ã©"
    ]
    assert pieces(tokenizer, ids) == ["a", "", "é", ""]


def test_a_first_byte_that_nothing_follows_is_flushed_as_one_replacement_character() -> None:
    tokenizer = made(byte_level)
    lead = tokenizer.hf.convert_tokens_to_ids("ð")
    assert pieces(tokenizer, [lead]) == ["", "\ufffd"]


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    tokenizer = made(gemma)
    run = [tokenizer.hf.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "é".encode()]
    after = tokenizer.hf.convert_tokens_to_ids("a")
    assert pieces(tokenizer, [*run, after]) == ["", "", "éa", ""]
    assert pieces(tokenizer, [*run, *run[:1], after]) == ["", "", "", "\ufffd\ufffd\ufffda", ""]


def test_words_of_a_wordpiece_vocabulary_go_out_at_once() -> None:
    tokenizer = made(word_piece)
    ids = tokenizer.hf.convert_tokens_to_ids(["ab", "##ing", "a"])
    assert pieces(tokenizer, ids) == ["ab", "ing", " a", ""]


@each_kind
def test_the_window_stays_small_whatever_comes(kind: Any) -> None:
    tokenizer = made(kind)
    for token_id in range(3, tokenizer.vocab_size, 7):
        decoder: Any = incremental_decoder(tokenizer)
        for _ in range(200):
            decoder.push(token_id)
        window = getattr(decoder, "_decoder", decoder)
        bound = 200 if token_id in tokenizer.byte_fallback_ids else incremental._WIDEST_WINDOW + 1
        assert len(getattr(window, "_ids", [])) <= bound


def test_a_run_of_byte_tokens_is_decoded_once_and_not_at_each_token() -> None:
    tokenizer = made(gemma)
    decoder: Any = incremental_decoder(tokenizer)
    calls: list[int] = []

    def counted(ids: list[int]) -> str:
        calls.append(len(ids))
        return tokenizer.decode_raw(ids)

    decoder._decode = counted
    byte, after = tokenizer.hf.convert_tokens_to_ids(["<0x41>", "a"])
    for token_id in [byte] * 500 + [after]:
        decoder.push(token_id)
    assert sum(calls) <= 501 + 2


# --- stop strings


def naive(text: str, stop: list[str]) -> tuple[str, bool]:
    found = [at for at in map(text.find, stop) if at >= 0]
    return (text[: min(found)], True) if found else (text, False)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


few_letters = st.text(alphabet="ab\0😀", max_size=40)
stops = st.lists(st.text(alphabet="ab\0😀", min_size=1, max_size=6), max_size=4)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(text=few_letters, stop=stops, cuts=st.lists(st.integers(0, 40), max_size=12))
def test_the_text_ends_before_the_first_stop_string_however_it_is_split(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    stop_filter = StopFilter(stop)
    want, hit = naive(text, stop)
    out = ""
    for part in split(text, cuts):
        out += stop_filter.push(part)
        assert want.startswith(out)
    out += stop_filter.flush()
    assert (out, stop_filter.hit) == (want, hit)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=few_letters, stop=stops)
def test_no_more_is_held_back_than_could_be_the_start_of_a_stop_string(
    text: str, stop: list[str]
) -> None:
    stop_filter = StopFilter(stop)
    out = "".join(map(stop_filter.push, text))
    held = naive(text, stop)[0][len(out) :]
    starts = [s[:n] for s in stop for n in range(1, len(s) + 1)]
    assert stop_filter.hit or not held or any(text[len(out) :].startswith(s) for s in starts)


def test_a_stop_string_over_three_pieces_leaks_no_part() -> None:
    stop_filter = StopFilter(["</answer>"])
    assert [stop_filter.push(t) for t in ("x</", "ans", "wer>y")] == ["x", "", ""]
    assert stop_filter.hit


def test_what_was_held_back_comes_when_the_stop_string_does_not() -> None:
    stop_filter = StopFilter(["<end>"])
    assert [stop_filter.push("a<en"), stop_filter.push("tity")] == ["a", "<entity"]
    assert [stop_filter.push("<en"), stop_filter.flush()] == ["", "<en"]
    assert not stop_filter.hit


def test_an_earlier_start_is_waited_for_and_else_the_inner_stop_string_counts() -> None:
    for tail, want in (("d", "x"), ("-", "xa")):
        stop_filter = StopFilter(["bc", "abcd"])
        assert [stop_filter.push("xabc"), stop_filter.hit] == ["x", False]
        assert "x" + stop_filter.push(tail) == want
        assert stop_filter.hit


def test_nothing_comes_after_a_stop_string() -> None:
    stop_filter = StopFilter(["b"])
    assert stop_filter.push("abc") == "a"
    assert stop_filter.push("more") + stop_filter.flush() == ""


# --- both, with replay


@each_kind
@settings(max_examples=200, deadline=None, derandomize=True)
@given(drawn=some_ids, at=st.integers(0, 60), data=st.data())
def test_a_later_attempt_goes_on_where_the_reader_was(
    kind: Any, drawn: list[int], at: int, data: st.DataObject
) -> None:
    tokenizer = made(kind)
    ids = ids_of(tokenizer, drawn)
    whole = tokenizer.decode(ids)
    middle = len(whole) // 2
    stop = data.draw(st.sampled_from([[], [whole[middle : middle + 3] or "x", "\0"]]))
    want, hit = naive(whole, stop)

    first = TextStream(tokenizer, stop=stop)
    sent, used = first.push(ids[:at])
    assert first.text_at == len(sent)
    if first.stopped:
        assert sent == want
        return
    assert used == len(ids[:at])
    second = TextStream(tokenizer, stop=stop, sent_chars=len(sent))
    rest = second.push(ids[:at])[0] + second.push(ids[at:])[0]
    rest += "" if second.stopped else second.finish()
    assert (sent + rest, second.stopped, second.text_at) == (want, hit, len(want))


def test_ids_after_a_stop_string_are_not_used() -> None:
    tokenizer = made(byte_level)
    ids = tokenizer.encode("one. two")
    stream = TextStream(tokenizer, stop=["."])
    assert stream.push(ids) == ("one", 4)
    assert stream.push(ids) == ("", 0)


def test_a_stop_string_of_bytes_that_never_became_a_character_is_found_at_the_end() -> None:
    tokenizer = made(byte_level)
    stream = TextStream(tokenizer, stop=["\ufffd"])
    stream.push([*tokenizer.encode("a"), tokenizer.hf.convert_tokens_to_ids("ð")])
    assert (stream.finish(), stream.stopped) == ("", True)
