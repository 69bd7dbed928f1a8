"""The tokenizer: a gateway's prompts in, token ids to rank 0 of a group out.

`TokenizerCore` does no input or output; what it must know of the groups it reads from the states
that the workers publish.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from minisgl.bus import TOK, Bus, connect_worker, reply_queue, req_queue
from minisgl.bus.base import BusError
from minisgl.config import ProbedConfig
from minisgl.hub import model_vocab_size, resolve_model
from minisgl.lifecycle import boot_clock
from minisgl.messages import (
    ErrorInfo,
    GroupLoad,
    Message,
    TokenizeMsg,
    UserMsg,
    UserReply,
    WorkerState,
    pack_ids,
    unpack_ids,
)
from minisgl.text import Tokenizer, load_tokenizer
from minisgl.tokenizer.loop import Addressed, Core, run_loop

if TYPE_CHECKING:
    from minisgl.bus.prefixes import PrefixLookup

STATES_SECONDS = 0.2
"""How long states that were read are good: they change each second."""
PAUSE_SECONDS = 2.0
"""After a gap of this length between two looks the fault may be our own: clocks start again."""


class _Refusal(Exception):
    """The request itself is at fault: a final answer."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.info = ErrorInfo(status=400, message=message, code=code, param=param)


def choose_group(loads: Sequence[GroupLoad], cached: Mapping[str, int]) -> GroupLoad | None:
    """The group that knows most of the prompt, among those that are not overloaded; None: no group.

    `cached` gives by group the tokens of the prompt that it has in its prefix cache (missing: 0).
    Of equals it is the one with fewer requests, then the first by name.

    The load of a group is what runs and waits there, with what was sent since it last said so. One
    request more must leave it within 1.25 times the mean, rounded up, with that request counted:

        load + 1 <= ceil(1.25 * (sum of all loads + 1) / number of groups)

    A group with the least load always is: its load + 1 is at most the mean, rounded up. So there
    is a choice whenever there is a group, and no prefix, however popular, makes one group a queue
    while others idle. (Mirrokni, Thorup, Zadimoghaddam: Consistent hashing with bounded loads.)
    """
    total = sum(map(_load, loads))
    # In whole numbers: ceil(5 (total + 1) / 4 n).
    limit = -(-5 * (total + 1) // (4 * len(loads))) if loads else 0
    return min(
        (group for group in loads if _load(group) + 1 <= limit),
        key=lambda group: (-cached.get(group.group, 0), _load(group), group.group),
        default=None,
    )


def _load(group: GroupLoad) -> int:
    return group.running + group.waiting


class TokenizerCore:
    """Turns prompts into ids for the group that takes them.

    `vocab_size` is the number of rows of the model's embedding: a larger id is refused. `cached`
    says how many tokens of a prompt each of these groups has in its prefix cache; it is asked only
    if there is a choice. `silence` is the heartbeat time-out in seconds: a state stays for longer
    than its group beats.
    """

    role: Literal["tokenizer", "detokenizer"] = "tokenizer"
    handles: tuple[type, ...] = (TokenizeMsg,)

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        read_states: Callable[[], list[WorkerState]],
        clock: Callable[[], float] = boot_clock,
        silence: float = float("inf"),
        cached: Callable[[Sequence[str], Sequence[int]], Mapping[str, int]] | None = None,
    ) -> None:
        self._cached = cached
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._read_states = read_states
        self._clock = clock
        self._silence = silence
        self._groups: dict[tuple[int, int], tuple[GroupLoad, float]] = {}
        """By (boot, beat) of the state that said it, with the time when it was met first."""
        self._read_at = float("-inf")
        self._last: tuple[object, list[int]] = (None, [])
        """The last prompt and its ids: the choices of one request come one after the other."""
        self._sent: Counter[int] = Counter()
        """By incarnation: requests sent since its state was read, which it does not count yet."""

    def handle(self, message: Message) -> list[Addressed]:
        """The request for a group, or the answer for its gateway."""
        if not isinstance(message, TokenizeMsg):
            raise ValueError("a tokenizer takes TokenizeMsg only")
        to_gateway = reply_queue(message.route.gateway)
        try:
            param, ids = self._prompt_ids(message)
            group = self._choose(ids)
            if group is None:
                return [(to_gateway, _reply(message, again="refused", why="no group is ready"))]
            if len(ids) >= group.max_model_len:
                raise _Refusal(
                    param,
                    f"the prompt has {len(ids)} tokens, and the model's context length is "
                    f"{group.max_model_len} tokens for the prompt and at least one of output",
                    code="context_length_exceeded",
                )
        except _Refusal as refusal:
            return [(to_gateway, _reply(message, error=refusal.info))]
        self._sent[group.incarnation] += 1
        request = UserMsg(
            uid=message.uid,
            attempt=message.attempt,
            route=message.route,
            group=group.group,
            incarnation=group.incarnation,
            prompt_ids=pack_ids(ids),
            output_ids=message.output_ids,
            sent_chars=message.sent_chars,
            sampling=message.sampling,
        )
        return [(req_queue(group.group, group.incarnation), request)]

    def _choose(self, ids: Sequence[int]) -> GroupLoad | None:
        loads = self._loads()
        cached: Mapping[str, int] = {}
        if self._cached is not None and len(loads) > 1:
            cached = self._cached([load.group for load in loads], ids)
        return choose_group(loads, cached)

    def _prompt_ids(self, message: TokenizeMsg) -> tuple[str, list[int]]:
        """(The API's name of the prompt, its ids), checked."""
        given = [message.text, message.messages, message.prompt_ids]
        if sum(part is not None for part in given) != 1:
            raise _Refusal("prompt", "give exactly one of a text, messages and token ids")
        param = "prompt" if message.messages is None else "messages"
        same = (message.text, message.messages, message.add_special_tokens)
        try:
            if message.prompt_ids is None and same == self._last[0]:
                ids = self._last[1]  # another choice of the same request
            elif message.messages is not None:
                ids = self._tokenizer.encode_chat(message.messages)
            elif message.text is not None:
                ids = self._tokenizer.encode(message.text, message.add_special_tokens)
            else:
                ids = unpack_ids(message.prompt_ids or b"").tolist()
        except ValueError as error:
            raise _Refusal(param, str(error)) from error
        if not ids:
            raise _Refusal(param, "the prompt is empty: it must come to at least one token")
        if message.prompt_ids is None:
            self._last = (same, ids)
        self._check_ids(param, ids)
        self._check_ids("logit_bias", list(message.sampling.logit_bias or ()))
        return param, ids

    def _check_ids(self, param: str, ids: list[int]) -> None:
        for token_id in (min(ids), max(ids)) if ids else ():
            if not 0 <= token_id < self._vocab_size:
                raise _Refusal(
                    param,
                    f"{param} holds the token id {token_id}; the model's go from 0 to "
                    f"{self._vocab_size - 1}",
                )

    def _loads(self) -> list[GroupLoad]:
        """Groups that are formed, beat and do not drain, with the requests sent to them just now.

        While the bus does not answer nobody is silent.
        """
        now = self._clock()
        if not self._groups or now - self._read_at >= STATES_SECONDS:
            with contextlib.suppress(BusError):
                self._look(now, self._read_states())
        beating = [
            load for load, met in self._groups.values() if self._read_at - met < self._silence
        ]
        return [self._with_sent(load) for load in beating]

    def _look(self, now: float, states: Sequence[WorkerState]) -> None:
        paused, self._read_at = now - self._read_at > PAUSE_SECONDS, now
        known, self._groups = self._groups, {}
        for state in states:
            if state.load is not None and not state.draining:
                key = (state.boot, state.beat)
                met = now if paused or key not in known else known[key][1]
                self._groups[key] = (state.load, met)
        # A newer beat counts what was sent before it.
        unchanged = {load.incarnation for key, (load, _) in self._groups.items() if key in known}
        self._sent = Counter({i: n for i, n in self._sent.items() if i in unchanged})

    def _with_sent(self, load: GroupLoad) -> GroupLoad:
        sent = self._sent.get(load.incarnation, 0)
        if not sent:
            return load
        return GroupLoad(
            group=load.group, incarnation=load.incarnation, max_model_len=load.max_model_len,
            running=load.running, waiting=load.waiting + sent,
        )  # fmt: skip

    def give_up(self, message: Message) -> list[Addressed]:
        """A final error: no tokenizer survives this request."""
        if not isinstance(message, TokenizeMsg):
            return []
        error = ErrorInfo(
            status=500, code="request_lost", message="No tokenizer could read this request."
        )
        return [(reply_queue(message.route.gateway), _reply(message, error=error))]

    def tick(self) -> None:
        """Look whether the groups beat."""
        with contextlib.suppress(BusError):
            self._look(self._clock(), self._read_states())

    def busy(self) -> bool:
        """Never: a message is handled as soon as it is met."""
        return False

    def keep(self, gateways: Collection[tuple[str, int]]) -> None:
        """Nothing: it holds nothing."""

    def leave(self, peer: bool) -> list[Addressed]:
        """Nothing is left to say."""
        return []


