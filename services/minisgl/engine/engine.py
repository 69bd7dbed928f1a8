"""The engine of one rank: model, KV buffer, tables on the device, sampling.

It computes what it is told, in order. On a device with streams `forward` returns when the work is
queued; on a CPU it is done by then, and everything else is the same.
"""

import logging
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.base import AttentionContext, ForwardBatch
from minisgl.attention.registry import (
    backend_names,
    choose_page_size,
    device_capability,
    make_backend,
)
from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.distributed import Communicator
from minisgl.engine.fake import Ready
from minisgl.engine.host import free_memory, host_id, usable_cpus
from minisgl.engine.memory import pages_for_requests, plan_pages
from minisgl.engine.sampler import Sampler
from minisgl.engine.step import Int32s, StepEngine, StepInput, StepOutput, StepResult, TableWrites
from minisgl.kvcache.pool import KVPool, page_bytes, zeros
from minisgl.layers.sharding import head_shard
from minisgl.messages import SamplingParams
from minisgl.models.config import ModelConfig, load_model_config
from minisgl.models.decoder import CausalLM
from minisgl.models.weights import dummy_weights, load_weights

_log = logging.getLogger(__name__)

WARM_UP_TOKENS = 32


class Engine(StepEngine):
    """Loads the model of `folder` and computes steps with this rank's part of it."""

    def __init__(
        self, config: EngineConfig, folder: Path, comm: Communicator, *, progress: bool = False
    ) -> None:
        """Raises `UsageError` or `StartError` that names the flag or the file at fault."""
        began = time.monotonic()
        self._comm = comm
        self._device = _device(config.device)
        model = load_model_config(folder)
        self.vocab_size = model.vocab_size
        self.eos_token_ids = model.eos_token_ids
        self.max_seq_len = _max_seq_len(config, model)
        capability = device_capability(self._device)
        backends = backend_names(config.attention_backend, capability)
        self.page_size = choose_page_size(backends, config.page_size)
        dtype = _dtype(config.dtype, model)
        if config.quantization != "none":
            raise UsageError(f"--quantization {config.quantization} is not available yet")
        # All measure before any loads: that would look like a host with less memory.
        seen = comm.gather_ints([host_id(), free_memory()])
        hosts, free_before = [host for host, _ in seen], [free for _, free in seen]
        sharing = [hosts.count(host) for host in hosts]
        # Whoever sets the variable knows of other processes, such as another group's ranks.
        if self._device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, usable_cpus() // sharing[comm.rank]))
        heads = head_shard(model.num_heads, model.num_kv_heads, comm.rank, comm.size)
        kv_heads = heads.kv.local
        self._attention = make_backend(
            backends,
            AttentionContext(
                device=self._device,
                dtype=dtype,
                num_qo_heads=heads.q.local,
                num_kv_heads=kv_heads,
                head_dim=model.head_dim,
                page_size=self.page_size,
                max_running=config.max_running_requests,
                max_seq_len=self.max_seq_len,
                capability=capability,
            ),
        )
        self._model = CausalLM(model, dtype, comm, self._device)
        if config.load_format == "dummy":
            dummy_weights(self._model, self._device, config.seed)
        else:
            load_weights(self._model, folder, self._device, progress)
        weights = comm.gather_ints([_weight_bytes(self._model)])
        self.num_pages = config.num_pages or plan_pages(
            free_before=free_before,
            sharing=sharing,
            model_bytes=[taken for (taken,) in weights],
            activation_bytes=_activation_bytes(model, config, dtype),
            memory_ratio=0.5 if config.memory_ratio is None else config.memory_ratio,
            page_bytes=page_bytes(
                layers=model.num_layers,
                kv_heads=kv_heads,
                page_size=self.page_size,
                head_dim=model.head_dim,
                dtype=dtype,
            ),
            most=pages_for_requests(config.max_running_requests, self.max_seq_len, self.page_size),
        )
        self._pool = KVPool(
            layers=model.num_layers,
            pages=self.num_pages,
            page_size=self.page_size,
            kv_heads=kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=self._device,
        )
        rows = config.max_running_requests + 1
        shape = (rows, self.max_seq_len)
        self._dummy_slot = self._pool.dummy_page * self.page_size
        purpose = "tables; use a lower --max-running-requests or --max-seq-len"
        self._page_table = zeros(shape, torch.int32, self._device, purpose)
        self._page_table[-1] = self._dummy_slot
        self._token_pool = zeros(shape, torch.int32, self._device, purpose)
        self._flat_pages, self._flat_tokens = self._page_table.view(-1), self._token_pool.view(-1)
        self._sampler = Sampler(self.vocab_size, self._device, rows)
        self._warm_up()
        comm.barrier()
        _log.info(
            "engine ready rank=%d device=%s dtype=%s pages=%d page_size=%d kv_gib=%.2f "
            "max_seq_len=%d seconds=%.1f",
            comm.rank, self._device, str(dtype).removeprefix("torch."), self.num_pages,
            self.page_size, self._pool.nbytes / 2**30, self.max_seq_len, time.monotonic() - began,
        )  # fmt: skip

    def admit(
        self, row: int, sampling: SamplingParams, prompt_ids: Int32s, output_ids: Int32s
    ) -> None:
        self._sampler.admit(row, sampling, prompt_ids, output_ids)

    def release(self, row: int) -> None:
        self._sampler.release(row)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> StepOutput:
        self._write(self._flat_pages, step.slot_writes)
        self._write(self._flat_tokens, step.token_writes)
        lengths = step.device_lens - step.cached_lens
        batch = ForwardBatch(
            input_ids=self._flat_tokens[self._tensor(step.input_index)].long(),
            positions=self._tensor(step.positions),
            out_loc=self._tensor(step.out_loc).long(),
            rows=self._tensor(step.rows),
            page_table=self._page_table,
            cached_lens=step.cached_lens,
            device_lens=step.device_lens,
            last_indices=self._tensor(np.cumsum(lengths, dtype=np.int64) - 1),
            is_decode=step.is_decode,
        )
        self._attention.prepare_metadata(batch)
        logits = self._model.forward(batch, self._attention, self._pool)
        sampling = self._sampler.prepare(step.rows, step.output_pos, step.samples)
        sample = self._sampler.sample(logits, sampling)
        self._flat_tokens[self._tensor(step.output_index)] = sample.tokens.int()
        logprobs = sample.logprobs.to_host() if sample.logprobs is not None else None
        return Ready(StepResult(sample.tokens.cpu().numpy(), logprobs))

    def _write(self, table: torch.Tensor, writes: TableWrites | None) -> None:
        if writes is not None:
            table[self._tensor(writes.index)] = self._tensor(writes.values)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _warm_up(self) -> None:
        """A prefill and a decode step on the dummy row: libraries choose their kernels. Then one
        more prefill, which is timed."""
        width, row = self.max_seq_len, self._page_table.shape[0] - 1
        n = min(WARM_UP_TOKENS, width - 1)
        self._sampler.admit(
            row, SamplingParams(temperature=0.0), np.zeros(1, np.int32), np.zeros(0, np.int32)
        )
        for start, end in ((0, n), (n, n + 1), (0, n)):
            began = time.monotonic()
            positions = np.arange(start, end)
            rows = np.array([row])
            self.forward(
                StepInput(
                    rows=rows,
                    cached_lens=np.array([start], np.int32),
                    device_lens=np.array([end], np.int32),
                    positions=positions,
                    input_index=row * width + positions,
                    out_loc=np.full(end - start, self._dummy_slot, np.int32),
                    output_index=rows * width,
                    output_pos=np.zeros(1, np.int32),
                    samples=np.ones(1, np.bool_),
                    is_decode=end - start == 1,
                    wants_logprobs=False,
                    slot_writes=None,
                    token_writes=None,
                )
            ).wait()
        self.prefill_rate = n / (time.monotonic() - began)
        self._sampler.release(row)
        self._flat_tokens[row * width] = 0


def _device(name: str) -> torch.device:
    if name == "cuda":
        raise UsageError("--device cuda is not available yet; use --device cpu")
    return torch.device("cpu")


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


def _weight_bytes(model: CausalLM) -> int:
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())


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
