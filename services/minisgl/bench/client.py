"""Load: many streaming clients of one OpenAI-compatible server, and what each of them saw."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from minisgl.bench.arrivals import Arrival
from minisgl.bench.sse import Endpoint
from minisgl.bench.stats import RequestRecord
from minisgl.config import UsageError

_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog; 1234567890 ways to count stars, rivers and "
    "mountains. Why does water boil earlier on high peaks? Engineers measure, writers describe, "
    "children ask again: what is light made of, who drew the first map, how old is the sea?"
)

LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send."""

    prompt_ids: list[int]
    output_tokens: int
    leave_after: int | None = None
    """Go away after so many chunks of output; None: stay to the end."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests arrive. Ends when `requests` are used up, or after `seconds`."""

    requests: Sequence[Planned]
    arrival: str = "poisson"
    """`fixed`: at even distances; `poisson`: at random ones with the same mean."""
    rate: float | None = None
    """Requests per second; None: as fast as `concurrency` allows."""
    times: Sequence[float] | None = None
    """When each of `requests` is due, in seconds from the start, rising; goes before `rate`."""
    concurrency: int | None = None
    """Most open requests; one that is due waits for its turn. None: no limit."""
    seconds: float | None = None
    """Send the list again and again for so long; None: send it once."""
    seed: int = 0
    temperature: float = 0.6
    timeout: float = 600.0
    """Longest silence of the server within a request, in seconds."""

    @property
    def open_loop(self) -> bool:
        """Requests are due at times of their own, however slow the server is. Then latencies count
        from when they were due: one that this process sends late has waited all the same."""
        return self.times is not None or self.rate is not None


