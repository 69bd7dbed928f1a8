"""Stop strings: the text ends before the first one, and no part of one ever goes out."""

import re
from collections.abc import Sequence


class StopFilter:
    """Passes text on up to where a stop string begins.

    Each stop string is matched character by character (Knuth, Morris, Pratt 1977), so a character
    costs the same however long the strings are. What may be the start of one is held back until
    it is decided. The place is that of the first occurrence of any of them in the whole text, so
    it does not depend on how the text was split: an earlier start is waited for while it is open.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.hit = False
        """A stop string came: nothing more goes out."""
        self._stops = [(s, _borders(s)) for s in dict.fromkeys(stop) if s]
        self._matched = [0] * len(self._stops)
        self._first = re.compile("|".join(re.escape(s[0]) for s, _ in self._stops))
        self._held = ""
        self._cut: int | None = None
        """Where in `_held` the first complete stop string begins."""

    def push(self, text: str) -> str:
        """`text`, and what was held back before it, as far as it may go out."""
        if self.hit or not text:
            return ""
        if not self._stops:
            return text
        free = ""
        if not self._held:
            start = self._first.search(text)
            if start is None:
                return text
            free, text = text[: start.start()], text[start.start() :]
        open_chars = 0
        for i, char in enumerate(text, len(self._held) + 1):
            open_chars = self._step(char, i)
            if self._cut is not None and self._cut <= i - open_chars:
                self._held += text
                return free + self.flush()
        text = self._held + text
        sure = len(text) - open_chars
        if self._cut is not None:
            sure = min(sure, self._cut)
            self._cut -= sure
        self._held = text[sure:]
        return free + text[:sure]

    def _step(self, char: str, end: int) -> int:
        """Match one more character, the last of the first `end`; the longest match still open."""
        longest = 0
        for k, (stop, borders) in enumerate(self._stops):
            matched = self._matched[k]
            while matched and stop[matched] != char:
                matched = borders[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                at = end - matched
                self._cut = at if self._cut is None else min(self._cut, at)
                matched = 0  # the same string again would only begin later
            self._matched[k] = matched
            longest = max(longest, matched)
        return longest

    def flush(self) -> str:
        """What was held back, at the end of the output; up to a stop string if one is complete."""
        out, self._held = self._held, ""
        if self._cut is None:
            return out
        self.hit = True
        return out[: self._cut]


def _borders(stop: str) -> list[int]:
    """At [n]: the longest proper prefix of `stop[:n]` that is also its suffix, in characters."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop) - 1):
        while length and stop[i] != stop[length]:
            length = borders[length]
        length += stop[i] == stop[length]
        borders[i + 1] = length
    return borders
