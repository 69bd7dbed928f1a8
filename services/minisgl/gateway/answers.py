"""The words of an answer: JSON of whole answers and of the chunks of a stream.

Chunks are put together from bytes that are made once for each choice, because a stream has one
for each token.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from minisgl.gateway.calls import Call
from minisgl.gateway.request import News
from minisgl.messages import FinishReason, SamplingParams, TokenLogprobs
from minisgl.text import Tokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot come."""

_encode = msgspec.json.encode


@dataclass(slots=True)
class Row:
    """One token of a choice with its log probabilities, and where it stands in the text."""

    id: int
    logprobs: TokenLogprobs
    data: bytes
    """The bytes of the token that are part of the text."""
    offset: int
    """Characters of the choice's text before it."""


class Rows:
    """Which tokens of one choice are shown with log probabilities, and when.

    The joined bytes of the rows are the text: the token that ended the output is left out, and
    where a stop string cut the text, what comes after the cut. So where stop strings are looked
    for, a row waits until the text of its token has been sent.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._cuts = bool(sampling.stop)
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()
        self._text_bytes = 0
        self._row_bytes = 0
        self._chars = 0

    def add(self, news: News) -> list[Row]:
        """The rows that can be shown after this news."""
        self._waiting.extend(zip(news.ids, news.logprobs or (), strict=False))
        self._text_bytes += len(news.text.encode())
        ended = news.finish is not None
        if ended and news.finish == "stop" and not self._cuts and self._waiting:
            self._waiting.pop()
        rows = []
        while self._waiting:
            token, logprobs = self._waiting[0]
            data = (
                b"" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)
            )
            room = self._text_bytes - self._row_bytes
            if self._cuts and news.finish == "stop":
                if room <= 0:
                    break
                data = data[:room]
            elif self._cuts and not ended and len(data) > room:
                break
            self._waiting.popleft()
            rows.append(Row(token, logprobs, data, self._chars))
            self._row_bytes += len(data)
            self._chars += sum(byte & 0xC0 != 0x80 for byte in data)
        return rows


def _clamped(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


class Wording:
    """What chat and completions say differently; one object for each call."""

    kind = ""
    chunk_kind = ""

    def __init__(self, call: Call, model: str, tokenizer: Tokenizer, usage_asked: bool) -> None:
        self._call = call
        self._model = model
        self._tokenizer = tokenizer
        self._usage_asked = usage_asked
        self._tail = b'],"usage":null}\n\n' if usage_asked else b"]}\n\n"
        start = self._frame(self.chunk_kind, [])
        self._head = b"data: " + start.removesuffix(b"]}")
        self._heads: dict[int, bytes] = {}
        self._rows: dict[int, Rows] = {}

    def _frame(self, kind: str, choices: list[Any], **more: Any) -> bytes:
        return _encode(
            {
                "id": self._call.id,
                "object": kind,
                "created": self._call.created,
                "model": self._model,
                **more,
                "choices": choices,
            }
        )

    def token(self, id: int) -> str:
        """The name of a token; one that is no whole character is written as its bytes."""
        data = self._tokenizer.token_bytes(id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def rows(self, news: News) -> list[Row] | None:
        """The rows to show after this news; None if none were asked for."""
        request = news.request
        if request.sampling.logprobs is None:
            return None
        if request.index not in self._rows:
            self._rows[request.index] = Rows(self._tokenizer, request.sampling)
        return self._rows[request.index].add(news)

    def usage(self) -> dict[str, Any]:
        """The object `usage`."""
        usage = self._call.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def whole(self, outputs: "list[Output]") -> bytes:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                **self._content(index, "".join(output.texts)),
                "logprobs": None if output.rows is None else self.logprobs(index, output.rows),
                "finish_reason": output.finish,
            }
            for index, output in enumerate(outputs)
        ]
        return self._frame(self.kind, choices, usage=self.usage())

    def chunks(self, news: News) -> bytes:
        """The events of a stream that this news makes; none if it shows nothing yet."""
        index = news.request.index
        data = b""
        if index not in self._heads:
            self._heads[index] = self._head + b'{"index":%d,' % index
            data = self._opening(index)
        rows = self.rows(news)
        if news.text or rows:
            data += self._chunk(index, news.text, rows)
        if news.finish is not None:
            data += self._end(index, news.finish)
        return data

    def _event(self, index: int, body: bytes, logprobs: bytes, finish: bytes) -> bytes:
        ending = b',"logprobs":' + logprobs + b',"finish_reason":' + finish + b"}"
        return self._heads[index] + body + ending + self._tail

    def _chunk(self, index: int, text: str, rows: list[Row] | None) -> bytes:
        logprobs = b"null" if rows is None else _encode(self.logprobs(index, rows))
        return self._event(index, self._delta(_encode(text)), logprobs, b"null")

    def usage_chunk(self) -> bytes:
        """The last chunk of a stream that was asked for usage; else nothing."""
        if not self._usage_asked:
            return b""
        return b"data: " + self._frame(self.chunk_kind, [], usage=self.usage()) + b"\n\n"

    def _content(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _opening(self, index: int) -> bytes:
        raise NotImplementedError

    def _delta(self, text: bytes) -> bytes:
        raise NotImplementedError

    def _end(self, index: int, finish: FinishReason) -> bytes:
        raise NotImplementedError

    def logprobs(self, index: int, rows: list[Row]) -> dict[str, Any]:
        """The object `logprobs` of a choice."""
        raise NotImplementedError


@dataclass(slots=True)
class Output:
    """What one choice of an answer that is not streamed has so far."""

    texts: list[str] = field(default_factory=list)
    rows: list[Row] | None = None
    finish: FinishReason | None = None


class ChatWording(Wording):
    """`chat.completion`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _opening(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":""}', b"null", b"null")

    def _delta(self, text: bytes) -> bytes:
        return b'"delta":{"content":' + text + b"}"

    def _end(self, index: int, finish: FinishReason) -> bytes:
        return self._event(index, b'"delta":{}', b"null", _encode(finish))

    def logprobs(self, index: int, rows: list[Row]) -> dict[str, Any]:
        return {"content": [self._entry(row) for row in rows], "refusal": None}

    def _entry(self, row: Row) -> dict[str, Any]:
        tops = zip(row.logprobs.top_ids, row.logprobs.top_logprobs, strict=False)
        return {
            "token": self.token(row.id),
            "logprob": _clamped(row.logprobs.logprob),
            "bytes": list(row.data),
            "top_logprobs": [
                {
                    "token": self.token(id),
                    "logprob": _clamped(logprob),
                    "bytes": list(self._tokenizer.token_bytes(id)),
                }
                for id, logprob in tops
            ],
        }


class CompletionWording(Wording):
    """`text_completion`. `echoes` are the texts of the prompts, where they are asked for."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    echoes: list[str] = []

    def _echo(self, index: int) -> str:
        return self.echoes[index // self._call.n] if self.echoes else ""

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echo(index) + text}

    def _opening(self, index: int) -> bytes:
        return self._chunk(index, echo, None) if (echo := self._echo(index)) else b""

    def _delta(self, text: bytes) -> bytes:
        return b'"text":' + text

    def _end(self, index: int, finish: FinishReason) -> bytes:
        return self._event(index, b'"text":""', b"null", _encode(finish))

    def logprobs(self, index: int, rows: list[Row]) -> dict[str, Any]:
        return {
            "tokens": [self.token(row.id) for row in rows],
            "token_logprobs": [_clamped(row.logprobs.logprob) for row in rows],
            "top_logprobs": [self._tops(row) for row in rows],
            "text_offset": [row.offset for row in rows],
        }

    def _tops(self, row: Row) -> dict[str, float]:
        """By name; the chosen token is always among them. Of two with one name, the likelier."""
        tops: dict[str, float] = {}
        for id, logprob in zip(row.logprobs.top_ids, row.logprobs.top_logprobs, strict=False):
            tops.setdefault(self.token(id), _clamped(logprob))
        tops.setdefault(self.token(row.id), _clamped(row.logprobs.logprob))
        return tops
