"""One client's request: its choices, the news that waits to be written, and its figures."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from minisgl.gateway.metrics import Metrics
from minisgl.gateway.request import News, Request


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


@dataclass(slots=True)
class Usage:
    """Tokens of a call: each prompt once, each choice's output."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Call:
    """Collects the news of all choices of one request for the one task that writes the answer."""

    def __init__(self, prefix: str, n: int, metrics: Metrics, clock: Callable[[], float]) -> None:
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.n = n
        """Choices of each prompt; choice `index` belongs to prompt `index // n`."""
        self.requests: list[Request] = []
        self.open = 0
        """Choices whose end was not taken yet."""
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._prompts: dict[int, tuple[int, int]] = {}
        self._outcome = "cancelled"
        self._refused = False
        """A worker found the request itself to be wrong, as the gateway does at the door."""
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None
        self._left = False

    def add(self, request: Request) -> None:
        """One more choice."""
        self.requests.append(request)
        self.open += 1

    def sink(self, news: News) -> None:
        """Take news of one choice; does not wait."""
        self._news.append(news)
        request = news.request
        if request.prompt_ids is not None and request.index // self.n not in self._prompts:
            counts = (request.prompt_tokens, request.cached_tokens)
            self._prompts[request.index // self.n] = counts
            self._metrics.prompt_tokens.inc(counts[0])
            self._metrics.cached_tokens.inc(counts[1])
        if news.ids:
            self._metrics.generation_tokens.inc(len(news.ids))
            self._last = self._clock()
            if self._first is None:
                self._first = self._last
                self._metrics.first_token.observe(self._first - self._started)
        if news.error is not None and 400 <= news.error.status < 500:
            self._refused = True
        elif news.error is not None:
            self._outcome = "error"
        elif news.finish is not None and self._outcome != "error":
            self._outcome = news.finish
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def leave(self) -> None:
        """The client is gone: whoever waits for news is told."""
        self._left = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, timeout: float | None = None) -> list[News]:
        """The news since the last call; none after `timeout` seconds. Raises `ClientLeft`."""
        if not self._news and not self._left:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(timeout):
                    await self._waiter
            except TimeoutError:
                pass
            finally:
                self._waiter = None
        if self._left:
            raise ClientLeft
        taken, self._news = self._news, []
        self.open -= sum(news.finish is not None or news.error is not None for news in taken)
        return taken

    def usage(self) -> Usage:
        """What was computed so far."""
        return Usage(
            prompt_tokens=sum(tokens for tokens, _ in self._prompts.values()),
            completion_tokens=sum(len(request.ids) for request in self.requests),
            cached_tokens=sum(cached for _, cached in self._prompts.values()),
        )

    def close(self) -> None:
        """Count the request; called once, when its answer is written or given up.

        What the client did wrong is not counted, whoever found it.
        """
        if self._refused and self._outcome != "error":
            return
        self._metrics.requests.labels("cancelled" if self._left else self._outcome).inc()
        self._metrics.duration.observe(self._clock() - self._started)
        longest = max((len(request.ids) for request in self.requests), default=0)
        if longest > 1 and self._first is not None:
            self._metrics.token_gap.observe((self._last - self._first) / (longest - 1))
