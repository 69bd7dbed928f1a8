"""Constant load on a service on Redis, a random fault each ten seconds: nothing lost, nothing kept.

Two groups, one of them of two ranks, two gateways, tokenizers and detokenizers, one Redis. The load
stops for a moment every two minutes, so that what each process holds can be compared at rest.
"""

import contextlib
import http.client
import json
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from tests.deployment import Deployment, T
from tests.faults import (
    Fault,
    NotDoneError,
    everything_is_hostile,
    groups_are_destroyed,
    kill,
    pause,
    redis_clients_are_killed,
    redis_fills_up,
    redis_freezes,
    redis_is_flushed,
    redis_restarts,
    terminate,
)
from tests.redis_server import RedisServer
from tests.support import metrics, open_files, resident_bytes
from tests.tiny import build_tiny

SEED = int(os.environ.get("MINISGL_SOAK_SEED", "1"))
CLIENTS = 10
CASES = 40
FAULT_SECONDS = 10.0
PART_SECONDS = 120.0
"""How long load and faults last between two moments of rest."""
STREAM_SECONDS = 300.0
REST_SECONDS = 180.0
JSON = {"Content-Type": "application/json"}
REFUSALS = {"bus_unavailable", "no_group_ready"}
"""What a new request may be told while Redis, or every group, is away: 503 with Retry-After."""
MAX_FILES = 8
"""Files that a process may have more at a later rest: a connection may be between two lives."""
MAX_GROWTH = {"gateway": 24 << 20, "tokenizer": 16 << 20, "detokenizer": 16 << 20, "rank": 96 << 20}
"""Bytes of its own that a process may have more at a later rest. The tensors of a rank come in all
sizes, and its heap wanders with them."""
MAX_REDIS_GROWTH = 4 << 20
MAX_ENTRIES = 32
"""Of all streams at rest: the audits of this second may be on their way."""

WORKERS = ("tokenizer0", "tokenizer1", "detokenizer0", "detokenizer1")
RANKS = ("rank0.0", "rank1.0", "rank1.1")
FAULTS: dict[str, list[Fault]] = {
    "kill a tokenizer": [kill(n) for n in WORKERS[:2]],
    "kill a detokenizer": [kill(n) for n in WORKERS[2:]],
    "kill a group of one": [kill("rank0.0")],
    "kill rank 0 of two": [kill("rank1.0")],
    "kill rank 1 of two": [kill("rank1.1")],
    "kill both ranks": [kill("rank1.0", "rank1.1")],
    "kill a rank of each group": [kill("rank0.0", r) for r in RANKS[1:]],
    "kill a worker and a rank": [kill(w, r) for w in WORKERS for r in RANKS],
    "freeze a worker": [pause(n, s) for n in WORKERS for s in (1, T, 2 * T)],
    "freeze a rank": [pause(n, s) for n in RANKS for s in (1, 2 * T)],
    "freeze a gateway": [pause(f"gateway{n}", s) for n in range(2) for s in (1, 2 * T)],
    "ask a worker to end": [terminate(n) for n in WORKERS],
    "ask a rank to end": [terminate(n) for n in RANKS],
    "restart Redis": [redis_restarts],
    "freeze Redis": [redis_freezes],
    "fill Redis": [redis_fills_up],
    "flush Redis": [redis_is_flushed],
    "destroy consumer groups": [groups_are_destroyed],
    "hostile entries": [everything_is_hostile],
    "cut every connection": [redis_clients_are_killed],
}


@dataclass(frozen=True)
class Case:
    """One request, always with the same answer."""

    body: dict[str, Any]
    text: str = ""
    finish: str | None = None
    tokens: int = 0


def cases() -> list[Case]:
    """Greedy ones and seeded samples, with and without penalties, short and long."""
    draw = random.Random(SEED)
    made = []
    for i in range(CASES):
        ask = " ".join(draw.choices(["river", "stone", "apple", "bridge", "letter"], k=3 + i))
        body = {
            "model": "tiny", "stream": True, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": ask}], "ignore_eos": True,
            "max_tokens": draw.randint(8, 600), "temperature": 0,
        }  # fmt: skip
        if i % 2:
            body |= {"temperature": 0.9, "seed": i, "presence_penalty": draw.choice([0, 0.5])}
        made.append(Case(body))
    return made


