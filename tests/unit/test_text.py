"""Texts and token ids, against transformers."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from minisgl.config import StartError
from minisgl.text import Tokenizer, load_tokenizer
from tests.unit.small_tokenizers import (
    KINDS,
    byte_level,
    gemma,
    llama2,
    suffix_bpe,
    word_piece,
    wrap,
)

made = cache(lambda kind: kind())


def test_no_torch_is_loaded_to_encode_render_and_decode(tmp_path: Path) -> None:
    made(byte_level).hf.save_pretrained(tmp_path)
    program = (
        "import sys\n"
        "import minisgl.detokenizer.worker, minisgl.tokenizer.worker\n"
        "from minisgl.text import load_tokenizer\n"
        f"t = load_tokenizer({str(tmp_path)!r})\n"
        "t.decode(t.encode_chat([{'role': 'user', 'content': 'x'}]))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(drawn=st.lists(st.integers(0, 10_000), max_size=40), skip=st.booleans())
def test_decoding_is_that_of_transformers(kind: Any, drawn: list[int], skip: bool) -> None:
    tokenizer: Tokenizer = made(kind)
    ids = [i % (tokenizer.vocab_size + 1) for i in drawn]
    assert tokenizer.decode(ids, skip) == tokenizer.hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", [byte_level, gemma], ids=lambda kind: kind.__name__)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
def test_the_bytes_of_tokens_join_to_the_bytes_of_the_text(kind: Any, text: str) -> None:
    tokenizer: Tokenizer = made(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if tokenizer.hf.unk_token_id in ids:
        return
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined == tokenizer.decode(ids, skip_special_tokens=False).encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(drawn=st.lists(st.integers(0, 10_000), max_size=40))
def test_the_bytes_of_byte_level_tokens_join_also_where_they_are_no_text(drawn: list[int]) -> None:
    tokenizer: Tokenizer = made(byte_level)
    ids = [i % tokenizer.vocab_size for i in drawn]
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("kind", "token", "want"),
    [
        (byte_level, "Ã", b"\xc3"),
        (byte_level, "Ġ", b" "),
        (byte_level, "日本 x", "日本 x".encode()),
        (byte_level, "<tool>", b"<tool>"),
        (llama2, "<0xE5>", b"\xe5"),
        (llama2, "\u2581ab", b" ab"),
        (llama2, "<unk>", b"<unk>"),
        (word_piece, "##ing", b"ing"),
        (word_piece, "ab", b" ab"),
        (suffix_bpe, "ab</w>", b"ab "),
    ],
)
def test_a_token_stands_for_its_bytes_in_the_middle_of_a_text(
    kind: Any, token: str, want: bytes
) -> None:
    tokenizer: Tokenizer = made(kind)
    assert tokenizer.token_bytes(tokenizer.hf.convert_tokens_to_ids(token)) == want


@pytest.mark.parametrize("bad", [-1, 5_000, 2**31, 2**40])
def test_an_id_without_a_token_has_no_bytes(bad: int) -> None:
    assert made(byte_level).token_bytes(bad) == b""


@pytest.mark.parametrize("bad", [-1, 2**31, 2**64])
def test_an_id_that_is_no_int32_is_a_value_error(bad: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        made(byte_level).decode([5, bad])


def test_all_special_tokens_are_known_named_ones_and_added_ones() -> None:
    tokenizer: Tokenizer = made(byte_level)
    names = {tokenizer.hf.convert_ids_to_tokens(i) for i in tokenizer.special_ids}
    assert names == {"<unk>", "<s>", "</s>", "<tool>"}


def test_the_byte_tokens_are_those_that_the_decoder_takes_for_bytes() -> None:
    assert len(made(llama2).byte_fallback_ids) == 256
    assert made(byte_level).byte_fallback_ids == frozenset()


@pytest.mark.parametrize("kind", [byte_level, llama2, gemma], ids=lambda kind: kind.__name__)
@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text(max_size=60) | st.text(" e\u0301\u0308\u1f82a", max_size=60))
def test_a_text_has_at_least_the_tokens_that_its_length_says(kind: Any, text: str) -> None:
    tokenizer: Tokenizer = made(kind)
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.fewest_tokens("a" * 1000) > 100


def test_nothing_is_said_of_the_length_where_text_may_vanish() -> None:
    assert made(word_piece).fewest_tokens("a" * 1000) == 0
    greedy = byte_level()
    greedy.hf.add_tokens([AddedToken("<end>", rstrip=True)])
    assert len(greedy.encode("<end>" + " " * 1000)) == 1
    assert greedy.fewest_tokens("a" * 1000) == 0


def test_bytes_that_a_vocabulary_lacks_are_not_counted() -> None:
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    poor = wrap(backend)
    assert poor.encode("c\x04\u00e9" * 1000) == [] and poor.fewest_tokens("c\x04\u00e9" * 1000) == 0
    assert poor.fewest_tokens("ac" * 1000) == 1000 / len("<unk>")


def test_half_a_surrogate_pair_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="character 1"):
        made(byte_level).encode("a\ud800")


class PanicException(BaseException):
    """As the Rust library raises it; its own cannot be imported."""


@pytest.mark.parametrize("failure", [PanicException("at lib.rs"), Exception("no [UNK]")])
def test_a_failure_inside_of_the_tokenizer_is_a_value_error(failure: BaseException) -> None:
    tokenizer: Any = byte_level()
    tokenizer._fast = Mock(encode_batch_fast=Mock(side_effect=failure))
    with pytest.raises(ValueError, match="cannot be tokenized"):
        tokenizer.encode("a")


def test_an_interrupt_is_not_taken_for_a_failure_of_the_text() -> None:
    tokenizer: Any = byte_level()
    tokenizer._fast = Mock(encode_batch_fast=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_the_template_adds_bos_and_nothing_adds_it_again(tmp_path: Path) -> None:
    hf = byte_level().hf
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", hf.bos_token_id)]
    )
    hf.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    bos = tokenizer.hf.bos_token_id
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]).count(bos) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{{ messages[5].content }}",
        "{% for",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_fails_is_a_value_error(template: str) -> None:
    tokenizer = byte_level()
    tokenizer.hf.chat_template = template
    with pytest.raises(ValueError, match="chat template refuses"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


def test_no_messages_and_no_template_are_value_errors() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        made(byte_level).encode_chat([])
    with pytest.raises(ValueError, match="no chat template"):
        made(word_piece).encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("kind", [byte_level, llama2, word_piece], ids=lambda kind: kind.__name__)
def test_a_saved_tokenizer_is_that_of_auto_tokenizer(kind: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made(kind).hf.save_pretrained(tmp_path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in ("ab a b <tool> é 好 😀", "", " ", "<s>ab</s>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs.encode(text), skip_special_tokens=True
        )


def test_a_limit_or_padding_in_the_file_does_not_change_a_prompt(tmp_path: Path) -> None:
    made(byte_level).hf.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    limits = {
        "truncation": {
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
        },
        "padding": {
            "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
        },
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | limits))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer.encode("abcdefg")) == 7
    assert len(tokenizer.encode("ab")) == 2


def test_a_folder_without_tokenizer_json_is_read_by_auto_tokenizer(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate(["<|endoftext|>", "a", "b", "ab", "Ġ", "Ã", "©"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab é") == [3, 4, 5, 6]
    assert tokenizer.decode([3, 4, 5, 6]) == "ab é"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_broken_tokenizer_json_is_one_line_for_the_user(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_any_tokenizer_is_one_line_for_the_user(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StartError, match="holds no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
