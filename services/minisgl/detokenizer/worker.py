"""The detokenizer: rank 0's new tokens in, the gateways' replies out.

`DetokenizerCore` holds the state of each computation and does no input or output.
"""

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from minisgl.bus import TOK, Bus, connect_worker, detok_queue, reply_queue
from minisgl.config import ProbedConfig
from minisgl.detokenizer.stream import TextStream
from minisgl.hub import model_vocab_size, resolve_model
from minisgl.lifecycle import boot_clock
from minisgl.messages import (
    AuditMsg,
    DetokenizeBatch,
    DetokenizeMsg,
    FinishReason,
    Message,
    Opening,
    Source,
    TokenLogprobs,
    UserReply,
    pack_ids,
    unpack_ids,
)
from minisgl.text import Tokenizer, load_tokenizer
from minisgl.tokenizer.loop import Addressed, Core, run_loop
from minisgl.tokenizer.worker import TokenizerCore

log = logging.getLogger(__name__)

SILENT_AUDITS_SECONDS = 3.0
"""Three audits: what they have left out, nobody computes any more."""

PAUSE_SECONDS = 2.0
"""Every rank 0 speaks each second. If none was heard for so long, that proves nothing of any of
them: the bus was away, or this process stood still."""

Key = tuple[bytes, int, str, int, int]
"""(uid, attempt, group, incarnation, run): one computation."""
Row = tuple[bytes, int, int, int, int, bytes]
"""What `DetokenizeBatch.rows` gives."""


@dataclass(slots=True)
class _State:
    """One computation, from its opening to its end."""

    gateway: str
    boot: int
    source: Source
    stream: TextStream
    pos: int
    """Output tokens handled so far, over all attempts."""
    heard: float
    """When rank 0 last spoke of it, in seconds of the clock."""
    unfed: list[int] = field(default_factory=list)
    """Output of earlier attempts, until the first message after the opening: only that says
    whether the last of these ids is an EOS without text."""
    opening: Opening | None = None
    """Until the first reply has said what is in it."""


