"""The text of one request: incremental decoding, then stop strings, then a place to go on from."""

from collections.abc import Sequence

from minisgl.detokenizer.incremental import incremental_decoder
from minisgl.detokenizer.stop import StopFilter
from minisgl.text import Tokenizer


class TextStream:
    """Gives each character of an output once.

    `sent_chars` characters at the start are known to the reader already and are passed over: they
    belong to the ids of an earlier attempt, which are pushed again like any others. Those may hold
    more text than was sent (a possible start of a stop string), which then goes out now.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), sent_chars: int = 0
    ) -> None:
        self._decoder = incremental_decoder(tokenizer)
        self._stop = StopFilter(stop)
        self._known = max(0, sent_chars)
        self.text_at = self._known
        """Characters given so far, those of earlier attempts included."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop.hit

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """(New text, number of `ids` used). Fewer than all are used if a stop string came."""
        out: list[str] = []
        used = 0
        for token_id in ids:
            if self._stop.hit:
                break
            used += 1
            if text := self._new(self._decoder.push(token_id)):
                out.append(self._stop.push(text))
        return self._give("".join(out)), used

    def finish(self) -> str:
        """The rest of the text, when no further id comes."""
        text = self._stop.push(self._new(self._decoder.flush()))
        return self._give(text if self._stop.hit else text + self._stop.flush())

    def _new(self, text: str) -> str:
        """`text` without what the reader knows."""
        if self._known:
            passed = min(self._known, len(text))
            self._known -= passed
            return text[passed:]
        return text

    def _give(self, text: str) -> str:
        self.text_at += len(text)
        return text
