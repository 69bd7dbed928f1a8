"""Text to token ids and back, without torch.

`load_tokenizer` reads tokenizer.json as it stands, through transformers' fast tokenizer, which
also renders chat templates. Importing it takes half a second and loads no torch; AutoTokenizer,
which is slower, is asked only for folders without tokenizer.json.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from minisgl.config import StartError
from minisgl.hub import require_tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"
"""What sentencepiece vocabularies write for a space."""


def _byte_level_alphabet() -> dict[str, int]:
    """The character that byte-level BPE (GPT-2) writes for each byte, the other way round.

    Printable bytes stand for themselves, the other 68 for characters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()


def _steps(part: Any, several: str) -> list[dict[str, Any]]:
    """The steps of a part of a fast tokenizer, as tokenizer.json writes them."""
    if part is None:
        return []
    state: dict[str, Any] = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state.get(several, [state])
    return steps


class Tokenizer:
    """One model's tokenizer. Wraps a loaded transformers tokenizer `hf`."""

    def __init__(self, hf: Any) -> None:
        self.hf = hf
        self._fast: Any = getattr(hf, "_tokenizer", None)
        """The tokenizers library's own object; None for a tokenizer written in Python."""
        self._bytes: dict[int, bytes] = {}
        steps: list[dict[str, Any]] = []
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
            steps = _steps(self._fast.decoder, "decoders")
        self.decoder_types: list[str] = [step["type"] for step in steps]
        """Steps of the decoder as tokenizer.json names them, such as ["ByteLevel"]."""
        self._steps = dict(zip(self.decoder_types, steps, strict=True))
        self.vocab_size: int = len(hf)
        """Tokens, added ones included."""
        self.special_ids: frozenset[int] = frozenset(self._special_ids())
        """Ids without visible text: `decode` skips them."""
        self.cleans_up: bool = self._cleans_up()
        """Whether decoded text loses spaces before punctuation (WordPiece vocabularies only)."""

    def _special_ids(self) -> set[int]:
        added = self.hf.added_tokens_decoder
        return {*self.hf.all_special_ids, *(i for i, token in added.items() if token.special)}

    def _cleans_up(self) -> bool:
        if not getattr(self.hf, "clean_up_tokenization_spaces", False):
            return False
        forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
        bpe = self._fast is not None and type(self._fast.model).__name__ == "BPE"
        return not bpe or bool(getattr(self.hf, forced, False))

    def fewest_tokens(self, text: str) -> int:
        """No encoding of `text` is shorter: known at once, where encoding megabytes takes seconds.

        0 where that is not sure, because the tokenizer may drop or join what it meets.
        """
        if self._reach is None:
            return 0
        most, dropped = self._reach
        size = len(text)
        if self.decoder_types == ["ByteLevel"]:
            data = text.encode(errors="replace")
            size = len(data) - sum(map(data.count, dropped))
        return -(-size // most)

    @cached_property
    def _reach(self) -> tuple[int, list[int]] | None:
        """(Most characters, or bytes in a byte-level vocabulary, of one token; bytes that it lacks,
        which vanish); None where more may vanish."""
        added = self.hf.added_tokens_decoder.values()
        if self._fast is None or any(token.lstrip or token.rstrip for token in added):
            return None
        vocabulary = self._fast.get_vocab(with_added_tokens=True)
        lacks = [byte for char, byte in _BYTE_LEVEL.items() if char not in vocabulary]
        if self.decoder_types != ["ByteLevel"] and not self.byte_fallback_ids:
            return None
        most = max(*map(len, vocabulary), *(len(token.content.encode()) for token in added))
        for step in _steps(self._fast.normalizer, "normalizers"):
            if step["type"] == "NFC" and (self.byte_fallback_ids or not lacks):
                most *= 4  # no character is composed of more
            elif step["type"] == "Replace":
                pattern = step["pattern"].get("String")
                if pattern is None or len(step["content"]) < len(pattern):
                    return None
            elif step["type"] != "Prepend":
                return None
        for step in _steps(self._fast.pre_tokenizer, "pretokenizers"):
            dropped = step["type"] == "Split" and step["behavior"] == "Removed"
            if dropped or step["type"] not in ("ByteLevel", "Split", "Digits", "Metaspace"):
                return None
        return most, lacks

    @cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens <0x00> to <0xFF>, where the decoder takes them for bytes."""
        if "ByteFallback" not in self.decoder_types:
            return frozenset()
        spellings = {f"<0x{b:{form}}>" for b in range(256) for form in ("02X", "02x")}
        ids = (self._fast.token_to_id(token) for token in spellings)
        return frozenset(i for i in ids if i is not None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `ValueError` for one that the tokenizer cannot take."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds half a surrogate pair at character {error.start}"
            ) from error
        try:
            if self._fast is None:
                return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
            # The fast one leaves out the places of tokens in the text, which nobody reads here.
            encode = self._fast.encode_batch_fast
            return list(encode([text], add_special_tokens=add_special_tokens)[0].ids)
        except BaseException as error:
            # A panic of the Rust library is no Exception; one prompt must not end the worker.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the text cannot be tokenized: {error}") from error

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer starts.

        The chat template writes BOS and the like itself, so nothing is added to its text. Raises
        `ValueError` if the model has no template or the template refuses the conversation.
        """
        if not messages:
            raise ValueError("messages must hold at least one message")
        if not self.hf.chat_template:
            raise ValueError(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja "
                "to its folder"
            )
        try:
            text = self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the model's author: it may do all
            reason = str(error).strip() or type(error).__name__
            raise ValueError(f"the chat template refuses these messages: {reason}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, as transformers decodes them. Ids without a token have no text.

        Raises `ValueError` for a negative id and for one over 32 bits.
        """
        if ids and not 0 <= min(ids) <= max(ids) < 2**31:
            raise ValueError("token ids must be 0 or more and fit into 31 bits")
        if self._fast is None:
            return str(self.hf.decode(ids, skip_special_tokens=skip_special_tokens))
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.clean_up(text) if self.cleans_up else text

    def decode_raw(self, ids: list[int]) -> str:
        """`decode`, special tokens included, before any clean-up of spaces."""
        if self._fast is None:
            return str(self.hf.decode(ids, clean_up_tokenization_spaces=False))
        text: str = self._fast.decode(ids, skip_special_tokens=False)
        return text

    def clean_up(self, text: str) -> str:
        """`text` without the spaces that a WordPiece vocabulary puts before punctuation."""
        return str(self.hf.clean_up_tokenization(text))

    def has_token(self, token_id: int) -> bool:
        """Whether `decode` knows `token_id`; a model may have more rows than its tokenizer."""
        return bool(self._token(token_id) is not None)

    def _token(self, token_id: int) -> str | None:
        if not 0 <= token_id < 2**31:
            return None
        if self._fast is not None:
            found: str | None = self._fast.id_to_token(token_id)
            return found
        return self.hf.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token stands for, as if in the middle of a text.

        They join to the bytes of the whole text; one token may hold part of a character. A
        special token gives its name, an id without a token nothing.
        """
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def _make_bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self.decoder_types:
            # Like the decoder: a token with any other character stands for itself.
            values = [_BYTE_LEVEL.get(c) for c in token]
            exact = bytes(b for b in values if b is not None)
            return exact if len(exact) == len(token) else token.encode()
        if token_id in self.special_ids:
            return token.encode()
        if token_id in self.byte_fallback_ids:
            return bytes.fromhex(token[3:5])
        if step := self._steps.get("WordPiece"):
            inner = token.removeprefix(step["prefix"])
            return inner.encode() if inner != token else b" " + token.encode()
        if step := self._steps.get("BPEDecoder"):
            return token.replace(step["suffix"], " ").encode()
        if self._fast is None and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(_SPACE_MARK, " ").encode()


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder; `StartError` if it has none or its files are broken."""
    folder = Path(folder)
    require_tokenizer(folder)
    # Imported here: half a second that a process which only reads messages need not spend.
    from transformers import PreTrainedTokenizerFast

    try:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer(PreTrainedTokenizerFast.from_pretrained(folder))
        from transformers import AutoTokenizer

        return Tokenizer(AutoTokenizer.from_pretrained(folder))
    except Exception as error:  # the library raises a bare Exception for a broken tokenizer.json
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StartError(f"the tokenizer in {folder} cannot be read: {reason[0]}") from error