def _reply(
    message: TokenizeMsg,
    *,
    error: ErrorInfo | None = None,
    again: Literal["refused"] | None = None,
    why: str = "",
) -> UserReply:
    return UserReply(
        uid=message.uid,
        attempt=message.attempt,
        boot=message.route.boot,
        pos=len(message.output_ids) // 4,
        text_at=message.sent_chars,
        error=error,
        again=again,
        why=why,
    )


def run_tokenizer(
    config: ProbedConfig,
    *,
    bus: Bus | None = None,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Serve until `stop` is set and the queue is empty; returns the exit code.

    It closes a `bus` that it made itself. Raises `UsageError` and `StartError` before `on_ready`.
    """
    folder = resolve_model(config.model, files="tokenizer")
    tokenizer = load_tokenizer(folder)
    vocab_size = model_vocab_size(folder) or tokenizer.vocab_size
    own_bus = bus is None
    bus = bus if bus is not None else connect_worker(config)
    lookup = _prefix_lookup(config)
    try:
        cached = None if lookup is None else lookup.cached
        cores: list[Core] = [
            TokenizerCore(
                tokenizer,
                vocab_size,
                bus.read_states,
                silence=config.heartbeat_timeout_seconds,
                cached=cached,
            )
        ]
        bus.subscribe(TOK)
        return run_loop(config, bus, cores, on_ready=on_ready, stop=stop)
    finally:
        if lookup is not None:
            lookup.close()
        if own_bus:
            bus.close()


def _prefix_lookup(config: ProbedConfig) -> "PrefixLookup | None":
    """On one machine there is one group, and nothing to look up."""
    if config.bus.startswith("ipc://"):
        return None
    from minisgl.bus.prefixes import PrefixLookup

    return PrefixLookup(config)