@dataclass
class Counts:
    """What the clients have seen. Every list must stay empty."""

    whole: int = 0
    left: int = 0
    tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Client:
    """Asks for one case after the other until `stop` is set, and compares what comes."""

    def __init__(
        self, urls: list[str], known: list[Case], seed: int, stop: threading.Event
    ) -> None:
        self.counts = Counts()
        self._ports = [int(url.rpartition(":")[2]) for url in urls]
        self._known = known
        self._draw = random.Random(seed)
        self._stop = stop

    def run(self) -> None:
        while not self._stop.is_set():
            case, port = self._draw.choice(self._known), self._draw.choice(self._ports)
            leaves = self._draw.randint(1, len(case.text)) if self._draw.random() < 0.15 else None
            try:
                self._ask(case, port, leaves)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.counts.errors.append(f"{port}: {type(error).__name__}: {error}")

    def _ask(self, case: Case, port: int, leaves: int | None) -> None:
        got = Answer()
        for status, event in events(port, case.body):
            if status != 200:
                self._refused(status, event)
                return
            if "error" in event:
                self.counts.errors.append(f"{port}: after {got.tokens} {event['error']}")
                return
            got.add(event)
            if not case.text.startswith(got.text):
                break
            if leaves is not None and len(got.text) >= leaves:
                self.counts.left += 1
                return
        self.counts.tokens += got.tokens
        if (got.text, got.finish, got.tokens) == (case.text, case.finish, case.tokens):
            self.counts.whole += 1
            return
        same = alike(got.text, case.text)
        self.counts.wrong.append(
            f"{port} case {self._known.index(case)}: {got.finish} tokens {got.tokens} of "
            f"{case.tokens}, characters {len(got.text)} of {len(case.text)}, alike {same}: "
            f"{got.text[same : same + 20]!r} for {case.text[same : same + 20]!r}"
        )

    def _refused(self, status: int, answer: dict[str, Any]) -> None:
        code = str(answer["error"]["code"])
        if status == 503 and code in REFUSALS and answer["retry-after"]:
            self.counts.refused[code] += 1
            self._stop.wait(min(float(answer["retry-after"]), 2.0))
        else:
            self.counts.errors.append(f"{status} {answer}")


@dataclass
class Answer:
    """What has come of one stream."""

    text: str = ""
    finish: str | None = None
    tokens: int = 0

    def add(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]


def events(port: int, body: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(status, event) of a stream; of an answer that is none, its body with `retry-after`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STREAM_SECONDS)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
        answer = connection.getresponse()
        if answer.status != 200:
            found = json.loads(answer.read())
            yield answer.status, found | {"retry-after": answer.headers["retry-after"]}
            return
        done = False
        for line in answer:
            if line.startswith(b"data: {"):
                yield 200, json.loads(line.removeprefix(b"data: "))
            done = done or line.startswith(b"data: [DONE]")
        if not done:
            raise ValueError("the stream broke off")


