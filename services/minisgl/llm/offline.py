"""Offline inference: the scheduler and the engine of rank 0 in the caller's own process.

Nothing is sent to services here. Prompts become the same messages, and with tensor parallelism the
other ranks are ordinary `minisgl engine` processes that follow this one.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from minisgl.config import EngineConfig, StartError
from minisgl.distributed import PeerError
from minisgl.hub import has_tokenizer, model_vocab_size, resolve_model
from minisgl.launch.serve import as_arguments
from minisgl.launch.supervisor import Child, ChildSpec, minisgl_command
from minisgl.llm.answers import Answer, Collector, GenerationOutput, StepTimes
from minisgl.llm.no_tokenizer import NoTokenizer
from minisgl.llm.signals import HeldSignals
from minisgl.messages import (
    AbortMsg,
    Message,
    Route,
    SamplingParams,
    UserMsg,
    decode,
    encode,
    pack_ids,
)
from minisgl.rundir import RunDirectory
from minisgl.scheduler.feed import Feed, make_feed
from minisgl.scheduler.group import PATIENCE_SECONDS, LocalMembers, device_group
from minisgl.scheduler.main import make_engine
from minisgl.scheduler.rank import apply
from minisgl.scheduler.request import Ids, PendingReq
from minisgl.scheduler.scheduler import Scheduler
from minisgl.text import Tokenizer, load_tokenizer

GROUP = "offline"
_NOBODY = Route(gateway="", boot=0, detokenizer="")
_OPTIONS = tuple(f.name for f in dataclasses.fields(EngineConfig) if f.name != "model")


class LLM:
    """A model that generates in batches.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))

    `model` is a Hugging Face folder or id. The options are the engine flags of the command line,
    with underscores; `overlap_scheduling=False` is `--disable-overlap-scheduling`.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        """Raises `TypeError` for an unknown option, `UsageError` or `StartError` otherwise."""
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise TypeError(f"LLM has no option {unknown[0]!r}; options: {', '.join(_OPTIONS)}")
        folder = resolve_model(os.fspath(model))
        self.config = EngineConfig(model=str(folder), **options)
        self._closers = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._random = random.Random(self.config.seed)
        self._within_step = False
        """A step has begun and is not over: for good, if an exception has ended it."""
        self.on_step: Callable[[StepTimes], None] | None = None
        """Called after each step, for benchmarks."""
        try:
            self._start()
        except PeerError as error:
            self.close()
            raise StartError(f"a rank was lost before the model was loaded: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._scheduler.max_model_len

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[GenerationOutput]:
        """One output for each prompt, in their order; prompts are texts or lists of token ids.

        `sampling_params` are those of all prompts, or one for each. Raises `ValueError` that names
        the prompt if one cannot be computed: then none is. An interrupt takes effect after the step
        that it falls into, and leaves nothing behind. After any other failure within a step, such
        as a rank that is lost, this object can only be closed: `RuntimeError`.
        """
        ids = self._encode(prompts)
        sampling = self._sampling(sampling_params, len(ids))
        for i, (prompt, params) in enumerate(zip(ids, sampling, strict=True)):
            error = self._scheduler.unfit(prompt, params)
            if error is not None:
                raise ValueError(f"prompt {i}: {error.message}")
        with self._lock:
            if self._within_step:
                raise RuntimeError("an earlier call failed within a step: close this LLM")
            uids = [secrets.token_bytes(16) for _ in ids]
            for uid, prompt, params in zip(uids, ids, sampling, strict=True):
                self._collector.expect(uid, Answer(len(prompt), params))
            batch: list[Message] = [
                UserMsg(
                    uid=uid,
                    attempt=1,
                    route=_NOBODY,
                    group=GROUP,
                    incarnation=0,
                    prompt_ids=pack_ids(prompt),
                    sampling=params,
                )
                for uid, prompt, params in zip(uids, ids, sampling, strict=True)
            ]
            try:
                self._run(batch)
            except BaseException:
                if not self._within_step:
                    # Leave no request behind that a later call would go on with.
                    self._run([_abort(pending) for pending in self._scheduler.held()])
                raise
            finally:
                outputs = [self._collector.take(uid) for uid in uids]
            return outputs

    def take_phases(self) -> dict[str, float]:
        """Seconds of each phase of this rank's CPU kernels since the last call, for benchmarks. The
        first call begins to count; nothing ever comes where torch or a GPU computes."""
        return self._engine.take_phases()

    def close(self) -> None:
        """End the other ranks and free the memory. Harmless when repeated."""
        self._closers.close()

    def _start(self) -> None:
        size = self.config.tensor_parallel_size
        threads = torch.get_num_threads()
        self._closers.callback(torch.set_num_threads, threads)
        self._tokenizer = self._load_tokenizer()
        directory = RunDirectory.create()
        self._closers.callback(directory.release)
        self._children = self._start_ranks(f"ipc://{directory.path}", size)
        comm, place = self._while_ranks_live(
            lambda: LocalMembers(directory.path, GROUP, 0, size).meet(0)
        )
        self._closers.callback(comm.close)
        comm = self._while_ranks_live(lambda: device_group(self.config, comm))
        self._closers.callback(comm.close)
        engine = self._engine = make_engine(self.config, comm, progress=False)
        self._closers.callback(engine.close)
        self.start_report = {**engine.report, "transport": comm.transport}
        """What the start of this rank's engine took, seconds and bytes, and how ranks talk."""
        comm.broadcast_int(0)  # the incarnation, which a group without services does not need
        self._collector = Collector(self._tokenizer)
        self._scheduler = Scheduler(self.config, engine, self._collector)
        self._collector.scheduler = self._scheduler
        self._feed: Feed = make_feed(comm, place, PATIENCE_SECONDS)
        self._closers.callback(self._feed.close)
        comm.barrier()
        self._closers.callback(self._stop_ranks)

    def _load_tokenizer(self) -> Tokenizer:
        """Dummy weights need only a config.json: prompts are then lists of ids."""
        folder = Path(self.config.model)
        size = model_vocab_size(folder)
        if self.config.load_format == "dummy" and size and not has_tokenizer(folder):
            return NoTokenizer(size)
        return load_tokenizer(folder)

    def _start_ranks(self, bus: str, size: int) -> list[Child]:
        """The ranks after this one, as processes that end with this one."""
        if size == 1:
            return []
        read, write = os.pipe()
        self._closers.callback(os.close, read)
        self._closers.callback(os.close, write)
        shared = (f"--bus={bus}", f"--model={self.config.model}", "--log-level=warning")
        children: list[Child] = []
        for rank in range(1, size):
            command = minisgl_command(
                "engine", *shared, f"--group={GROUP}", f"--tp-rank={rank}",
                *as_arguments(self.config),
            )  # fmt: skip
            child = Child(ChildSpec(name=f"rank {rank}", command=command), read)
            self._closers.callback(os.close, child.ready_fd)
            self._closers.callback(_kill, child)
            children.append(child)
        return children

    def _while_ranks_live(self, work: Any) -> Any:
        """The result of `work`, which waits for the other ranks; `StartError` if one has ended."""
        if not self._children:
            return work()
        pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="meet")
        future = pool.submit(work)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    return future.result(timeout=0.1)
                for child in self._children:
                    if child.code is not None:
                        raise StartError(f"{child.ending()} before it was ready")
        finally:
            pool.shutdown(wait=False)

    def _stop_ranks(self) -> None:
        """Let the other ranks end by themselves."""
        if self._within_step:
            return  # they wait in the middle of it, and hear of nothing else
        with contextlib.suppress(PeerError):
            self._feed.exchange(None)
        for child in self._children:
            with contextlib.suppress(Exception):
                child.process.wait(timeout=5)

    def _run(self, batch: list[Message]) -> None:
        """Step until everything is answered and read."""
        with HeldSignals() as signals:
            while batch or not self._scheduler.idle:
                self._within_step = True
                for raw in self._feed.exchange([encode(batch)] if batch else []) or ():
                    for message in decode(raw):
                        apply(message, self._scheduler, GROUP, 0)
                began, waited = time.perf_counter(), self._engine.waited
                worked = self._scheduler.step()
                batch = [_abort(pending) for pending in self._collector.cut]
                self._collector.cut.clear()
                self._within_step = False
                counts = self._collector.take_counts()  # else the next call would see them too
                if worked and self.on_step is not None:
                    seconds = time.perf_counter() - began
                    waited = self._engine.waited - waited
                    self.on_step(StepTimes(seconds, *counts, waited))
                signals.deliver()

    def _encode(self, prompts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[Ids]:
        given = [prompts] if isinstance(prompts, str) else list(prompts)
        encoded = []
        for i, prompt in enumerate(given):
            ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            array = _token_ids(ids)
            if array is None:
                raise ValueError(
                    f"prompt {i} must be a text or a list of token ids, not {prompt!r:.60}"
                )
            encoded.append(array)
        return encoded

    def _sampling(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            params = [given or SamplingParams()] * count
        else:
            params = list(given)
        if len(params) != count:
            raise ValueError(
                f"{count} prompts and {len(params)} sampling parameters: give one for all, or one "
                "for each"
            )
        for i, p in enumerate(params):
            if not isinstance(p, SamplingParams):
                raise ValueError(f"sampling parameters {i} must be SamplingParams, not {p!r:.60}")
        return [
            p if p.seed is not None else _with_seed(p, self._random.getrandbits(63)) for p in params
        ]


def _token_ids(given: object) -> Ids | None:
    """The ids as an array; None if these are no ids of 32 bits."""
    if not isinstance(given, Sequence | np.ndarray):
        return None
    try:
        array = np.asarray(given)  # in C: a loop over the ids of many prompts takes a tenth second
    except (ValueError, OverflowError):
        return None
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        return None
    if len(array) and not -(2**31) <= int(array.min()) <= int(array.max()) < 2**31:
        return None
    return array.astype(np.int32)


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "seed": seed})


def _abort(pending: PendingReq) -> AbortMsg:
    return AbortMsg(uid=pending.uid, attempt=pending.attempt, run=pending.run)


def _kill(child: Child) -> None:
    child.process.kill()
    child.process.wait()
