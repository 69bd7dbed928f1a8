"""Runs commands beside each other on the GPUs of a host, each on as many as it needs."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Job:
    """A command for some GPUs."""

    name: str
    gpus: int
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    limit_seconds: float = 240.0


@dataclass(frozen=True, slots=True)
class Done:
    """How it went."""

    job: Job
    code: int
    """Its exit code, or minus the signal that ended it."""
    seconds: float
    output: str
    """Both streams."""


class _Running:
    def __init__(self, job: Job, gpus: Sequence[str]) -> None:
        self.job, self.gpus, self.began = job, gpus, time.monotonic()
        self._chunks: list[bytes] = []
        self.process = subprocess.Popen(
            job.command,
            env={**os.environ, **job.env, "CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        self._out = self.process.stdout
        os.set_blocking(self._out.fileno(), False)

    def read(self) -> None:
        """Take what it has printed: a full pipe would stop it."""
        while data := self._out.read(1 << 16):
            self._chunks.append(data)

    def over(self) -> Done | None:
        """None while it runs. One that takes too long is ended."""
        self.read()
        seconds = time.monotonic() - self.began
        if self.process.poll() is None:
            if seconds < self.job.limit_seconds:
                return None
            self.end()
        self.read()
        text = b"".join(self._chunks).decode(errors="replace")
        return Done(self.job, self.process.returncode, seconds, text)

    def end(self) -> None:
        """End it; what it has started ends with it, by the pipes that it holds."""
        self.process.kill()
        self.process.wait()


def run_jobs(jobs: Sequence[Job], gpus: Sequence[str], tell: Callable[[Done], None]) -> None:
    """Run all jobs that fit, in their order as far as GPUs are free; `tell` hears of each end.

    `gpus` are what CUDA_VISIBLE_DEVICES may name. A job that needs more than there are is left out.
    """
    waiting = [job for job in jobs if job.gpus <= len(gpus)]
    running: list[_Running] = []
    free = list(gpus)
    try:
        while waiting or running:
            for job in list(waiting):
                if job.gpus <= len(free):
                    taken, free = free[: job.gpus], free[job.gpus :]
                    running.append(_Running(job, taken))
                    waiting.remove(job)
            time.sleep(POLL_SECONDS)
            for one in list(running):
                done = one.over()
                if done is not None:
                    running.remove(one)
                    free = sorted([*free, *one.gpus], key=gpus.index)
                    tell(done)
    finally:
        for one in running:
            one.end()