class Watch:
    """What processes and Redis hold: at rest by process, and the most that was seen under load."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.held: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        """By (role, process id): (open files, bytes) at each rest."""
        self.redis: list[tuple[int, int, int]] = []
        """(bytes, keys, entries of all streams) at each rest."""
        self.most: Counter[str] = Counter()

    def at_rest(self) -> None:
        for name, worker in self._deployment.workers.items():
            key = (name.rstrip("0123456789."), worker.pid)
            self.held[key].append((open_files(worker.pid), resident_bytes(worker.pid)))
        with self._deployment.redis.client() as client:
            entries = [client.xlen(k) for k in client.scan_iter("*", _type="stream")]
            memory: Any = client.info("memory")
            self.redis.append((memory["used_memory"], client.dbsize(), sum(entries)))

    def under_load(self) -> None:
        """Takes no part in what happens to Redis: what it misses comes again."""
        with (
            contextlib.suppress(redis.RedisError, OSError),
            self._deployment.redis.client() as client,
        ):
            memory: Any = client.info("memory")
            entries = [client.xlen(k) for k in client.scan_iter("*", _type="stream")]
            self.most["redis_bytes"] = max(self.most["redis_bytes"], memory["used_memory"])
            self.most["stream"] = max([self.most["stream"], *entries])

    def growth(self) -> dict[str, tuple[int, int, int]]:
        """By role: processes compared, the most files and bytes that one had more at its end."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for (role, _), rests in self.held.items():
            if len(rests) > 1:
                (files, memory), (files_then, memory_then) = rests[0], rests[-1]
                found[role].append((files_then - files, memory_then - memory))
        return {
            role: (len(pairs), max(f for f, _ in pairs), max(m for _, m in pairs))
            for role, pairs in found.items()
        }


