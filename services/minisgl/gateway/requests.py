"""The owner of every request: judges each reply, replays what was lost, aborts what is not wanted.

Messages may come twice, late, from a computation that was given up, or never. Only what is decided
here counts: a reply is taken if it belongs to the current attempt and its bound computation and
follows exactly on what the client has; a gap, a silence or a worker that left starts another
attempt with what the client has as its beginning. So tokens reach the client once and in order.

No I/O and no clock of its own: `now` (seconds) is an argument, messages to send are left in
`outbox`, and news goes to the request's `sink`.
"""

import logging

from minisgl.bus.base import TOK, req_queue
from minisgl.gateway.fleet import PAUSE_SECONDS, Fleet
from minisgl.gateway.request import Limits, News, Request
from minisgl.messages import (
    AbortMsg,
    AuditMsg,
    ErrorInfo,
    Message,
    Route,
    Source,
    TokenizeMsg,
    UserReply,
    pack_ids,
    unpack_ids,
)

log = logging.getLogger(__name__)

MAX_AUDITS_WITHOUT = 3
"""A request that so many audits of its own group leave out is lost."""

REFUSAL_PAUSE_SECONDS = 0.25
"""A refused request waits so long, so that a group that just leaves is not asked in a loop."""

SILENCE_PAUSE_SECONDS = 2.0
"""After a silence: beats come each second, so whoever chooses a group sees by then that one hangs.
At once the next attempt would often go to the same group, and twice the time-out would be lost."""


