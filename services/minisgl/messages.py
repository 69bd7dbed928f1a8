"""The messages between the gateway, tokenizers, ranks and detokenizers, and how they travel.

Every message is a `msgspec` struct; a batch of them is one MessagePack list. Token ids travel as
little-endian int32 bytes (`pack_ids`, `unpack_ids`). Fields with their default value are left out
and unknown fields are skipped, so a reader one version back or ahead understands a batch.

Who says what (section 5 of docs/design.md):

    gateway --TokenizeMsg--> tokenizer --UserMsg--> rank 0 --DetokenizeBatch--> detokenizer
    gateway <--UserReply, AuditMsg-- detokenizer;   gateway --AbortMsg--> rank 0

Delivery is at least once, in order for each writer, and may lose; only the gateway judges what
counts. That is why every message names the request (`uid`), the try (`attempt`), and from rank 0
on the one computation that produced it (`source`) and its place in the output (`pos`).
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length", "abort"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 4096
"""Of all stop strings of a request: each choice looks for them, where all outputs are decoded."""
MAX_TOP_LOGPROBS = 20

# What decoding refuses: a number that no table can hold would end every rank of a group.
Uid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Attempt = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Sent = Annotated[int, msgspec.Meta(ge=0, lt=2**30)]
"""Characters that a client has: what is added to it later must still be a `Count`."""
Run = Annotated[int, msgspec.Meta(ge=0, lt=2**63 - 1)]
Bits = Annotated[int, msgspec.Meta(ge=0)]
"""Random bits, 64 at most."""

_WHOLE = ("top_k", "max_tokens", "seed", "logprobs", "priority")
_REAL = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class SamplingParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True, forbid_unknown_fields=False
):
    """How the next token of one request is chosen, and when its output ends.

    The ranges are those of the OpenAI API. `ValueError` names the field that is out of range.
    """

    temperature: float = 1.0
    """0 (greedy) to 2; logits are divided by it."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum; 0 to 1."""
    top_k: int = -1
    """Keep this many most likely tokens; below 1: no limit."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; 0 to 1."""
    max_tokens: int | None = None
    """Most output tokens over all attempts; None: the room that is left."""
    seed: int | None = None
    """Same seed, same output. None: the owner of the request draws one."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the output holds; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the output holds it; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; over 0."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; -100 to 100."""
    logprobs: int | None = None
    """Report each token's log probability and that of so many most likely ones, 0 to 20."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; none of them is part of it. At most 16, of 4096 characters
    together."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, as the EOS does."""
    ignore_eos: bool = False
    """Go on after an EOS token; `stop_token_ids` still end the output."""
    priority: int = 0
    """Waiting requests with a higher number start first; equal ones first come, first served."""

    def __post_init__(self) -> None:
        def check(ok: bool, field: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{field} must be {allowed}, not {getattr(self, field)!r}")

        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        elif not isinstance(self.stop, tuple):
            msgspec.structs.force_setattr(self, "stop", tuple(self.stop or ()))
        if not isinstance(self.stop_token_ids, tuple):
            msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        for field in _WHOLE:
            value = getattr(self, field)
            check(value is None or _is_whole(value), field, "a whole number")
        for field in _REAL:
            check(_is_real(getattr(self, field)), field, "a number")
        check(all(isinstance(s, str) for s in self.stop), "stop", "strings")
        check(all(map(_is_whole, self.stop_token_ids)), "stop_token_ids", "ids of tokens")
        check(isinstance(self.ignore_eos, bool), "ignore_eos", "true or false")
        check(0 <= self.temperature <= 2, "temperature", "between 0 and 2")
        check(0 <= self.top_p <= 1, "top_p", "between 0 and 1")
        check(-1 <= self.top_k < 2**31, "top_k", "-1 (no limit), 0 (no limit) or a positive int32")
        check(0 <= self.min_p <= 1, "min_p", "between 0 and 1")
        check(
            self.max_tokens is None or 1 <= self.max_tokens < 2**31,
            "max_tokens",
            "at least 1",
        )
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a signed 64-bit integer")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "between -2 and 2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "between -2 and 2")
        check(0 < self.repetition_penalty <= 100, "repetition_penalty", "over 0 and at most 100")
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
            "logprobs",
            f"between 0 and {MAX_TOP_LOGPROBS}",
        )
        check(
            len(self.stop) <= MAX_STOP_STRINGS and all(self.stop),
            "stop",
            f"at most {MAX_STOP_STRINGS} strings, none of them empty",
        )
        stop_chars = sum(map(len, self.stop))
        if stop_chars > MAX_STOP_CHARS:  # not shown: it is long
            raise ValueError(
                f"stop must hold at most {MAX_STOP_CHARS} characters together, not {stop_chars}"
            )
        check(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", "ids of tokens")
        check(-(2**31) <= self.priority < 2**31, "priority", "a signed 32-bit integer")
        check(isinstance(self.logit_bias, dict | None), "logit_bias", "a mapping")
        for token, bias in (self.logit_bias or {}).items():
            right = _is_whole(token) and _is_real(bias)
            if not right or token < 0 or not -100 <= bias <= 100:
                raise ValueError(
                    f"logit_bias must map ids of tokens to numbers between -100 and 100, "
                    f"not {token} to {bias}"
                )


class Route(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Where the answers of one attempt go; the gateway chooses both when it starts the attempt."""

    gateway: str
    """Id of the gateway that owns the request; it reads the queue `reply:<gateway>`."""
    boot: Bits
    """The 64-bit boot of that gateway: a later process of the same id does not know the request."""
    detokenizer: str
    """Id of the detokenizer; it reads the queue `detok:<detokenizer>`."""


class Source(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One computation of one request: what a reply is compared with."""

    group: str
    incarnation: Bits
    """64 random bits that rank 0 draws when its group forms."""
    run: Run
    """Counts the requests that this rank 0 has accepted."""


class _Message(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="t"):
    uid: Uid
    """128 random bits: one choice of one request of one client. Never used again."""
    attempt: Attempt
    """From 1; one higher each time the gateway replays the request."""


class TokenizeMsg(_Message, tag="tok"):
    """Gateway to a tokenizer: a request, or the rest of one that is replayed."""

    route: Route
    text: str | None = None
    """The prompt of a completion. Exactly one of text, messages and prompt_ids is given."""
    messages: list[dict[str, str]] | None = None
    """A conversation for the chat template: role, content and, where given, name."""
    prompt_ids: bytes | None = None
    """The prompt as token ids: of a client that sent ids, or of an earlier attempt."""
    add_special_tokens: bool = True
    """For `text`: add what the tokenizer puts before and after a text (BOS)."""
    output_ids: bytes = b""
    """What the client has got already; the output goes on from there."""
    sent_chars: Sent = 0
    """Characters of text that the client has got already."""
    sampling: SamplingParams = SamplingParams()
    """With a seed. `max_tokens`, penalties and the draw's position count over all attempts."""


class UserMsg(_Message, tag="user"):
    """Tokenizer to rank 0 of the group that it chose: the request as token ids."""

    route: Route
    group: str
    incarnation: Bits
    """The incarnation of the group that is meant; any other drops the message."""
    prompt_ids: bytes
    output_ids: bytes = b""
    sent_chars: Sent = 0
    sampling: SamplingParams = SamplingParams()


class AbortMsg(_Message, tag="abort"):
    """Gateway to rank 0: this computation is not wanted (any more)."""

    run: Run


class TokenLogprobs(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Natural logarithms of the model's own probabilities at one position."""

    logprob: float
    """Of the token that was chosen."""
    top_ids: list[Count] = []
    top_logprobs: list[float] = []
    """The most likely tokens, falling."""


class Opening(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a detokenizer must know before the first new token of a computation."""

    prompt_ids: bytes
    output_ids: bytes = b""
    """Output of earlier attempts: decoding goes on after it."""
    sent_chars: Sent = 0
    stop: tuple[str, ...] = ()
    cached_tokens: Count = 0
    """Prompt tokens whose keys and values came from the prefix cache."""


class DetokenizeMsg(_Message, tag="detok"):
    """Rank 0 to a detokenizer: an opening, or new tokens, or the end of one computation."""

    route: Route
    source: Source
    pos: Count
    """Output tokens of the request before this message, over all attempts."""
    ids: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `ids`, where the request asked for them."""
    finish: FinishReason | None = None
    """Comes with the last token. `stop`: that id is an EOS or a stop id, without visible text."""
    opening: Opening | None = None


class DetokenizeBatch(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="t", tag="step"):
    """One step of rank 0 for one detokenizer: a single entry, whatever the number of requests.

    Most requests of a step get one plain token. They travel as columns (row i of each belongs to
    the same request; all share group and incarnation), because building a struct for each would
    cost rank 0 more host time than the rest of its step. `rows` gives them back as messages.
    """

    group: str
    incarnation: Bits
    gateways: list[tuple[str, Bits]] = []
    """(id, boot) of the gateways of this batch; `gateway` indexes it."""
    detokenizer: str = ""
    uid: bytes = b""
    """16 bytes a row."""
    attempt: bytes = b""
    """int32."""
    run: bytes = b""
    """int64."""
    pos: bytes = b""
    """int32."""
    gateway: bytes = b""
    """int32."""
    ids: bytes = b""
    """int32: the one new token of each row."""
    others: list[DetokenizeMsg] = []
    """Openings, ends, and tokens with log probabilities. Handled before the columns."""
    audit: bool = False
    """The columns are an audit: what rank 0 holds, with `pos` so far and no `ids`."""
    number: Run = 0
    """Of an audit: see `AuditMsg.number`."""

    def rows(self) -> list[tuple[bytes, int, int, int, int, bytes]]:
        """The columns by request: (uid, attempt, run, pos, gateway index, ids as int32 bytes).

        Raises `ValueError` if the columns differ in length, name a gateway that is not listed, or
        hold a number that a message cannot carry: an answer with it would be unreadable, and so
        would all others of its entry.
        """
        attempts = np.frombuffer(self.attempt, "<i4").tolist()
        runs = np.frombuffer(self.run, "<i8").tolist()
        poss = np.frombuffer(self.pos, "<i4").tolist()
        gateways = np.frombuffer(self.gateway, "<i4").tolist()
        n = len(attempts)
        whole = len(runs) == len(poss) == len(gateways) == n and len(self.uid) == 16 * n
        if not whole or len(self.ids) != (0 if self.audit else 4 * n):
            raise ValueError("columns of a DetokenizeBatch differ in length")
        if gateways and not 0 <= min(gateways) <= max(gateways) < len(self.gateways):
            raise ValueError("a DetokenizeBatch names a gateway that it does not list")
        if n and not (min(attempts) > 0 <= min(poss) and 0 <= min(runs) <= max(runs) < 2**63 - 1):
            raise ValueError("a DetokenizeBatch holds an attempt, run or place that cannot be")
        uid, ids = self.uid, self.ids
        return [
            (uid[16 * i : 16 * i + 16], attempts[i], runs[i], poss[i], gateways[i],
             ids[4 * i : 4 * i + 4])
            for i in range(n)
        ]  # fmt: skip


class AuditMsg(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="t", tag="audit"):
    """Rank 0 to one gateway, through a detokenizer: all it holds for that gateway there.

    Sent each second, also when it holds nothing. It follows the replies on their way, so what it
    does not list any more has been answered before.
    """

    boot: Bits
    """Of the gateway that is meant."""
    group: str
    incarnation: Bits
    detokenizer: str
    held: list[tuple[Uid, Attempt, Run, Count]] = []
    """(uid, attempt, run, pos) of each request, waiting ones too."""
    number: Run = 0
    """Counts this rank 0's audits from 1: one that comes twice is no new evidence. 0: unknown."""


class ErrorInfo(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """An answer that is final: sent to the client as it is, never replayed."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    """HTTP status."""
    message: str
    code: str | None = None
    param: str | None = None


class UserReply(_Message, tag="reply"):
    """To the gateway: new output, an error, or the word that an attempt came to nothing."""

    boot: Bits
    """Of the gateway that is meant: `Route.boot`."""
    source: Source | None = None
    """None: from a tokenizer, before any computation."""
    pos: Count = 0
    ids: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    text: str = ""
    """New characters. They may belong to earlier ids, whose bytes were not complete until now."""
    text_at: Count = 0
    """Characters of text before this message, over all attempts."""
    finish: FinishReason | None = None
    prompt_ids: bytes | None = None
    """In the first reply of a computation: the prompt as it was computed."""
    cached_tokens: Count = 0
    """In the first reply of a computation."""
    error: ErrorInfo | None = None
    again: Literal["lost", "refused", "handback"] | None = None
    """Replay the request: state was lost, no group took it, or its worker is leaving."""
    why: str = ""
    """For the log, where `again` is given."""


class WorkerState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a worker publishes of itself each second."""

    role: Literal["gateway", "tokenizer", "detokenizer", "rank"]
    id: str
    """Of a rank: `<group>/<tp rank>`."""
    boot: Bits
    """64 random bits, one a process."""
    beat: Bits
    """Counts up while the worker's own loop turns."""
    pod: str = ""
    draining: bool = False
    bus_errors: Bits = 0
    """Entries and messages that could not be read, since the start. A process of two roles counts
    them in one of its states."""
    load: "GroupLoad | None" = None
    """Rank 0 of a formed group only."""


class GroupLoad(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures of one group, from its rank 0. Counters count since its start."""

    group: str
    incarnation: Bits
    max_model_len: Count
    """Most tokens of a prompt and its output together."""
    running: Count = 0
    waiting: Count = 0
    pages_total: Count = 0
    """Without the dummy page."""
    pages_free: Count = 0
    pages_evictable: Count = 0
    steps: Bits = 0
    step_seconds: float = 0.0
    """Sum over all steps."""
    step_buckets: list[Bits] = []
    """Steps at most as long as each of STEP_BUCKETS; cumulative, without +Inf."""
    retractions: Bits = 0
    """Requests that gave their pages back and were computed again."""
    transport: str = ""
    """What tensors travel by between rank 0 and the others: see `Communicator.transport`."""
    busy_seconds: float = 0.0
    """In which rank 0's device computed steps: see `StepEngine.busy`."""


STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5, 1, 2, 5)
"""Upper bounds of `GroupLoad.step_buckets`, in seconds."""

Message = TokenizeMsg | UserMsg | AbortMsg | DetokenizeMsg | DetokenizeBatch | UserReply | AuditMsg

Decoded = TypeVar("Decoded")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Message])
_state_decoder = msgspec.msgpack.Decoder(WorkerState)


def encode(batch: Sequence[Message]) -> bytes:
    """A batch as one MessagePack list."""
    return _encoder.encode(batch)


def decode(data: bytes | memoryview) -> list[Message]:
    """The batch in `data`; `ValueError` (of msgspec) if it is malformed or of no known kind."""
    return _decoded(_decoder, data)


def _decoded(decoder: msgspec.msgpack.Decoder[Decoded], data: bytes | memoryview) -> Decoded:
    try:
        return decoder.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def encode_state(state: WorkerState) -> bytes:
    """One worker's state as MessagePack."""
    return _encoder.encode(state)


def decode_state(data: bytes | memoryview) -> WorkerState:
    """The state in `data`; `ValueError` if it is malformed."""
    return _decoded(_state_decoder, data)


def pack_ids(ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> npt.NDArray[np.int32]:
    """The token ids in `data`, read-only; `ValueError` unless its length divides by four."""
    return np.frombuffer(data, dtype="<i4")
