"""The engine of one rank: it loads a model, plans memory, and computes steps in order.

On a device with streams `forward` returns when the work is queued; on a CPU it is done by then, and
everything else is the same.
"""

import contextlib
import gc
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.attention.base import AttentionBackend, AttentionContext, Needs
from minisgl.attention.registry import (
    backend_names,
    choose_page_size,
    device_capability,
    make_backend,
)
from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.distributed import Communicator
from minisgl.distributed.device import gpu_id, select_device
from minisgl.engine.memory import MAX_SPREAD, pages_for_requests, plan_pages
from minisgl.engine.runner import HostRunner, Parts, Runner
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import Int32s, StepEngine, StepInput, StepOutput
from minisgl.engine.tables import Tables
from minisgl.host import free_memory, host_id, threads_of_a_rank
from minisgl.kvcache.pool import KVPool, page_bytes
from minisgl.layers.sharding import head_shard
from minisgl.messages import SamplingParams
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import dummy_weights, load_weights

_log = logging.getLogger(__name__)

WARM_UP_TOKENS = 32
CUDA_WARM_UP_TOKENS = 1024
"""A GPU needs many to show how many prompt tokens it computes in a second."""
CUDA_GRAPH_MAX_BS = 256


class Engine(StepEngine):
    """Loads the model of `folder` and computes steps with this rank's part of it."""

    def __init__(
        self, config: EngineConfig, folder: Path, comm: Communicator, *, progress: bool = False
    ) -> None:
        """Raises `UsageError` or `StartError` that names the flag or the file at fault."""
        began = time.monotonic()
        self._config, self._comm = config, comm
        self._device = select_device(config.device, comm.rank)
        self._on_cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream() if self._on_cuda else None  # type: ignore[no-untyped-call]
        model = load_model_config(folder)
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_seq_len = _max_seq_len(config, model)
        capability = device_capability(self._device)
        dtype = _dtype(config.dtype, model)
        heads = head_shard(model.num_heads, model.num_kv_heads, comm.rank, comm.size)
        group, whole = heads.q.local // heads.kv.local, comm.size == 1 and model.moe is None
        needs = Needs(dtype, model.head_dim, group, whole)
        backends = backend_names(config.attention_backend, capability, needs)
        self.page_size = choose_page_size(backends, config.page_size)
        packs = whole and backends == ("cpu",)
        if config.quantization != "none" and not packs:
            raise UsageError(
                f"--quantization {config.quantization} needs the CPU's own kernels: --device cpu, "
                "--dtype bfloat16, one rank, a model without experts, and a C++ compiler"
            )
        # All measure before any loads: that would look like a device or host with less memory.
        seen = comm.gather_ints(
            [gpu_id(self._device), torch.cuda.mem_get_info()[0]]
            if self._on_cuda
            else [host_id(), free_memory()]
        )
        places, free_before = [place for place, _ in seen], [free for _, free in seen]
        sharing = [places.count(place) for place in places]
        if not self._on_cuda:
            torch.set_num_threads(threads_of_a_rank(sharing[comm.rank]))
        self._runner: Runner | None = None
        self._torch_threads: int | None = None
        with self._on_stream():
            attention = make_backend(
                backends,
                AttentionContext(
                    device=self._device,
                    dtype=dtype,
                    num_qo_heads=heads.q.local,
                    num_kv_heads=heads.kv.local,
                    head_dim=model.head_dim,
                    page_size=self.page_size,
                    max_running=config.max_running_requests,
                    max_seq_len=self.max_seq_len,
                    capability=capability,
                ),
            )
            network = CausalLM(model, dtype, comm, self._device)
            if config.load_format == "dummy":
                dummy_weights(network, self._device, config.seed)
            else:
                load_weights(network, folder, self._device, progress)
            if packs:
                self._pack(network)
            try:
                sampler = Sampler(self.vocab_size, self._device, config.max_running_requests + 1)
            except MemoryError as error:
                raise StartError(
                    "not enough memory for the sampling tables; use a lower "
                    f"--max-running-requests ({error})"
                ) from error
            if network.packed is not None:
                sampler.threads = network.packed.each_row
            self._dtype, self._model, self._kv_heads = dtype, model, heads.kv.local
            if self._on_cuda:
                self._start_cuda(network, attention, sampler, free_before, sharing)
            else:
                self._start_cpu(network, attention, sampler, free_before, sharing)
            self._warm_up()
        comm.barrier()
        self.report = {**self.report, "start_seconds": time.monotonic() - began}
        _log.info(
            "engine ready rank=%d device=%s dtype=%s pages=%d page_size=%d kv_gib=%.2f "
            "max_seq_len=%d seconds=%.1f",
            comm.rank, self._device, str(dtype).removeprefix("torch."), self.num_pages,
            self.page_size, self._live.parts.pool.nbytes / 2**30, self.max_seq_len,
            time.monotonic() - began,
        )  # fmt: skip

    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        with self._on_stream():
            self._live.parts.sampler.admit(row, sampling, prompt_ids, output_ids)

    def release(self, row: int) -> None:
        self._live.parts.sampler.release(row)

    def forward(self, step: StepInput) -> StepOutput:
        return self._live.forward(step)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        return self._live.synchronous

    @property
    def waited(self) -> float:  # type: ignore[override]
        return self._live.waited

    @property
    def busy(self) -> float:  # type: ignore[override]
        return self._live.busy

    def measure_busy(self) -> None:
        self._live.measure_busy()

    def take_phases(self) -> dict[str, float]:
        packed = self._live.parts.model.packed
        return {} if packed is None else packed.take_seconds()

    def close(self) -> None:
        if self._runner is None:
            return
        self._runner = None
        gc.collect()
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    @property
    def _live(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("this engine is closed")
        return self._runner

    # --- start ---------------------------------------------------------------------------------

    def _pack(self, network: CausalLM) -> None:
        """Let one call compute all layers, with a thread of its own for each core. Torch's threads
        would wait busily beside them after each of its operators, so it keeps one."""
        threads = torch.get_num_threads()
        network.pack(self.max_seq_len, threads, int8=self._config.quantization == "int8")
        self._torch_threads = threads
        torch.set_num_threads(1)

    def _start_cpu(
        self, network: CausalLM, attention: AttentionBackend, sampler: Sampler, free: list[int],
        sharing: list[int],
    ) -> None:  # fmt: skip
        config, comm = self._config, self._comm
        weights = comm.gather_ints([network.nbytes])
        self.num_pages = config.num_pages or self._plan(
            free, sharing, [taken for (taken,) in weights],
            _activation_bytes(self._model, config, self._dtype), 0.5,
        )  # fmt: skip
        pool = self._make_pool(self.num_pages)
        tables = self._make_tables(pool)
        self._runner = HostRunner(Parts(network, attention, tables, sampler, pool))
        packed = network.packed
        self.report = {"device": "cpu"} | ({} if packed is None else {"kernels": packed.isa})

    def _start_cuda(
        self, network: CausalLM, attention: AttentionBackend, sampler: Sampler, free: list[int],
        sharing: list[int],
    ) -> None:  # fmt: skip
        """Measure with the dummy page alone, then make the KV cache of what is left, then capture:
        graphs hold the cache's address."""
        from minisgl.engine import measure
        from minisgl.engine.cuda import CudaRunner
        from minisgl.engine.graph_sizes import graph_sizes, prompt_sizes

        config, comm, device = self._config, self._comm, self._device
        requests = config.max_running_requests
        # A mixed step has at most one token of each decoding request more.
        tokens = config.max_prefill_tokens + requests
        pool = self._make_pool(0)
        tables = self._make_tables(pool)
        parts = Parts(network, attention, tables, sampler, pool)
        assert self._stream is not None
        runner = CudaRunner(
            parts, self._stream, vocab_size=self.vocab_size, dtype=self._dtype,
            max_requests=requests, max_tokens=tokens, check=comm.check,
        )  # fmt: skip
        self._runner = runner
        few, many = 1, min(64, self.max_seq_len, config.max_prefill_tokens)
        # What the model calls without a choice is asked first: the trial may know one already.
        wanted = runner.kernels_of([tables.dummy_step([0], [n]) for n in (few, many)])
        trial = network.model.trial(attention.fuses)
        runner.compile_kernels([*wanted, *([] if trial is None else trial.variants())])
        if trial is not None:
            trial.run()
        attention.measure_device()
        own = {tokens: asdict(way) for tokens, way in network.model.chosen.items()}
        most = CUDA_GRAPH_MAX_BS if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
        sizes = graph_sizes(min(most, requests))
        for able, what in (
            (attention.captures, f"--attention-backend {config.attention_backend}"),
            (network.model.captures, "the model's experts without Triton"),
        ):
            if sizes and not able:
                _log.warning("decode runs without CUDA graphs, because of %s", what)
                sizes = []
        figures: dict[str, Any] = {}
        if config.num_pages is None:
            taken = free[comm.rank] - measure.free_bytes(device)
            foreign = taken - torch.cuda.memory_reserved(device)
            if sharing[comm.rank] == 1 and foreign > MAX_SPREAD:
                _log.warning(
                    "%.1f GiB of the device were taken while the model was loaded, and not by its "
                    "tensors: what else runs there leaves that much less for the KV cache",
                    foreign / 2**30,
                )  # fmt: skip
            measure.full_chunk(runner, requests, config.max_prefill_tokens)
            steps = measure.largest_steps(runner, requests, tokens)
            sampling = measure.largest_sampling(self.vocab_size, requests, device)
            graph_bytes = measure.graphs(runner, sizes)
            comm.check()
            # Penalties keep what the full batch took; steps and sampling do not overlap in time.
            mine = [max(taken, 0), steps + sampling, graph_bytes]
            every = comm.gather_ints(mine)
            model_bytes = [row[0] for row in every]
            beside = max(row[1] + row[2] for row in every)
            self.num_pages = self._plan(free, sharing, model_bytes, beside, 0.9)
            names = ("model_bytes", "activation_bytes", "graph_bytes_expected")
            figures = dict(zip(names, mine, strict=True))
        else:
            self.num_pages = config.num_pages
        parts.pool = pool = self._make_pool(self.num_pages)
        parts.tables = tables.with_dummy_slot(pool.dummy_page * self.page_size)
        before, began = measure.free_bytes(device), time.monotonic()
        of_prompts = []
        if sizes and attention.captures_prefill:
            of_prompts = prompt_sizes(min(config.max_prefill_tokens, self.max_seq_len))
        runner.capture(sizes, of_prompts)
        figures |= {
            "device": torch.cuda.get_device_name(device),
            "free_bytes_before": free[comm.rank],
            "kv_bytes": pool.nbytes,
            "pages": self.num_pages,
            "page_size": self.page_size,
            "graphs": len(sizes),
            "prompt_graphs": len(of_prompts),
            "own_products": own,
            "graph_seconds": time.monotonic() - began,
            "graph_bytes": max(before - measure.free_bytes(device), 0),
        }
        self.report = figures
        if sizes:
            _log.info(
                "cuda graphs=%d largest=%d seconds=%.1f mib=%.0f", len(sizes), sizes[-1],
                figures["graph_seconds"], figures["graph_bytes"] / 2**20,
            )  # fmt: skip

    def _plan(
        self, free: list[int], sharing: list[int], model_bytes: list[int], activation_bytes: int,
        ratio: float,
    ) -> int:  # fmt: skip
        config = self._config
        return plan_pages(
            free_before=free,
            sharing=sharing,
            model_bytes=model_bytes,
            activation_bytes=activation_bytes,
            memory_ratio=ratio if config.memory_ratio is None else config.memory_ratio,
            page_bytes=page_bytes(
                layers=self._model.num_layers,
                kv_heads=self._kv_heads,
                page_size=self.page_size,
                head_dim=self._model.head_dim,
                dtype=self._dtype,
            ),
            most=pages_for_requests(config.max_running_requests, self.max_seq_len, self.page_size),
        )

    def _make_pool(self, pages: int) -> KVPool:
        return KVPool(
            layers=self._model.num_layers,
            pages=pages,
            page_size=self.page_size,
            kv_heads=self._kv_heads,
            head_dim=self._model.head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def _make_tables(self, pool: KVPool) -> Tables:
        rows = self._config.max_running_requests + 1
        tables = Tables.make(rows, self.max_seq_len, self._device)
        return tables.with_dummy_slot(pool.dummy_page * self.page_size)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _warm_up(self) -> None:
        """A prefill and a decode step on the dummy row: libraries choose their kernels. Then one
        more prefill, which is timed."""
        tables = self._live.parts.tables
        row, most = tables.dummy_row, WARM_UP_TOKENS
        if self._on_cuda:
            most = min(CUDA_WARM_UP_TOKENS, self._config.max_prefill_tokens)
        n = min(most, tables.width - 1)
        greedy = SamplingParams(temperature=0.0)
        self.admit(row, greedy, np.zeros(1, np.int32), np.zeros(0, np.int32))
        steps = [(0, n), (n, n + 1), (0, n)]
        if self._on_cuda:  # other sizes take other kernels, each loaded when it is first used
            steps = [(0, 1 << i) for i in range(n.bit_length() - 1)] + steps
        for start, end in steps:
            began = time.monotonic()
            self.forward(tables.dummy_step([start], [end])).wait()
        self.prefill_rate = n / (time.monotonic() - began)
        self.release(row)
        with self._on_stream():
            tables.tokens[row, 0] = 0


def _dtype(name: str, model: ModelConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, model.dtype if name == "auto" else name)
    return dtype


def _max_seq_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = config.max_seq_len or model.max_model_len
    if config.max_seq_len == 1:
        raise UsageError("--max-seq-len must be at least 2 tokens, a prompt and an output, not 1")
    if limit > model.max_model_len:
        raise UsageError(
            f"--max-seq-len {limit} is over the model's limit of {model.max_model_len} tokens"
        )
    if model.sliding_window is not None and limit > model.sliding_window:
        raise UsageError(
            f"the model's sliding window of {model.sliding_window} tokens is active, and shorter "
            f"than the sequence limit of {limit}: outputs beyond it would be wrong. Use "
            f"--max-seq-len {model.sliding_window} or less"
        )
    if limit < 2:
        raise StartError("the sequence limit must be at least 2 tokens: a prompt and an output")
    return limit


def _activation_bytes(model: ModelConfig, config: EngineConfig, dtype: torch.dtype) -> int:
    """Peak of one forward on a CPU, whose allocator keeps no record: what is alive at once.

    The widest point is the MLP (gate, up and their product, with input and residual) or attention
    (projections and output) of a step's prompts; then come a row of logits for each request, as
    the model gives them, in float32, and once more while a token is drawn.
    """
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = max(3 * model.intermediate_size, heads) + 4 * model.hidden_size
    logits = config.max_running_requests * model.vocab_size * (dtype.itemsize + 8)
    return config.max_prefill_tokens * width * dtype.itemsize + logits
