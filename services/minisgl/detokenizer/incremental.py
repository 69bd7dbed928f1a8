"""Decoding one token at a time, so that the pieces join to the text of the whole output.

Two ways, by the tokenizer's decoder. A byte-level one (GPT-2, Llama 3, Qwen, ...) only joins the
bytes of its tokens: an incremental UTF-8 decoder does the same with no look back at all. Any other
decoder treats a token by its neighbours (it strips the first space, joins `##` pieces, reads runs
of byte tokens as one), so it gets a window: a little text that has gone out, then the new ids.
"""

import codecs
from typing import Protocol

from minisgl.text import Tokenizer

_REPLACEMENT = "\ufffd"
_WIDEST_WINDOW = 24
"""Ids in a window that ends in unreadable bytes, after which it is cut."""
_KEPT = 8
"""Ids that stay after such a cut: twice what one UTF-8 character can span."""
_CLEAN_UP_REACH = 8
"""No pattern of the clean-up of spaces, nested ones included, spans more characters."""


class IncrementalDecoder(Protocol):
    """Text of an output that grows. Special tokens have no text, as in `Tokenizer.decode`."""

    def push(self, token_id: int) -> str:
        """The text that is certain now, beyond what earlier calls gave; often "" or one word."""

    def flush(self) -> str:
        """The rest, at the end of the output: what waited for bytes that never came."""


def incremental_decoder(tokenizer: Tokenizer) -> IncrementalDecoder:
    """The decoder for a new output. For an earlier output to go on from, push its ids first."""
    kinds = [kind for kind in tokenizer.decoder_types if kind != "Fuse"]
    if kinds == ["ByteLevel"]:
        decoder: IncrementalDecoder = _ByteDecoder(tokenizer)
    else:
        decoder = _WindowDecoder(tokenizer)
    return _CleanUp(tokenizer, decoder) if tokenizer.cleans_up else decoder


class _ByteDecoder:
    """Joins the bytes of tokens. It gives a character as soon as its last byte has come.

    Python replaces invalid bytes exactly as the tokenizers library does: one U+FFFD for each
    longest prefix of a valid sequence (chapter 3.9 of the Unicode standard).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._special = tokenizer.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._special else self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decodes a window again for each token: as few ids before the new ones as have text.

    A run of byte tokens is held back until it ends, because one bad byte makes all of it
    unreadable to the decoder. It is not decoded meanwhile, so a token costs the same however long
    the run is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer.decode_raw
        self._special = tokenizer.special_ids
        self._byte_ids = tokenizer.byte_fallback_ids
        # A token may hold part of a character only in a byte-level vocabulary, and for all that
        # can be known in a tokenizer written in Python.
        kinds = tokenizer.decoder_types
        self._splits_characters = not kinds or "ByteLevel" in kinds
        self._ids: list[int] = []
        self._given = 0
        """Characters of the text of `_ids` that have gone out."""

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        empty = not self._tokenizer.token_bytes(token_id)
        if empty and (self._ids or not self._tokenizer.has_token(token_id)):
            return ""  # in first place even an empty token takes what is done to the first
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        sure = len(text.rstrip(_REPLACEMENT)) if self._splits_characters else len(text)
        out = text[self._given : sure]
        self._given = max(self._given, sure)
        if sure == len(text):
            self._keep_context()
        elif len(self._ids) > _WIDEST_WINDOW:
            out += self._cut_garbage(text)
        return out

    def _keep_context(self) -> None:
        """All has gone out: keep the last ids with text, whose start the next one cannot be."""
        for count in range(1, len(self._ids) + 1):
            text = self._decode(self._ids[-count:])
            if text:
                self._ids = self._ids[-count:]
                self._given = len(text)
                return

    def _cut_garbage(self, text: str) -> str:
        """Bound a window whose end stays unreadable, where no character spans the place.

        What is before that place can become nothing better, and goes out.
        """
        for count in range(_KEPT, _WIDEST_WINDOW):
            head, tail = self._decode(self._ids[:-count]), self._decode(self._ids[-count:])
            if head + tail == text:
                self._ids = self._ids[-count:]
                out = head[self._given :]
                self._given = max(0, self._given - len(head))
                return out
        return ""

    def flush(self) -> str:
        return self._decode(self._ids)[self._given :] if self._ids else ""


class _CleanUp:
    """Removes spaces before punctuation, as the tokenizer does to a whole text.

    Text is held back from the last place where a removal could still begin, about one word.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: IncrementalDecoder) -> None:
        self._clean_up = tokenizer.clean_up
        self._decoder = decoder
        self._held = ""

    def push(self, token_id: int) -> str:
        self._held += self._decoder.push(token_id)
        cut = _clean_up_cut(self._held)
        out, self._held = self._held[:cut], self._held[cut:]
        return self._clean_up(out) if out else ""

    def flush(self) -> str:
        out, self._held = self._held + self._decoder.flush(), ""
        return self._clean_up(out)


def _clean_up_cut(text: str) -> int:
    """The last place in `text` that no removal spans, whatever follows.

    Every pattern begins with a space and only " ' " ends with one: so a place before a space is
    good unless a space or apostrophe precedes it, and so is one that no space precedes closely.
    """
    after_word = len(text)
    while after_word > 0 and " " in text[max(0, after_word - _CLEAN_UP_REACH) : after_word]:
        after_word = text.rindex(" ", 0, after_word)
        if after_word > 0 and text[after_word - 1] not in " '":
            return after_word
    return after_word
