"""What becomes of an offline call: its answers while they grow, and as they are returned."""

from dataclasses import dataclass, field

from minisgl.detokenizer.stream import TextStream
from minisgl.messages import ErrorInfo, FinishReason, SamplingParams, TokenLogprobs
from minisgl.scheduler.output import Emission
from minisgl.scheduler.request import PendingReq
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text import Tokenizer


@dataclass(slots=True)
class GenerationOutput:
    """The answer to one prompt."""

    text: str
    """Without special tokens, without the token that ended it, and cut before a stop string."""
    token_ids: list[int]
    """All output tokens, the EOS or stop token that ended it too."""
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    logprobs: list[TokenLogprobs] | None
    """One for each of `token_ids`, where the sampling parameters ask for them."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One turn of the loop: it queues a step, and reads the result of this or the one before."""

    seconds: float
    tokens: int
    """Output tokens that were read."""
    first_tokens: int
    """How many of them are the first of their request."""
    waited: float = 0.0
    """Seconds of these in which the host waited for the device."""


@dataclass(slots=True)
class Answer:
    """One request on its way."""

    prompt_tokens: int
    sampling: SamplingParams
    stream: TextStream | None = None
    """Only where stop strings must be looked for."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: ErrorInfo | None = None


class Collector:
    """The output sink: puts tokens where `generate` finds them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.answers: dict[bytes, Answer] = {}
        self.cut: list[PendingReq] = []
        """Requests that a stop string has ended; the scheduler does not know it yet."""
        self.open = 0
        self.scheduler: Scheduler
        self._tokens = self._first_tokens = 0

    def expect(self, uid: bytes, answer: Answer) -> None:
        """Collect what comes for this request."""
        if answer.sampling.stop:
            answer.stream = TextStream(self._tokenizer, stop=answer.sampling.stop)
        self.answers[uid] = answer
        self.open += 1

    def take_counts(self) -> tuple[int, int]:
        """(Tokens, first tokens of requests) since the last call."""
        counts = self._tokens, self._first_tokens
        self._tokens = self._first_tokens = 0
        return counts

    def emit(self, emission: Emission) -> None:
        self._tokens += len(emission.rows)
        self._first_tokens += len(emission.fresh)
        reqs = self.scheduler.table.reqs
        for i, (row, token) in enumerate(
            zip(emission.rows.tolist(), emission.tokens.tolist(), strict=True)
        ):
            req = reqs[row]
            if req is None or (answer := self.answers.get(req.uid)) is None or answer.finish:
                continue
            finish = emission.finished.get(i)
            answer.token_ids.append(token)
            if i in emission.logprobs:
                answer.logprobs.append(emission.logprobs[i])
            if answer.stream is not None:
                if finish != "stop":  # that token has no text
                    answer.text += answer.stream.push([token])[0]
                if finish is not None:
                    answer.text += answer.stream.finish()
                if answer.stream.stopped:
                    if finish is None:
                        self.cut.append(req.pending)
                    finish = "stop"
            if finish is not None:
                answer.cached_tokens = req.pending.cached_tokens or 0
                self._end(answer, finish)

    def complete(self, pending: PendingReq, reason: FinishReason) -> None:
        self._end(self.answers[pending.uid], reason)

    def refuse(self, pending: PendingReq, error: ErrorInfo) -> None:
        answer = self.answers[pending.uid]
        answer.error = error
        self._end(answer, "abort")

    def aborted(self, pending: PendingReq) -> None:
        answer = self.answers.get(pending.uid)
        if answer is not None and answer.finish is None:
            self._end(answer, "abort")

    def take(self, uid: bytes) -> GenerationOutput:
        """The finished answer; it is forgotten here."""
        answer = self.answers.pop(uid)
        finish = answer.finish or "abort"
        if answer.stream is None:
            shown = answer.token_ids[:-1] if finish == "stop" else answer.token_ids
            answer.text = self._tokenizer.decode(shown)
        return GenerationOutput(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=finish,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            logprobs=answer.logprobs if answer.sampling.logprobs is not None else None,
        )

    def _end(self, answer: Answer, reason: FinishReason) -> None:
        answer.finish = reason
        self.open -= 1
