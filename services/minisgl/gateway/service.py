"""The gateway as one object: what the routes use, and what messages and time do to it."""

import logging
import secrets
import time
from collections.abc import Callable

from minisgl.bus.base import Bus, ReplacedError
from minisgl.config import GatewayConfig, new_boot
from minisgl.gateway.auth import Keys
from minisgl.gateway.calls import Call
from minisgl.gateway.errors import ApiError, model_not_found
from minisgl.gateway.fleet import Fleet
from minisgl.gateway.link import Link
from minisgl.gateway.metrics import Metrics
from minisgl.gateway.request import Limits, Prompt, Request
from minisgl.gateway.requests import Requests
from minisgl.lifecycle import boot_clock
from minisgl.messages import (
    AuditMsg,
    ErrorInfo,
    Message,
    SamplingParams,
    UserReply,
    WorkerState,
)
from minisgl.text import Tokenizer

log = logging.getLogger(__name__)

UID_BYTES = 16


class Service:
    """One gateway. `vocabulary` is the number of token ids that the model knows."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        tokenizer: Tokenizer,
        vocabulary: int,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self.config = config
        self.model = config.served_model_name or config.model
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.clock = clock
        self.boot = new_boot()
        self.created = int(time.time())
        self.draining = False
        self.failure: BaseException | None = None
        """Why the process must end, with an error; set once."""
        self.keys = Keys(config.api_keys, config.api_keys_file, clock)
        self.fleet = Fleet(config.heartbeat_timeout_seconds)
        self.requests = Requests(
            config.id,
            self.boot,
            self.fleet,
            Limits(
                silence=config.heartbeat_timeout_seconds,
                max_attempts=config.max_attempts,
                replay_wait=config.replay_wait_seconds,
            ),
        )
        self.calls: set[Call] = set()
        """Calls whose answers are not written yet."""
        self._beat = 0
        self._lacking: str | None = ""
        """What was last said to be missing; empty: nothing was said yet."""
        self._served = False
        self.link = Link(
            bus,
            config.id,
            clock,
            state=self._state,
            take=self._take,
            look=self._look,
            fail=self._fail,
        )
        self.metrics = Metrics(
            self.fleet.loads,
            lambda: self.requests.replays,
            lambda: [("gateway", config.id, self.link.errors), *self.fleet.bus_errors()],
        )

    # --- from the link ----------------------------------------------------------------------

    def _state(self) -> WorkerState:
        return WorkerState(
            role="gateway",
            id=self.config.id,
            boot=self.boot,
            beat=self._beat,
            pod=self.config.pod,
            draining=self.draining,
        )

    def _take(self, messages: list[Message]) -> None:
        now = self.clock()
        for message in messages:
            if isinstance(message, UserReply):
                self.requests.reply(message, now)
            elif isinstance(message, AuditMsg):
                self.requests.audit(message, now)
            else:
                self.link.count_stray()
                log.warning("dropped a %s: it is not for a gateway", type(message).__name__)
        self._flush()

    def _look(self, states: list[WorkerState]) -> None:
        now = self.clock()
        for state in states:
            if (state.role, state.id) == ("gateway", self.config.id) and state.boot != self.boot:
                # It would read our replies. Ours was published before this look, so it is newer.
                self._fail(ReplacedError(f"another gateway took the id {self.config.id!r}"))
        if self.fleet.observe(states, now):
            self.requests.restart_clocks(now)
        self.tick()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            log.error("the gateway ends: %s", error)
            self.failure = error

    def tick(self) -> None:
        """Called at least each half second by the loop; the beat of this worker."""
        now = self.clock()
        self._beat += 1
        if self.link.healthy():
            self._say_what_is_missing(now)
        else:
            self.requests.restart_clocks(now)
        self.requests.tick(now)
        self._flush()

    def _say_what_is_missing(self, now: float) -> None:
        lacking = self.fleet.missing(now)
        if lacking == self._lacking:
            return
        self._lacking = lacking
        if lacking is None:
            self._served = True
            log.info("requests can be served")
        else:  # until the others have started it is nothing to worry about
            level = logging.WARNING if self._served else logging.INFO
            log.log(level, "requests cannot be served: %s", lacking)

    def _flush(self) -> None:
        self.link.send(self.requests.take_outbox())

    # --- from the routes --------------------------------------------------------------------

    def missing(self) -> ApiError | None:
        """Why no new request can be served now, as a 503; None if one can."""
        if self.draining:
            return ApiError(503, "This gateway is shutting down.", code="shutting_down")
        if not self.link.healthy():
            return ApiError(503, "The message bus does not answer.", code="bus_unavailable")
        missing = self.fleet.missing(self.clock())
        if missing is None:
            return None
        return ApiError(503, f"Cannot serve now: {missing}.", code="no_group_ready")

    def check_model(self, asked: str) -> None:
        """Raises `ApiError` (404) unless the model is the one served."""
        if asked != self.model:
            raise model_not_found(asked, self.model)

    def start(self, prefix: str, prompts: list[Prompt], samplings: list[SamplingParams]) -> Call:
        """Send each prompt with each of the samplings, as one call.

        Raises `ApiError` if nobody can serve it (503), it cannot fit (400) or too many wait
        already (429).
        """
        error = self.missing()
        if error is not None:
            raise error
        for prompt in prompts:
            self._check_length(prompt)
        count = len(prompts) * len(samplings)
        limit = max(1, self.config.max_queued_requests)  # who comes alone has nobody to wait for
        if count > limit:
            raise ApiError(
                400,
                f"The request asks for {count} choices; this server queues at most {limit}.",
                param="n" if len(samplings) > 1 else "prompt",
            )
        if self.requests.waiting + count > limit:
            raise ApiError(
                429,
                f"{self.requests.waiting} requests wait already; at most {limit} may.",
                code="queue_full",
            )
        now = self.clock()
        call = Call(prefix, len(samplings), self.metrics, self.clock)
        pairs = [(prompt, sampling) for prompt in prompts for sampling in samplings]
        for index, (prompt, sampling) in enumerate(pairs):
            request = Request(
                uid=secrets.token_bytes(UID_BYTES),
                index=index,
                prompt=prompt,
                sampling=sampling,
                sink=call.sink,
                deadline=now + self.config.request_timeout_seconds,
            )
            call.add(request)
            self.requests.start(request, now)
        self.calls.add(call)
        self._flush()
        return call

    def _check_length(self, prompt: Prompt) -> None:
        """Refuse at once what is too long beyond doubt; the tokenizer says the rest.

        To encode megabytes takes seconds, in a process that may have text of others to decode, and
        each choice would carry its copy there. Of a template it is assumed that it keeps most of
        what it is given.
        """
        limit = self.fleet.max_model_len
        if prompt.ids is not None:
            tokens, at_least = len(prompt.ids) // 4, ""
        else:
            texts = [m["content"] for m in prompt.messages or ()] or [prompt.text or ""]
            tokens, at_least = self.tokenizer.fewest_tokens("".join(texts)), "at least "
        if limit is not None and tokens >= limit:
            raise ApiError(
                400,
                f"the prompt has {at_least}{tokens} tokens, and the model's context length is "
                f"{limit} tokens for the prompt and at least one of output",
                param="prompt" if prompt.messages is None else "messages",
                code="context_length_exceeded",
            )

    def end(self, call: Call) -> None:
        """The answer is written or given up: what still runs for it is aborted."""
        for request in call.requests:
            self.requests.drop(request)
        self.calls.discard(call)
        call.close()
        self._flush()

    def end_all(self) -> None:
        """The time to drain is over: end what is left with an error."""
        self.requests.fail_all(
            ErrorInfo(
                status=503,
                code="shutting_down",
                message="This gateway had to stop before the answer was complete.",
            )
        )
        self._flush()