class _Delta(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Delta] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what must be known of it to send sensible requests."""

    url: str
    model: str
    token_ids: list[int] = field(repr=False)
    """Ordinary token ids of its vocabulary."""
    max_model_len: int
    """Most tokens of a prompt and its output together."""
    headers: dict[str, str] = field(repr=False)


def look_at(url: str, model: str | None, api_key: str | None) -> Target:
    """Ask a running server for its model and some of its token ids.

    Raises `UsageError` if it does not answer, or not as this kind of server does.
    """
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=30) as client:
            if model is None:
                answer = client.get("/v1/models")
                model = str(answer.raise_for_status().json()["data"][0]["id"])
            body = {"model": model, "prompt": _SAMPLE_TEXT, "add_special_tokens": False}
            found = client.post("/tokenize", json=body).raise_for_status().json()
            ids, limit = sorted({int(i) for i in found["tokens"]}), int(found["max_model_len"])
    except httpx.HTTPStatusError as error:
        text = error.response.text[:300].strip()
        raise UsageError(
            f"{error.request.url} answered {error.response.status_code}: {text}"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UsageError(f"no answer from {url}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UsageError(
            f"{url} does not answer as an OpenAI-compatible server: {error!r}"
        ) from None
    return Target(url=url, model=model, token_ids=ids, max_model_len=limit, headers=headers)


def plan(
    target: Target,
    count: int,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    disconnect_share: float,
    seed: int,
) -> list[Planned]:
    """`count` random requests; lengths are uniform in the two closed ranges.

    Raises `UsageError` if the longest request does not fit the model.
    """
    longest = prompt_tokens[1] + output_tokens[1]
    if longest > target.max_model_len:
        raise UsageError(
            f"--prompt-tokens and --output-tokens allow {longest} tokens together, the server's "
            f"limit is {target.max_model_len}"
        )
    rng = np.random.default_rng(seed)
    planned = []
    for _ in range(count):
        prompt = rng.choice(target.token_ids, int(rng.integers(*prompt_tokens, endpoint=True)))
        output = int(rng.integers(*output_tokens, endpoint=True))
        leaves = rng.random() < disconnect_share
        planned.append(
            Planned(prompt.tolist(), output, int(rng.integers(0, output)) if leaves else None)
        )
    return planned


def plan_trace(target: Target, arrivals: Sequence[Arrival], seed: int) -> list[Planned]:
    """A random prompt for each arrival, which no cache knows.

    Raises `UsageError` if one does not fit the model.
    """
    for number, arrival in enumerate(arrivals, 1):
        longest = arrival.prompt_tokens + arrival.output_tokens
        if longest > target.max_model_len:
            raise UsageError(
                f"request {number} of the trace has {longest} tokens, prompt and output together; "
                f"the server's limit is {target.max_model_len}"
            )
    rng = np.random.default_rng(seed)
    return [
        Planned(rng.choice(target.token_ids, a.prompt_tokens).tolist(), a.output_tokens)
        for a in arrivals
    ]


class Generator:
    """Sends a load to a target, and keeps a record of each request and of its own slowness."""

    def __init__(self, target: Target, load: Load) -> None:
        self.records: list[RequestRecord] = []
        self.late: list[float] = []
        """How late this process woke up, in seconds, each `LOOK_SECONDS`: so late may each time of
        the records be."""
        self.processor_share = 0.0
        """Of one processor, what this process used."""
        self._target = target
        self._load = load
        self._rng = np.random.default_rng(load.seed + 1)
        self._zero = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    async def run(self, progress: Callable[[], object] = lambda: None) -> None:
        """Send everything and wait for the last answer. Calls `progress` after each."""
        load = self._load
        endpoint = Endpoint(self._target.url, self._target.headers)
        await endpoint.find()
        requests = [endpoint.request(self._body(planned)) for planned in load.requests]
        turn = asyncio.Semaphore(load.concurrency) if load.concurrency else None
        self._zero, used = time.perf_counter(), time.process_time()
        watch = asyncio.create_task(self._watch())

        async def one(index: int, record: RequestRecord) -> None:
            try:
                await self._send(endpoint, requests[index], load.requests[index], record)
            finally:
                if turn:
                    turn.release()
            progress()

        try:
            async with asyncio.TaskGroup() as tasks:
                due = 0.0
                count = 0
                while load.seconds is not None or count < len(requests):
                    index = count % len(requests)
                    if turn:
                        await turn.acquire()
                    if load.times is not None:
                        due = load.times[index]
                    if load.open_loop:
                        # From the clock, not from the last send: a late one does not slow the rest.
                        await asyncio.sleep(max(0.0, due - self._now()))
                    now = self._now()
                    if load.seconds is not None and now >= load.seconds:
                        break
                    record = RequestRecord(
                        start=due if load.open_loop else now,
                        sent=now,
                        prompt_tokens=len(load.requests[index].prompt_ids),
                    )
                    self.records.append(record)
                    tasks.create_task(one(index, record))
                    count += 1
                    if load.rate is not None:
                        due += self._gap(load.rate)
        finally:
            watch.cancel()
            self.processor_share = (time.process_time() - used) / max(self._now(), 1e-9)

    async def _watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            self.late.append(time.perf_counter() - began - LOOK_SECONDS)

    def _gap(self, rate: float) -> float:
        if self._load.arrival == "fixed":
            return 1 / rate
        return float(self._rng.exponential(1 / rate))

    def _body(self, planned: Planned) -> dict[str, object]:
        return {
            "model": self._target.model,
            "prompt": planned.prompt_ids,
            "max_tokens": planned.output_tokens,
            "temperature": self._load.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _send(
        self, endpoint: Endpoint, request: bytes, planned: Planned, record: RequestRecord
    ) -> None:
        reading = _Reading(planned, record, self._now)
        try:
            reader = await endpoint.exchange(request, reading.take, self._load.timeout)
            if not reader.status:
                record.error = "the connection was closed before an answer"
            elif reader.status != 200:
                text = reader.text.decode(errors="replace")
                record.error = f"HTTP {reader.status}: {text[:300]}"
            else:
                reading.finish()
        except (OSError, ValueError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.end is None:
            record.end = self._now()


class _Reading:
    """What one stream says. Usage tells the tokens: a chunk may hold several, or none yet."""

    def __init__(self, planned: Planned, record: RequestRecord, clock: Callable[[], float]) -> None:
        self._planned, self._record, self._clock = planned, record, clock
        self._usage: _Usage | None = None
        self._done = False

    def take(self, events: list[bytes]) -> bool:
        """Note what came. False: the client goes away."""
        record, now = self._record, self._clock()
        if self._planned.leave_after == 0:
            record.left = True
            return False
        for event in events:
            if not event.startswith(b"data: "):
                continue  # a comment that keeps the connection alive
            payload = event[len(b"data: ") :]
            if payload == b"[DONE]":
                self._done = True
                continue
            chunk = _decode_chunk(payload)
            if chunk.error is not None:
                record.error = f"in the stream: {chunk.error}"
                return False
            self._usage = chunk.usage or self._usage
            if not chunk.choices:
                continue
            if record.first is None:
                record.first = now
            elif record.end is not None:
                record.pause = max(record.pause, now - record.end)
            record.end = now
            record.output_tokens += 1
            if record.output_tokens == self._planned.leave_after:
                record.left = True
                return False
        return True

    def finish(self) -> None:
        """The answer is over: whether it is whole."""
        record, usage = self._record, self._usage
        if record.left or record.error is not None:
            return
        if not self._done or usage is None:
            record.error = "the stream broke off before its end"
        elif usage.completion_tokens != self._planned.output_tokens:
            record.error = (
                f"{usage.completion_tokens} tokens instead of {self._planned.output_tokens}"
            )
        else:
            record.output_tokens = usage.completion_tokens
