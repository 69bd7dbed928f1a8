"""What the owner of requests keeps of each: what was asked, how far it is, what is new of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from minisgl.messages import ErrorInfo, FinishReason, SamplingParams, Source, TokenLogprobs


@dataclass(slots=True)
class Prompt:
    """What the client asked: exactly one of text, messages and ids."""

    text: str | None = None
    messages: list[dict[str, str]] | None = None
    ids: bytes | None = None
    """int32, see `messages.pack_ids`."""
    add_special_tokens: bool = True


@dataclass(slots=True)
class News:
    """What one reply adds to one request."""

    request: "Request"
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    text: str = ""
    finish: FinishReason | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True)
class Limits:
    """When the owner gives up. Times in seconds."""

    silence: float
    """Heartbeat time-out T: nothing heard for T (2 T before a computation is bound) is a loss."""
    max_attempts: int = 3
    replay_wait: float = 600.0


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one client's request, over all its attempts."""

    uid: bytes
    index: int
    """Of the choice in the client's request."""
    prompt: Prompt
    sampling: SamplingParams
    sink: Callable[[News], None]
    deadline: float
    attempt: int = 0
    source: Source | None = None
    """The computation that the first reply of this attempt bound."""
    holder: tuple[str, int] | None = None
    """Group and incarnation last heard to hold this attempt, by a reply or before by an audit."""
    detokenizer: tuple[str, int] = ("", 0)
    """Id and boot."""
    prompt_ids: bytes | None = None
    """As the first bound computation saw it: templates may read the clock."""
    cached_tokens: int = 0
    """Of the first attempt."""
    ids: list[int] = field(default_factory=list)
    sent_chars: int = 0
    heard: float = 0.0
    failures: int = 0
    """Attempts in a row that ended without a new token."""
    forgiven: int = 0
    """Attempts in a row that were lost on their way while some worker was not well."""
    audits_without: int = 0
    audited: int = 0
    """Number of the newest audit of this attempt's computation."""
    held_since: float | None = None
    """Since when no group takes it; None once one does."""
    resume_at: float | None = None
    """It is between two attempts; the next one starts then, if anybody is there to take it."""
    done: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; 0 before it is known."""
        return len(self.prompt_ids or b"") // 4
