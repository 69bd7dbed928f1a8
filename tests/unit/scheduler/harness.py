"""A scheduler on the model engine, and what its requests were answered."""

import dataclasses
from dataclasses import dataclass, field

import numpy as np

from minisgl.config import EngineConfig
from minisgl.messages import ErrorInfo, SamplingParams
from minisgl.scheduler import integrity
from minisgl.scheduler.output import Emission
from minisgl.scheduler.request import PendingReq
from minisgl.scheduler.scheduler import Scheduler

from .model_engine import ModelEngine, expected


@dataclass
class Answer:
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    error: ErrorInfo | None = None


class Recorder:
    """An output sink that keeps what each request got, by uid."""

    def __init__(self) -> None:
        self.answers: dict[bytes, Answer] = {}
        self.scheduler: Scheduler | None = None

    def emit(self, emission: Emission) -> None:
        assert self.scheduler is not None
        for req in emission.fresh:
            req.pending.opened = True
        for i, row in enumerate(emission.rows.tolist()):
            req = self.scheduler.table.reqs[row]
            assert req is not None and req.pending.opened
            answer = self.answers[req.uid]
            assert not answer.ends, "a token after the end"
            assert emission.pos[i] == len(answer.tokens), "a gap or a repeated token"
            answer.tokens.append(int(emission.tokens[i]))
            if i in emission.finished:
                answer.ends.append(emission.finished[i])

    def complete(self, pending: PendingReq, reason: str) -> None:
        self.answers[pending.uid].ends.append(reason)

    def refuse(self, pending: PendingReq, error: ErrorInfo) -> None:
        self.answers[pending.uid].error = error
        self.answers[pending.uid].ends.append("error")

    def aborted(self, pending: PendingReq) -> None:
        self.answers[pending.uid].ends.append("abort")


class World:
    """One scheduler with everything checked after each operation."""

    def __init__(
        self, *, num_pages: int = 40, page_size: int = 4, max_seq_len: int = 64,
        synchronous: bool = False, **config: object,
    ) -> None:  # fmt: skip
        settings = {"max_running_requests": 4, "max_prefill_tokens": 16} | config
        self.config = dataclasses.replace(EngineConfig(model="m"), **settings)
        self.engine = ModelEngine(
            num_pages, page_size, max_seq_len, self.config.max_running_requests
        )
        self.engine.synchronous = synchronous
        self.sink = Recorder()
        self.scheduler = Scheduler(self.config, self.engine, self.sink)
        self.sink.scheduler = self.scheduler
        self._count = 0

    def add(self, prompt: list[int], **sampling: object) -> bytes:
        self._count += 1
        # Uids that do not sort by age, as random ones do not.
        uid = (self._count * 0x9E3779B97F4A7C15 % 2**64).to_bytes(8, "big") * 2
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        self.sink.answers[uid] = Answer(prompt, params)
        self.scheduler.add(uid, np.array(prompt, np.int32), params)
        self.check()
        return uid

    def abort(self, uid: bytes) -> None:
        held = {p.uid: p.run for p in self.scheduler.held()}
        if uid in held:
            assert self.scheduler.abort(uid, held[uid])
        self.check()

    def step(self) -> bool:
        worked = self.scheduler.step()
        self.check()
        return worked

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.step() and self.scheduler.idle:
                return
        raise AssertionError(f"not done after {limit} steps")

    def check(self) -> None:
        integrity.check(self.scheduler)

    def verify(self) -> None:
        """Every request ended exactly once, with exactly the output that it has alone."""
        for answer in self.sink.answers.values():
            assert len(answer.ends) == 1, f"{len(answer.ends)} ends of one request"
            room = self.scheduler.max_model_len - len(answer.prompt)
            if answer.error is not None:
                assert room <= 0 or not answer.prompt
                continue
            want = expected(answer.prompt, answer.sampling, room)
            if answer.ends[0] == "abort":
                assert answer.tokens == want[: len(answer.tokens)]
            else:
                assert answer.tokens == want
        assert self.scheduler.running == self.scheduler.waiting == 0
        cache = self.scheduler.cache
        assert cache.free_pages + cache.evictable_pages == cache.num_pages
        assert not self.engine.admitted
