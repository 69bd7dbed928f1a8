"""Load: many streaming clients of one OpenAI-compatible server, and what each of them saw."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np

from minisgl.bench.stats import RequestRecord
from minisgl.config import UsageError

_SAMPLE_TEXT = (
    "The quick brown fox jumps over the lazy dog; 1234567890 ways to count stars, rivers and "
    "mountains. Why does water boil earlier on high peaks? Engineers measure, writers describe, "
    "children ask again: what is light made of, who drew the first map, how old is the sea?"
)


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
    concurrency: int | None = None
    """Most open requests; one that is due waits for its turn. None: no limit."""
    seconds: float | None = None
    """Send the list again and again for so long; None: send it once."""
    seed: int = 0
    temperature: float = 0.6
    timeout: float = 600.0
    """Longest silence of the server within a request, in seconds."""


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


class Generator:
    """Sends a load to a target and keeps a record of each request."""

    def __init__(self, target: Target, load: Load) -> None:
        self.records: list[RequestRecord] = []
        self._target = target
        self._load = load
        self._rng = np.random.default_rng(load.seed + 1)
        self._zero = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._zero

    async def run(self, progress: Callable[[], object] = lambda: None) -> None:
        """Send everything and wait for the last answer. Calls `progress` after each."""
        load = self._load
        self._zero = time.perf_counter()
        turn = asyncio.Semaphore(load.concurrency) if load.concurrency else None
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(load.timeout, connect=30)

        async def one(client: httpx.AsyncClient, planned: Planned) -> None:
            try:
                await self._send(client, planned)
            finally:
                if turn:
                    turn.release()
            progress()

        async with (
            httpx.AsyncClient(
                base_url=self._target.url,
                headers=self._target.headers,
                limits=limits,
                timeout=timeout,
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            due = 0.0
            index = 0
            while load.seconds is not None or index < len(load.requests):
                if turn:
                    await turn.acquire()
                if load.rate is not None:
                    # From the clock, not from the last send: a late send does not slow the rest.
                    await asyncio.sleep(max(0.0, due - self._now()))
                    due += self._gap(load.rate)
                if load.seconds is not None and self._now() >= load.seconds:
                    break
                tasks.create_task(one(client, load.requests[index % len(load.requests)]))
                index += 1

    def _gap(self, rate: float) -> float:
        if self._load.arrival == "fixed":
            return 1 / rate
        return float(self._rng.exponential(1 / rate))

    async def _send(self, client: httpx.AsyncClient, planned: Planned) -> None:
        record = RequestRecord(start=self._now(), prompt_tokens=len(planned.prompt_ids))
        self.records.append(record)
        body = {
            "model": self._target.model,
            "prompt": planned.prompt_ids,
            "max_tokens": planned.output_tokens,
            "temperature": self._load.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    record.error = f"HTTP {answer.status_code}: {text[:300]}"
                else:
                    await self._read(answer, planned, record)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"
        if record.end is None:
            record.end = self._now()

    async def _read(self, answer: httpx.Response, planned: Planned, record: RequestRecord) -> None:
        """Follow one stream. Usage tells the tokens: a chunk may hold several, or none yet."""
        rest = b""
        chunks = 0
        usage: _Usage | None = None
        finished = False
        if planned.leave_after == 0:
            record.left = True
            return
        async for data in answer.aiter_raw():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: "):
                    continue  # a comment that keeps the connection alive
                payload = event[len(b"data: ") :]
                if payload == b"[DONE]":
                    finished = True
                    continue
                chunk = _decode_chunk(payload)
                if chunk.error is not None:
                    record.error = f"in the stream: {chunk.error}"
                    return
                usage = chunk.usage or usage
                if not chunk.choices:
                    continue
                record.end = self._now()
                if record.first is None:
                    record.first = record.end
                chunks += 1
                record.output_tokens = chunks
                if chunks == planned.leave_after:
                    record.left = True
                    return
        if not finished or usage is None:
            record.error = "the stream broke off before its end"
        elif usage.completion_tokens != planned.output_tokens:
            record.error = f"{usage.completion_tokens} tokens instead of {planned.output_tokens}"
        else:
            record.output_tokens = usage.completion_tokens
