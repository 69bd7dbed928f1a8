"""Tokenizers of every decoder kind, small and built on the spot."""

from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from minisgl.text import Tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
WORDS = [
    *"abcdefgst.,!?'", "ab", "ing", "n't", "'s", "'", "é", "好", "😀", "\ufffd", "ve", "re", "t",
]  # fmt: skip


def wrap(backend: Backend, **settings: Any) -> Tokenizer:
    """As `load_tokenizer` would give it."""
    return Tokenizer(
        PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=backend,
            unk_token="<unk>", bos_token="<s>", eos_token="</s>",
            clean_up_tokenization_spaces=settings.pop("clean_up", False), **settings,
        )
    )  # fmt: skip


def _vocab(tokens: Iterable[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys([*SPECIALS, *tokens]))}


def byte_level() -> Tokenizer:
    """One token a byte, some pairs of bytes that cut characters, and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    joined = [spell(text)[0][0] for text in ("😀", "好好", "é", " the")]
    pieces = [word[i:j] for word in joined for i in range(3) for j in range(i + 2, len(word) + 1)]
    firsts = dict.fromkeys(p for p in pieces if len(p) > 1)
    backend = Backend(models.BPE(vocab=_vocab([*alphabet, *firsts]), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["a b", AddedToken("<tool>", special=True), "日本 x"])
    return wrap(backend, chat_template=TEMPLATE)


def _byte_fallback(decoder: Any) -> Tokenizer:
    tokens = [f"<0x{b:02X}>" for b in range(256)]
    marked = ["\u2581", "\u2581\u2581", *("\u2581" + w for w in WORDS)]
    model = models.BPE(
        vocab=_vocab([*tokens, *WORDS, *marked]), merges=[], byte_fallback=True, fuse_unk=True,
        unk_token="<unk>",
    )  # fmt: skip
    backend = Backend(model)
    backend.decoder = decoder
    backend.add_tokens(["<added>", AddedToken("<tool>", special=True)])
    return wrap(backend, chat_template=TEMPLATE)


def llama2() -> Tokenizer:
    """Sentencepiece style: byte fallback, and the first space of a text goes."""
    steps = [
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]  # fmt: skip
    return _byte_fallback(decoders.Sequence(steps))


def gemma() -> Tokenizer:
    """The same without the strip."""
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _byte_fallback(decoders.Sequence(steps))


def deep_strip() -> Tokenizer:
    """The same with a strip of three spaces, which can span tokens."""
    steps = [
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 3, 0),
    ]  # fmt: skip
    return _byte_fallback(decoders.Sequence(steps))


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder, which strips what is before the first token."""
    marked = ["\u2581", "\u2581\u2581", *("\u2581" + w for w in WORDS), ""]
    scores = [(token, -1.0) for token in _vocab([*WORDS, *marked])]
    backend = Backend(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return wrap(backend)


def word_piece(clean_up: bool = False) -> Tokenizer:
    """Words and ## pieces."""
    tokens = [*WORDS, *("##" + w for w in WORDS)]
    backend = Backend(models.WordPiece(vocab=_vocab(tokens), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return wrap(backend, clean_up=clean_up)


def word_piece_clean() -> Tokenizer:
    """WordPiece whose texts lose the spaces before punctuation."""
    return word_piece(clean_up=True)


def suffix_bpe() -> Tokenizer:
    """GPT-1 style: a suffix on the last piece of a word is its space."""
    tokens = [*WORDS, *(w + "</w>" for w in WORDS)]
    backend = Backend(models.BPE(vocab=_vocab(tokens), merges=[], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    return wrap(backend)


def stripped_byte_level() -> Tokenizer:
    """Byte-level with a step behind it: no decoder that can be known by its name."""
    plain = byte_level().hf.backend_tokenizer
    plain.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return wrap(plain)


KINDS: list[Callable[[], Tokenizer]] = [
    byte_level, llama2, gemma, deep_strip, metaspace, word_piece, word_piece_clean, suffix_bpe,
    stripped_byte_level,
]  # fmt: skip