class DetokenizerCore:
    """Decodes for every computation that opened here. `clock` gives seconds."""

    role: Literal["tokenizer", "detokenizer"] = "detokenizer"
    handles: tuple[type, ...] = (DetokenizeBatch, DetokenizeMsg)

    def __init__(
        self,
        tokenizer: Tokenizer,
        heartbeat_timeout_seconds: float,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._tokenizer = tokenizer
        self._silence = 2 * heartbeat_timeout_seconds
        self._clock = clock
        self._heard = clock()
        """When anybody was heard last: until then silence counts."""
        self._states: dict[Key, _State] = {}
        self._over: dict[Key, float] = {}
        """Computations that have ended here, and when: what still comes of them is ignored."""

    def handle(self, message: Message) -> list[Addressed]:
        """What the gateways get to know. Raises `ValueError` for columns that do not fit."""
        now = self._clock()
        if now - self._heard > PAUSE_SECONDS:
            for state in self._states.values():
                state.heard = now
        self._heard = now
        out: list[Addressed] = []
        if isinstance(message, DetokenizeMsg):
            self._message(message, out)
        elif isinstance(message, DetokenizeBatch):
            rows = message.rows()
            for part in message.others:
                self._message(part, out)
            if message.audit:
                self._audit(message, rows, out)
            else:
                self._columns(message, rows, out)
        return out

    def _message(self, msg: DetokenizeMsg, out: list[Addressed]) -> None:
        source, route = msg.source, msg.route
        key = (msg.uid, msg.attempt, source.group, source.incarnation, source.run)
        if key in self._over:
            return
        state = self._states.get(key)
        try:
            ids = unpack_ids(msg.ids).tolist()
            if state is None and msg.opening is not None:
                state = self._states[key] = self._open(msg, msg.opening)
        except ValueError as error:
            self._lost(key, route.gateway, route.boot, msg.pos, f"unreadable: {error}", out)
            return
        if state is None:
            self._lost(key, route.gateway, route.boot, msg.pos, "unknown here", out)
        elif ids or msg.finish or state.opening is not None:
            self._advance(key, state, msg.pos, ids, msg.logprobs, msg.finish, out)

    def _open(self, msg: DetokenizeMsg, opening: Opening) -> _State:
        return _State(
            gateway=msg.route.gateway,
            boot=msg.route.boot,
            source=msg.source,
            stream=TextStream(self._tokenizer, stop=opening.stop, sent_chars=opening.sent_chars),
            pos=msg.pos,
            heard=self._clock(),
            unfed=unpack_ids(opening.output_ids).tolist(),
            opening=opening,
        )

    def _columns(self, batch: DetokenizeBatch, rows: list[Row], out: list[Addressed]) -> None:
        for uid, attempt, run, pos, gateway, ids in rows:
            key = (uid, attempt, batch.group, batch.incarnation, run)
            state = self._states.get(key)
            if state is not None:
                token = [int.from_bytes(ids, "little", signed=True)]
                self._advance(key, state, pos, token, None, None, out)
            elif key not in self._over:
                name, boot = batch.gateways[gateway]
                self._lost(key, name, boot, pos, "unknown here", out)

    def _advance(
        self,
        key: Key,
        state: _State,
        pos: int,
        ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishReason | None,
        out: list[Addressed],
    ) -> None:
        """Take new ids, and add the reply. One below `pos` is a duplicate, one above a gap."""
        state.heard = self._clock()
        if pos < state.pos:
            return
        if pos > state.pos:
            why = f"a gap: {pos - state.pos} tokens are missing at {state.pos}"
            self._lost(key, state.gateway, state.boot, state.pos, why, out)
            return
        stream, text_at, text = state.stream, state.stream.text_at, ""
        if ids or finish:
            before, state.unfed = state.unfed, []
            visible = before + ids
            if finish == "stop" and visible:
                visible.pop()  # an EOS or stop id has no text
            text, used = stream.push(visible)
            if not stream.stopped and finish is not None:
                text += stream.finish()
                used = len(visible)
            if stream.stopped:
                if used < len(visible):
                    ids = ids[: max(0, used - len(before))]
                finish = "stop"
        opening, state.opening = state.opening, None
        reply = UserReply(
            uid=key[0], attempt=key[1], boot=state.boot, source=state.source, pos=pos,
            ids=pack_ids(ids), logprobs=logprobs and logprobs[: len(ids)], text=text,
            text_at=text_at, finish=finish,
        )  # fmt: skip
        if opening is not None:
            reply.prompt_ids = opening.prompt_ids
            reply.cached_tokens = opening.cached_tokens
        out.append((reply_queue(state.gateway), reply))
        state.pos += len(ids)
        if finish is not None:
            self._end(key)

    def _lost(
        self, key: Key, gateway: str, boot: int, pos: int, why: str, out: list[Addressed]
    ) -> None:
        uid, attempt, group, incarnation, run = key
        log.info("lost a computation: %s", why, extra={"uid": uid.hex(), "group": group})
        reply = UserReply(
            uid=uid, attempt=attempt, boot=boot, pos=pos, again="lost", why=why,
            source=Source(group=group, incarnation=incarnation, run=run),
        )  # fmt: skip
        out.append((reply_queue(gateway), reply))
        self._end(key)

    def _end(self, key: Key) -> None:
        self._states.pop(key, None)
        self._over[key] = self._clock()

    def _audit(self, batch: DetokenizeBatch, rows: list[Row], out: list[Addressed]) -> None:
        now = self._clock()
        listed: set[Key] = set()
        held: list[list[tuple[bytes, int, int, int]]] = [[] for _ in batch.gateways]
        for uid, attempt, run, pos, gateway, _ in rows:
            held[gateway].append((uid, attempt, run, pos))
            key = (uid, attempt, batch.group, batch.incarnation, run)
            listed.add(key)
            state = self._states.get(key)
            if state is not None:
                state.heard = now
        # An audit comes behind all that was said before it. What it leaves out was aborted.
        source = (batch.group, batch.incarnation)
        for key in [k for k in self._states if k[2:4] == source and k not in listed]:
            del self._states[key]
        for (name, boot), of_gateway in zip(batch.gateways, held, strict=True):
            audit = AuditMsg(
                boot=boot, group=batch.group, incarnation=batch.incarnation,
                detokenizer=batch.detokenizer, held=of_gateway, number=batch.number,
            )  # fmt: skip
            out.append((reply_queue(name), audit))

    def give_up(self, message: Message) -> list[Addressed]:
        """Nothing: its queue hands each entry out once."""
        return []

    def tick(self) -> None:
        """Let go of what was silent for twice the heartbeat's time-out while others spoke."""
        oldest = self._heard - self._silence
        for key in [k for k, state in self._states.items() if state.heard < oldest]:
            del self._states[key]
        while self._over:  # in the order of their times
            key = next(iter(self._over))
            if self._over[key] >= oldest:
                break
            del self._over[key]

    def busy(self) -> bool:
        """Whether a computation is open."""
        return bool(self._states)

    def keep(self, gateways: Collection[tuple[str, int]]) -> None:
        """Let go of what gateways asked for that are not among these."""
        for key, state in list(self._states.items()):
            if (state.gateway, state.boot) not in gateways:
                del self._states[key]

    def leave(self, peer: bool) -> list[Addressed] | None:
        """Hand all back to be replayed on a `peer`. Without one, go on while a rank computes."""
        if not peer:
            oldest = self._clock() - SILENT_AUDITS_SECONDS
            if any(state.heard >= oldest for state in self._states.values()):
                return None
        out: list[Addressed] = []
        for key, state in list(self._states.items()):
            reply = UserReply(
                uid=key[0], attempt=key[1], boot=state.boot, source=state.source, pos=state.pos,
                text_at=state.stream.text_at, again="handback", why="the detokenizer leaves",
            )  # fmt: skip
            out.append((reply_queue(state.gateway), reply))
            self._end(key)
        return out


def run_detokenizer(
    config: ProbedConfig,
    *,
    bus: Bus | None = None,
    tokenizes: bool = False,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Serve until `stop` is set and the work is done; returns the exit code.

    With `tokenizes` this process is the tokenizer too. It closes a `bus` that it made itself.
    Raises `UsageError` and `StartError` before `on_ready`.
    """
    folder = resolve_model(config.model, files="tokenizer")
    tokenizer = load_tokenizer(folder)
    own_bus = bus is None
    bus = bus if bus is not None else connect_worker(config)
    try:
        cores: list[Core] = [DetokenizerCore(tokenizer, config.heartbeat_timeout_seconds)]
        bus.subscribe(detok_queue(config.id))
        if tokenizes:
            vocab_size = model_vocab_size(folder) or tokenizer.vocab_size
            cores.append(TokenizerCore(tokenizer, vocab_size, bus.read_states))
            bus.subscribe(TOK)
        return run_loop(config, bus, cores, on_ready=on_ready, stop=stop)
    finally:
        if own_bus:
            bus.close()
