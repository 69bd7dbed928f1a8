"""A whole service on a Redis of its own, each role a process that is restarted when it exits."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.redis_server import RedisServer, free_port
from tests.support import lines, metrics, wait_until

T = 4.0
"""The heartbeat time-out of every deployment here, in seconds."""
READY_SECONDS = 120.0
STREAMS_SECONDS = 150.0
RESTART_SECONDS = 0.05
"""A process that has ended is started again so soon."""
IDLE_ENTRIES = 256
"""Most entries that a stream nobody uses may keep."""


class Worker:
    """One role as a process in a session of its own, started again whenever it has ended."""

    def __init__(self, name: str, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.starts: list[int] = []
        """Process ids, which are also those of the process groups."""
        self.started: list[float] = []
        """When each of them was started, in seconds of the monotonic clock."""
        self.stays_away = False
        """Whether it is not started again for now."""
        self.codes: list[int] = []
        """How each start but the last one ended."""
        self._command = [sys.executable, "-m", "minisgl", *command]
        self._lock = threading.Lock()
        self._ending = False
        self._start()

    @property
    def pid(self) -> int:
        return self.starts[-1]

    def _start(self) -> None:
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        self.starts.append(self._process.pid)
        self.started.append(began)

    def supervise(self) -> None:
        """Start it again if it has ended, as a kubelet does."""
        with self._lock:
            wanted = not self._ending and not self.stays_away
            if wanted and (code := self._process.poll()) is not None:
                self.codes.append(code)
                self._start()

    def signal(self, number: int) -> bool:
        """To the process and all that it started; whether it runs."""
        with self._lock:
            runs = self._process.poll() is None
            if runs:
                os.killpg(self.pid, number)
            return runs

    def ask_to_end(self) -> None:
        """SIGTERM, and no further start."""
        with self._lock:
            self._ending = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)

    def ended(self, seconds: float) -> list[str]:
        """Wait until it has ended, as it was asked to; what was wrong with that."""
        wrong = []
        try:
            code = self._process.wait(seconds)
            if code:
                wrong.append(f"{self.name} ended with {code} on SIGTERM")
        except subprocess.TimeoutExpired:
            wrong.append(f"{self.name} did not end on SIGTERM")
            self.signal(signal.SIGKILL)
            self._process.wait()
        for group in self.starts:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
                wrong.append(f"{self.name} left a process behind")
        return wrong


@dataclass(frozen=True)
class Ended:
    """How one stream ended."""

    text: str
    finish: str | None
    error: str | None = None
    status: int = 200


class Streams:
    """Requests that stream at the same time, each in a thread; `requests` are JSON bodies."""

    def __init__(self, urls: Sequence[str], requests: Sequence[dict[str, Any]]) -> None:
        self._counts = [0] * len(requests)
        self.times: list[list[float]] = [[] for _ in requests]
        """When each stream brought something, in seconds of the monotonic clock."""
        self._left = threading.Event()
        self._pool = ThreadPoolExecutor(len(requests))
        self._futures = [
            self._pool.submit(self._run, i, urls[i % len(urls)], body)
            for i, body in enumerate(requests)
        ]

    def _run(self, index: int, url: str, body: dict[str, Any]) -> Ended:
        text, finish = "", None
        body = body | {"stream": True, "model": "tiny"}
        with (
            httpx.Client(timeout=STREAMS_SECONDS) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                return Ended("", None, answer.read().decode(), answer.status_code)
            for line in lines(answer):
                if self._left.is_set():
                    break
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    return Ended(text, finish, chunk["error"]["message"])
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
                self._counts[index] = len(text)
                self.times[index].append(time.monotonic())
        return Ended(text, finish)

    @property
    def characters(self) -> int:
        """What the clients have of all streams together."""
        return sum(self._counts)

    @property
    def running(self) -> int:
        return sum(not f.done() for f in self._futures)

    def leave(self) -> list[Ended]:
        """The clients close their connections; what they have."""
        self._left.set()
        return self.results()

    def results(self) -> list[Ended]:
        """All ends, in the order of the requests."""
        try:
            return [f.result(STREAMS_SECONDS) for f in self._futures]
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)


class Deployment:
    """A service that is started at once; a context that ends it and fails if that went wrong."""

    def __init__(
        self,
        model: Path,
        server: RedisServer,
        *,
        sizes: Sequence[int] = (2,),
        gateways: int = 1,
        bus: Sequence[str] = (),
        gateway_flags: Sequence[str] = (),
    ) -> None:
        """`sizes`: the ranks of each group; `bus`: its flags, by default those of `server`."""
        self.redis = server
        self.folder = Path(tempfile.mkdtemp(prefix="deployment-"))
        self.urls: list[str] = []
        self.workers: dict[str, Worker] = {}
        bus = bus or [f"--bus={server.url}"]
        shared = [*bus, "--service=test", f"--heartbeat-timeout-seconds={T:g}", f"--model={model}"]
        engine = ["--device=cpu", "--dtype=float32", "--num-pages=20000", "--memory-ratio=0.9"]
        port = server.port
        for n in range(gateways):
            port = free_port(port + 1)
            self.urls.append(f"http://127.0.0.1:{port}")
            flags = [f"--id=gw{n}", f"--port={port}", "--served-model-name=tiny", *gateway_flags]
            self._add(f"gateway{n}", "gateway", *shared, *flags)
        for role in ("tokenizer", "detokenizer"):
            for n in range(2):
                name = f"{role}{n}"
                self._add(name, role, *shared, f"--id={role[0]}{n}", self._probed(name))
        for group, size in enumerate(sizes):
            for rank in range(size):
                place = [f"--group=g{group}", f"--tensor-parallel-size={size}", f"--tp-rank={rank}"]
                name = f"rank{group}.{rank}"
                self._add(name, "engine", *shared, *engine, *place, self._probed(name))
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    def _add(self, name: str, *command: str) -> None:
        self.workers[name] = Worker(name, command, self.folder)

    def _probed(self, name: str) -> str:
        """The flag for a worker's files of probes, in `folder`/`name`."""
        (self.folder / name).mkdir()
        return f"--health-dir={self.folder / name}"

    def _supervise(self) -> None:
        while not self._stopping.wait(RESTART_SECONDS):
            for worker in self.workers.values():
                worker.supervise()

    def __getitem__(self, name: str) -> Worker:
        return self.workers[name]

    def ranks(self) -> list[int]:
        """The process ids of all ranks."""
        return [w.pid for name, w in self.workers.items() if name.startswith("rank")]

    def ready(self) -> bool:
        """Whether every gateway would serve, on every group."""
        try:
            states = [httpx.get(f"{url}/ready", timeout=2).status_code for url in self.urls]
            return states == [200] * len(states) and self._groups() == self._groups_wanted()
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> None:
        wait_until(self.ready, READY_SECONDS, self.logs)

    def _groups(self) -> int:
        text = httpx.get(f"{self.urls[0]}/metrics", timeout=2).text
        return sum(line.startswith("minisgl_requests_running{") for line in text.splitlines())

    def _groups_wanted(self) -> int:
        return sum(name.endswith(".0") for name in self.workers)

    def stream(self, requests: Sequence[dict[str, Any]]) -> Streams:
        return Streams(self.urls, requests)

    def at_rest(self) -> str:
        """What is not as it must be when nothing runs; empty if all is."""
        try:
            seen = metrics(self.urls[0])
        except httpx.HTTPError as error:
            return str(error)
        names = ("running", "waiting")
        busy = [n for n in names if seen[f"minisgl_requests_{n}"]]
        total, free, kept = (seen[f"minisgl_kv_pages_{n}"] for n in ("total", "free", "evictable"))
        with self.redis.client() as client:
            streams = {k: client.xlen(k) for k in client.scan_iter("minisgl:*", _type="stream")}
        long = {k: n for k, n in streams.items() if n > IDLE_ENTRIES}
        good = not busy and 0 < total == free + kept and not long
        return "" if good else f"{busy=} {total=} {free=} evictable={kept} {long=}"

    def wait_at_rest(self, seconds: float = 60) -> None:
        wait_until(lambda: self.ready() and not self.at_rest(), seconds, self.at_rest)

    def logs(self) -> str:
        """The end of each log."""
        return "\n".join(
            f"--- {name} {w.codes}\n{w.log.read_text(errors='replace')[-1200:]}"
            for name, w in self.workers.items()
        )

    def stop(self, seconds: float = 4 * T) -> list[str]:
        """SIGTERM to every process; what was wrong with their ends within `seconds` each."""
        self._stopping.set()
        self._supervisor.join()
        for worker in self.workers.values():
            worker.ask_to_end()
        return [wrong for worker in self.workers.values() for wrong in worker.ended(seconds)]

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        wrong = self.stop()
        assert not wrong, f"{wrong}\n{self.logs()}"
        if error is None:
            shutil.rmtree(self.folder)