class Chaos:
    """Does a fault each ten seconds for a while; each kind as often as any other."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._draw = random.Random(SEED)
        self._due: list[str] = []
        self.done: Counter[str] = Counter()
        self.log: list[str] = []
        self._began = time.monotonic()

    def run(self, seconds: float, watch: Watch) -> None:
        began, never = time.monotonic(), threading.Event()
        with ThreadPoolExecutor() as pool:
            running = []
            for number in range(1, 1 + int(seconds / FAULT_SECONDS)):
                running.append(pool.submit(self._one))
                while (left := began + number * FAULT_SECONDS - time.monotonic()) > 0:
                    never.wait(min(left, 0.5))
                    watch.under_load()
            for fault in running:
                fault.result()

    def _one(self) -> None:
        if not self._due:
            self._due = self._draw.sample(sorted(FAULTS), len(FAULTS))
        kind = self._due.pop()
        fault = self._draw.choice(FAULTS[kind])
        at = f"{time.monotonic() - self._began:6.1f} s {kind}"
        try:
            fault(self._deployment)
        except (redis.RedisError, NotDoneError) as error:
            # An earlier fault still has Redis, or the worker, at this moment: it comes again.
            self._due.append(kind)
            self.log.append(f"{at}: not done: {error}")
        else:
            self.done[kind] += 1
            self.log.append(at)


def references(urls: list[str]) -> list[Case]:
    """Each case with its undisturbed answer: twice the same, of both gateways at once."""

    def one(at: tuple[int, Case]) -> Case:
        number, case = at
        answers = []
        for url in (urls[number % 2], urls[1 - number % 2]):
            got = Answer()
            for status, event in events(int(url.rpartition(":")[2]), case.body):
                assert status == 200, event
                got.add(event)
            answers.append(got)
        assert answers[0] == answers[1], f"{case.body} has two answers without any fault"
        assert answers[0].finish == "length"
        return Case(case.body, answers[0].text, answers[0].finish, answers[0].tokens)

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, enumerate(cases())))


def alike(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def table(counts: Counts, chaos: Chaos, watch: Watch, replays: float, seconds: float) -> str:
    """All that was counted."""
    accepted = counts.whole + counts.left + len(counts.wrong) + len(counts.errors)
    rows: list[tuple[str, object]] = [
        ("seed", SEED),
        ("seconds of load", round(seconds)),
        ("faults", chaos.done.total()),
        *((f"  {kind}", n) for kind, n in sorted(chaos.done.items())),
        ("streams finished", counts.whole),
        ("streams left by their client", counts.left),
        ("tokens of finished streams", counts.tokens),
        ("attempts", int(accepted + replays)),
        ("  of them replays", int(replays)),
        ("streams with a wrong, lost or repeated token", len(counts.wrong)),
        ("error events", len(counts.errors)),
        *((f"new requests refused: {code}", n) for code, n in sorted(counts.refused.items())),
        ("Redis bytes at each rest", [memory for memory, _, _ in watch.redis]),
        ("Redis entries at each rest", [entries for _, _, entries in watch.redis]),
        ("Redis bytes, most under load", watch.most["redis_bytes"]),
        ("longest stream under load", watch.most["stream"]),
    ]
    for role, (processes, files, memory) in sorted(watch.growth().items()):
        grown = f"{files:+} files, {memory / 2**20:+.1f} MiB"
        rows.append((f"most that one of {processes} {role} processes grew by", grown))
    return "\n".join(f"{name:<52} {value}" for name, value in rows)


def together(parts: list[Counts]) -> Counts:
    total = Counts()
    for part in parts:
        total.whole += part.whole
        total.left += part.left
        total.tokens += part.tokens
        total.refused += part.refused
        total.wrong += part.wrong
        total.errors += part.errors
    return total


def test_only_a_fault_that_was_done_counts_and_another_comes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals = [NotDoneError("rank0.0 does not run"), redis.ConnectionError("away"), None]

    def fault(_: Any) -> None:
        if refusals and (refusal := refusals.pop(0)) is not None:
            raise refusal

    monkeypatch.setitem(globals(), "FAULTS", {"one": [fault], "two": [fault]})
    chaos, counted = Chaos(cast(Deployment, None)), []
    for _ in range(4):
        chaos._one()
        counted.append(chaos.done.total())
    assert counted == [0, 0, 1, 2] and set(chaos.done.values()) == {1}
    assert [" not done: " in line for line in chaos.log] == [True, True, False, False]


@pytest.mark.redis
@pytest.mark.soak
@pytest.mark.timeout(0)  # as long as MINISGL_SOAK_SECONDS says
def test_nothing_is_lost_and_nothing_grows_while_anything_fails(
    tmp_path: Path, soak_seconds: float
) -> None:
    print(f"seed {SEED}")
    tiny = build_tiny(tmp_path / "tiny", max_position_embeddings=4096)
    with RedisServer() as server, Deployment(tiny, server, sizes=(1, 2), gateways=2) as deployment:
        deployment.wait_ready()
        known = references(deployment.urls)
        deployment.wait_at_rest()

        def replays() -> float:
            return sum(metrics(url)["minisgl_request_replays_total"] for url in deployment.urls)

        before = replays()
        watch, chaos = Watch(deployment), Chaos(deployment)
        watch.at_rest()
        parts: list[Counts] = []
        count = max(1, round(soak_seconds / PART_SECONDS))
        loaded = 0.0
        for part in range(count):
            began, stop = time.monotonic(), threading.Event()
            seeds = range(SEED + 1000 * part, SEED + 1000 * part + CLIENTS)
            clients = [Client(deployment.urls, known, seed, stop) for seed in seeds]
            with ThreadPoolExecutor(CLIENTS) as pool:
                running = [pool.submit(client.run) for client in clients]
                try:
                    chaos.run(soak_seconds / count, watch)
                finally:
                    stop.set()
                for one in running:
                    one.result()
            loaded += time.monotonic() - began
            parts += [client.counts for client in clients]
            counts = together(parts)
            shown = table(counts, chaos, watch, replays() - before, loaded)
            print(f"{shown}\n", flush=True)  # also if what follows fails
            deployment.wait_at_rest(REST_SECONDS)
            watch.at_rest()
        shown = table(counts, chaos, watch, replays() - before, loaded)
        print(shown)
        told = "\n".join([*counts.wrong, *counts.errors, *chaos.log])
        assert not counts.wrong, told
        assert not counts.errors, told
        assert counts.whole > count
        assert max(entries for _, _, entries in watch.redis) <= MAX_ENTRIES, shown
        assert max(m for m, _, _ in watch.redis) - watch.redis[0][0] < MAX_REDIS_GROWTH, shown
        for role, (_, files, memory) in watch.growth().items():
            assert files <= MAX_FILES, (role, shown)
            assert memory <= MAX_GROWTH[role], (role, shown)
        assert "Traceback" not in deployment.logs()