class Requests:
    """All open requests of this gateway process."""

    def __init__(self, gateway: str, boot: int, fleet: Fleet, limits: Limits) -> None:
        self.gateway = gateway
        self.boot = boot
        self.fleet = fleet
        self.limits = limits
        self.outbox: list[tuple[str, Message]] = []
        """(queue, message) in the order of sending; see `take_outbox`."""
        self.replays = 0
        """Attempts after the first, over all requests."""
        self.waiting = 0
        """Open requests without a first token."""
        self._open: dict[bytes, Request] = {}
        self._ticked: float | None = None
        self._aborted: set[tuple[bytes, int, int]] = set()  # in the outbox already

    def __len__(self) -> int:
        return len(self._open)

    def take_outbox(self) -> list[tuple[str, Message]]:
        """The (queue, message) to send now, in this order."""
        taken, self.outbox = self.outbox, []
        self._aborted.clear()
        return taken

    # --- what the client does ---------------------------------------------------------------

    def start(self, request: Request, now: float) -> None:
        """Send the first attempt. The caller has looked whether somebody can take it."""
        self._open[request.uid] = request
        self.waiting += 1
        self._attempt(request, now)

    def drop(self, request: Request) -> None:
        """The client does not want it any more. A computation still unbound is aborted later."""
        if not request.done:
            self._close(request)
            self._abort(request.uid, request.attempt, request.source)

    def fail_all(self, error: ErrorInfo) -> None:
        """End every open request with this error."""
        for request in list(self._open.values()):
            self._abort(request.uid, request.attempt, request.source)
            self._fail(request, error)

    # --- what comes from the bus ------------------------------------------------------------

    def reply(self, msg: UserReply, now: float) -> None:
        """Judge one reply."""
        request = self._open.get(msg.uid)
        if (
            request is None
            or msg.boot != self.boot
            or msg.attempt != request.attempt
            or request.resume_at is not None  # this attempt was given up already
            or (request.source is not None and msg.source != request.source)
        ):
            self._abort(msg.uid, msg.attempt, msg.source)
            return
        request.heard = now
        request.source = msg.source
        if msg.source is not None:
            request.holder = (msg.source.group, msg.source.incarnation)
        if msg.error is not None:
            self._fail(request, msg.error)
        elif msg.again == "lost" or msg.finish == "abort":
            self._retry(request, now, f"its state was lost: {msg.why or 'no reason given'}")
        elif msg.again is not None:
            self._hold(request, now, REFUSAL_PAUSE_SECONDS if msg.again == "refused" else 0.0)
        elif msg.source is not None:
            self._take(request, msg, now)

    def _take(self, request: Request, msg: UserReply, now: float) -> None:
        """Take new output of the current attempt if it follows on what the client has."""
        request.audits_without = 0
        if msg.pos < len(request.ids):
            return
        readable = len(msg.ids) % 4 == 0 and len(msg.prompt_ids or b"") % 4 == 0
        ids = unpack_ids(msg.ids).tolist() if readable else []
        whole = (
            readable
            and msg.pos == len(request.ids)
            and msg.text_at == request.sent_chars
            and (request.prompt_ids is not None or msg.prompt_ids is not None)
            and (request.sampling.logprobs is None or len(msg.logprobs or ()) == len(ids))
        )
        if not whole:
            self._retry(request, now, "part of its output was lost on the way")
            return
        request.held_since = None
        if request.prompt_ids is None:
            request.prompt_ids = msg.prompt_ids
            request.cached_tokens = msg.cached_tokens
        if ids:
            if not request.ids:
                self.waiting -= 1
            request.failures = request.forgiven = 0
            request.ids.extend(ids)
        request.sent_chars += len(msg.text)
        if msg.finish is not None:
            self._close(request)
            if msg.finish == "stop" and request.sampling.stop:
                self._abort(request.uid, request.attempt, msg.source)  # it may still compute
        request.sink(News(request, ids, msg.logprobs, msg.text, msg.finish))

    def audit(self, msg: AuditMsg, now: float) -> None:
        """Compare what one group holds (through one detokenizer) with what is wanted of it."""
        held: set[bytes] = set()
        for uid, attempt, run, _pos in msg.held:
            source = Source(group=msg.group, incarnation=msg.incarnation, run=run)
            request = self._open.get(uid)
            wanted = (
                request is not None
                and msg.boot == self.boot
                and attempt == request.attempt
                and request.resume_at is None
                and request.source in (None, source)
            )
            if not wanted or request is None:
                self._abort(uid, attempt, source)
                continue
            held.add(uid)
            request.heard = now
            request.holder = (msg.group, msg.incarnation)
            request.audits_without = 0
            if request.source is not None:
                request.audited = max(request.audited, msg.number)
        if msg.boot != self.boot:
            return
        for request in list(self._open.values()):
            source_ = request.source
            if (
                source_ is not None
                and request.resume_at is None
                and request.uid not in held
                and source_.group == msg.group
                and source_.incarnation == msg.incarnation
                and request.detokenizer[0] == msg.detokenizer
                and (msg.number > request.audited or not msg.number)
            ):
                request.audited = msg.number
                request.audits_without += 1
                if request.audits_without >= MAX_AUDITS_WITHOUT:
                    self._retry(request, now, "its group does not hold it any more")

    # --- what time does ---------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at every open request's clocks and workers; called a few times a second."""
        if self._ticked is not None and now - self._ticked > PAUSE_SECONDS:
            self.restart_clocks(now)
        self._ticked = now
        for request in list(self._open.values()):
            if now >= request.deadline:
                self._abort(request.uid, request.attempt, request.source)
                self._fail(request, ErrorInfo(
                    status=504, code="request_timeout",
                    message="The request took longer than this server allows; lower max_tokens "
                    "or raise --request-timeout-seconds.",
                ))  # fmt: skip
            elif request.resume_at is not None:
                if self.fleet.worker_left("detokenizer", *request.detokenizer, now):
                    # Then it is not the group that was silent: nothing is to be waited for.
                    request.resume_at = min(request.resume_at, now)
                self._resume(request, now)
            elif self.fleet.worker_left("detokenizer", *request.detokenizer, now):
                self._retry(request, now, "its detokenizer has left")
            elif request.holder is not None and self.fleet.group_left(*request.holder):
                why = f"group {request.holder[0]} has left"
                self._retry(request, now, why, forgiven=self._on_its_way(request))
            elif request.holder is None and self.fleet.all_left(request.heard, now):
                why = "every group that could have it has left"
                self._retry(request, now, why, forgiven=self._on_its_way(request))
            elif now - request.heard >= self.limits.silence * (1 if request.source else 2):
                why = "nothing was heard of it for too long"
                self._retry(request, now, why, SILENCE_PAUSE_SECONDS, self._on_its_way(request))

    def _on_its_way(self, request: Request) -> bool:
        """Whether this attempt met a dead worker before any group had it, so far as is known.

        It is not the request's fault then. But one that kills a group before that says a word looks
        the same, so as many are forgiven in a row as count, and no more.
        """
        unwell = self.fleet.unwell
        return (
            request.source is None
            and unwell is not None
            and unwell >= request.heard
            and request.forgiven < self.limits.max_attempts
        )

    def restart_clocks(self, now: float) -> None:
        """After an outage of the bus or a pause of our own: silence until now proves nothing."""
        for request in self._open.values():
            request.heard = now

    # --- attempts ---------------------------------------------------------------------------

    def _attempt(self, request: Request, now: float) -> None:
        # Where the last attempt failed another process may be starting, which was not seen yet.
        avoid = request.detokenizer[0] if request.failures or request.forgiven else ""
        detokenizer = self.fleet.next_detokenizer(now, avoid)
        if detokenizer is None:
            request.resume_at = now
            return
        request.resume_at = None
        request.attempt += 1
        self.replays += request.attempt > 1
        request.source = request.holder = None
        request.audits_without = request.audited = 0
        request.heard = now
        request.detokenizer = (detokenizer.id, detokenizer.boot)
        known, prompt = request.prompt_ids, request.prompt
        self.outbox.append((TOK, TokenizeMsg(
            uid=request.uid,
            attempt=request.attempt,
            route=Route(gateway=self.gateway, boot=self.boot, detokenizer=detokenizer.id),
            text=prompt.text if known is None else None,
            messages=prompt.messages if known is None else None,
            prompt_ids=prompt.ids if known is None else known,
            add_special_tokens=prompt.add_special_tokens,
            output_ids=pack_ids(request.ids),
            sent_chars=request.sent_chars,
            sampling=request.sampling,
        )))  # fmt: skip

    def _retry(
        self, request: Request, now: float, why: str, pause: float = 0.0, forgiven: bool = False
    ) -> None:
        """This attempt failed: start another one, or give up after `max_attempts` in a row."""
        self._abort(request.uid, request.attempt, request.source)
        request.forgiven += forgiven
        request.failures += not forgiven
        if request.failures >= self.limits.max_attempts:
            self._fail(request, ErrorInfo(
                status=500, code="request_lost",
                message=f"The request failed {request.failures} times in a row without a new "
                f"token; the last time {why}.",
            ))  # fmt: skip
            return
        log.warning("replaying: %s", why, extra={"uid": request.uid.hex(), "pos": len(request.ids)})
        request.resume_at = now + pause
        self._resume(request, now)

    def _hold(self, request: Request, now: float, pause: float) -> None:
        """No group took it, or its worker leaves: no failure, but not for ever either."""
        self._abort(request.uid, request.attempt, request.source)
        if request.held_since is None:
            request.held_since = now
        request.resume_at = now + pause
        self._resume(request, now)

    def _resume(self, request: Request, now: float) -> None:
        missing = self.fleet.missing(now)
        if missing is not None and request.held_since is None:
            request.held_since = now
        since = request.held_since
        if since is not None and now - since >= self.limits.replay_wait:
            self._fail(request, ErrorInfo(
                status=503, code="no_group_ready",
                message=f"The request waited {self.limits.replay_wait:g} s for a group: "
                f"{missing or 'every one of them refused it'}.",
            ))  # fmt: skip
        elif missing is None and request.resume_at is not None and now >= request.resume_at:
            self._attempt(request, now)

    # --- ends -------------------------------------------------------------------------------

    def _close(self, request: Request) -> None:
        request.done = True
        self._open.pop(request.uid, None)
        if not request.ids:
            self.waiting -= 1

    def _fail(self, request: Request, error: ErrorInfo) -> None:
        self._close(request)
        request.sink(News(request, error=error))

    def _abort(self, uid: bytes, attempt: int, source: Source | None) -> None:
        """Tell rank 0 that this computation is not wanted; once in each batch of the outbox."""
        if source is not None and (uid, attempt, source.run) not in self._aborted:
            self._aborted.add((uid, attempt, source.run))
            queue = req_queue(source.group, source.incarnation)
            self.outbox.append((queue, AbortMsg(uid=uid, attempt=attempt, run=source.run)))
