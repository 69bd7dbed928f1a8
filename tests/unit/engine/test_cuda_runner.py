"""The steps of a CUDA device on a CPU: streams that compute at once, graphs that compute again.

So the arrays, the table writes, the padding and the way of the tokens are tried without a GPU; what
streams do to the order is tried on one, in tests/gpu.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.attention.base import AttentionBackend, ForwardBatch, Turn
from minisgl.attention.torch_backend import TorchBackend
from minisgl.engine import engine as engine_
from minisgl.engine.cuda import CudaRunner
from minisgl.engine.graph_sizes import graph_sizes, prompt_sizes, size_for
from minisgl.engine.runner import Parts
from minisgl.engine.sampler import Sampler
from minisgl.engine.sampling_table import SamplingTable
from minisgl.engine.staging import Layout, Staging
from minisgl.engine.step_arrays import (
    fill_requests,
    fill_tokens,
    padded_lens,
    request_fields,
    token_fields,
)
from minisgl.engine.tables import Tables
from minisgl.kvcache.pool import KVPool
from minisgl.models.decoder import Rope
from minisgl_kernels.qk_rope_store import qk_rope_store_reference
from tests.tiny import build_tiny

CPU = torch.device("cpu")
STEP_SECONDS = 0.125
"""Between two events of one step."""


# --- what stands in for torch.cuda ---------------------------------------------------------------


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = 0
        self.timed = enable_timing

    def record(self, stream: object = None) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        assert self.timed and end.timed and self.recorded == end.recorded
        return STEP_SECONDS * 1e3


class Stream:
    def wait_event(self, event: Event) -> None:
        assert event.recorded, "a stream waits for what was never queued"

    def synchronize(self) -> None:
        pass


class Graph:
    """Keeps what computes the step, and computes it again at each replay."""

    compute: Callable[[], object]

    def capture_begin(self, **options: object) -> None:
        self.compute = sys._getframe(1).f_locals["compute"]

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.compute()


class CapturedTorch(TorchBackend):
    """The reference, with the lengths of each replay; in a graph it would see old ones."""

    captures = True

    def capture_metadata(self, batch: ForwardBatch) -> None:
        self.prepare_metadata(batch)


class FusedTorch(CapturedTorch):
    """Turns queries and keys itself in steps of few tokens."""

    fuses = 3
    calls: ClassVar[int] = 0

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        type(self).calls += 1
        k, v = pool.k(layer), pool.v(layer)
        queries = qkv.shape[1] // k.shape[2] - 2 * k.shape[1]
        q = qk_rope_store_reference(
            qkv, turn.q_weight, turn.k_weight, turn.eps, turn.table, batch.positions,
            batch.out_loc, k, v, queries, k.shape[1],
        )  # fmt: skip
        return self.forward(q, layer, pool, batch)


@pytest.fixture
def cuda_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CudaRunner]]:
    """Engines on a CPU take the runner for CUDA; the list holds theirs."""
    for name, stand_in in {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph,
        "stream": lambda stream: contextlib.nullcontext(), "graph_pool_handle": object,
        "set_stream": lambda stream: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    made: list[CudaRunner] = []

    def start(
        self: Any, network: Any, attention: AttentionBackend, sampler: Sampler, *rest: object
    ) -> None:
        config = self._config
        self.num_pages = config.num_pages or 600
        pool = self._make_pool(self.num_pages)
        parts = Parts(network, CapturedTorch(), self._make_tables(pool), sampler, pool)
        requests = config.max_running_requests
        self._runner = CudaRunner(
            parts, Stream(), vocab_size=self.vocab_size, dtype=self._dtype,  # type: ignore[arg-type]
            max_requests=requests, max_tokens=config.max_prefill_tokens + requests,
            check=lambda: None,
        )  # fmt: skip
        most = 256 if config.cuda_graph_max_bs is None else config.cuda_graph_max_bs
        self._runner.capture(graph_sizes(min(most, requests)), prompt_sizes(self.max_seq_len))
        made.append(self._runner)

    monkeypatch.setattr(engine_.Engine, "_start_cpu", start)
    yield made


# --- steps ---------------------------------------------------------------------------------------


def _prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(4, 200, (n,), generator=g).tolist() for n in (1, 4, 40, 23, 17, 40)]


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_p=0.8, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=6, max_tokens=12, frequency_penalty=1.2, logit_bias={7: 3.0},
        ignore_eos=True,
    ),
    SamplingParams(temperature=0.0, max_tokens=7, repetition_penalty=1.4, ignore_eos=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "qwen3", "qwen3", seed=3)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[Any]:
    with LLM(tiny, dtype="float32") as llm:
        return _generate(llm)


def _generate(llm: LLM) -> list[Any]:
    return [
        (o.token_ids, None if o.logprobs is None else [p.top_ids for p in o.logprobs])
        for _ in range(2)  # the second time from the cache
        for o in llm.generate(_prompts(), PARAMS)
    ]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"cuda_graph_max_bs": 3},
        {"overlap_scheduling": False},
        {"page_size": 16},
        {"max_prefill_tokens": 5},
        {"schedule": "mixed", "max_prefill_tokens": 9},
        {"num_pages": 90, "reserve_tokens": 2},
        {"max_running_requests": 2},
    ],
    ids=lambda s: "-".join(s) or "default",
)
def test_queued_steps_give_the_tokens_of_steps_computed_at_once(
    tiny: Path, expected: list[Any], cuda_on_cpu: list[CudaRunner], setting: dict[str, Any]
) -> None:
    with LLM(tiny, dtype="float32", **setting) as llm:
        assert _generate(llm) == expected
    assert len(cuda_on_cpu) == 1, "the runner for CUDA was not used"


def test_a_device_is_busy_for_the_time_of_the_steps_that_were_read(
    tiny: Path, cuda_on_cpu: list[CudaRunner]
) -> None:
    with LLM(tiny, dtype="float32") as llm:
        (runner,) = cuda_on_cpu
        llm.generate(_prompts())
        assert runner.busy == 0
        runner.measure_busy()
        steps: list[object] = []
        llm.on_step = steps.append
        llm.generate(_prompts(), PARAMS)
        queued = len(steps) - 1  # the last turn of the loop only reads
        assert runner.busy == pytest.approx(queued * STEP_SECONDS) and queued > 3


def test_a_backend_that_turns_queries_and_keys_itself_gives_the_same_tokens(
    tiny: Path, expected: list[Any], cuda_on_cpu: list[CudaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithTable(Rope):
        def __init__(self, rotary: Any, table: None, *rest: Any) -> None:
            super().__init__(rotary, rotary.table(256), *rest)

    monkeypatch.setattr("minisgl.models.decoder.Rope", WithTable)
    monkeypatch.setattr(sys.modules[__name__], "CapturedTorch", FusedTorch)
    with LLM(tiny, dtype="float32") as llm:
        assert _generate(llm) == expected
    assert FusedTorch.calls


def test_more_table_writes_than_a_block_holds_go_in_pieces(
    tiny: Path, expected: list[Any], cuda_on_cpu: list[CudaRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.engine.cuda.WRITES_AT_ONCE", 10)
    with LLM(tiny, dtype="float32", max_prefill_tokens=4) as llm:
        assert _generate(llm) == expected


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        (0, []),
        (1, [1]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
    ],
)
def test_graphs_are_captured_for_powers_of_two_then_each_eight(
    limit: int, sizes: list[int]
) -> None:
    assert graph_sizes(limit) == sizes


def test_a_batch_takes_the_smallest_graph_that_holds_it() -> None:
    sizes = graph_sizes(32)
    assert [size_for(sizes, n) for n in (1, 3, 8, 9, 32, 33)] == [1, 4, 8, 16, 32, None]
    assert size_for([], 1) is None


def test_arrays_of_a_block_do_not_overlap_and_tensors_see_the_same_bytes() -> None:
    layout = Layout([("a", np.int32, 3), ("b", np.uint8, 5), ("c", np.int64, 2)], start=8)
    staging = Staging(layout.end, CPU)
    arrays = layout.arrays(staging.begin())
    arrays["a"][:], arrays["b"][:], arrays["c"][:] = (1, 2, 3), 7, (-1, 2**40)
    staging.send(layout.end)
    tensors = layout.tensors(staging.block)
    assert tensors["a"].tolist() == [1, 2, 3]
    assert tensors["b"].tolist() == [7] * 5
    assert tensors["c"].tolist() == [-1, 2**40]
    assert all(t.data_ptr() % 4 == 0 for t in tensors.values())


def test_a_block_is_filled_again_only_after_its_copy_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    class Watched(Event):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            self.number, Watched.count = Watched.count, Watched.count + 1

        def record(self, stream: object = None) -> None:
            seen.append(("copied from", self.number))

        def synchronize(self) -> None:
            seen.append(("waited for", self.number))

    monkeypatch.setattr("minisgl.engine.staging.new_event", lambda device: Watched())
    staging = Staging(16, CPU, blocks=2)
    for _ in range(3):
        staging.begin()
        staging.send(16)
    assert seen == [("copied from", 0), ("copied from", 1), ("waited for", 0), ("copied from", 0)]


def test_a_batch_is_filled_up_with_greedy_dummy_requests_of_one_token() -> None:
    tables = Tables.make(5, 10, CPU).with_dummy_slot(70)
    table = SamplingTable(5)
    table.set(1, SamplingParams(temperature=0.5, seed=9))
    table.set(3, SamplingParams(temperature=0.0))
    step = tables.dummy_step([3, 6], [4, 7])
    step.rows, step.output_index = np.array([1, 3]), np.array([14, 37])
    layout = Layout(request_fields(4))
    arrays = layout.arrays(np.full(layout.end, 255, np.uint8))
    fill_requests(arrays, step, table, tables)
    assert arrays["rows"].tolist() == [1, 3, 4, 4]
    assert arrays["lens"].tolist() == [4, 7, 1, 1]
    assert arrays["output_index"].tolist() == [14, 37, 40, 40]
    assert arrays["greedy"].tolist() == [0, 1, 1, 1]
    assert arrays["seeds"][0] == 9
    assert arrays["temperature"].tolist() == pytest.approx([0.5, 1e-6, 1, 1])


def test_the_dummy_row_refers_to_the_dummy_page_alone() -> None:
    tables = Tables.make(3, 6, CPU).with_dummy_slot(32)
    assert tables.pages[-1].tolist() == [32] * 6
    step = tables.dummy_step([0, 2], [3, 3])
    assert step.positions.tolist() == [0, 1, 2, 2]
    assert step.input_index.tolist() == [12, 13, 14, 14]
    assert set(step.out_loc.tolist()) == {32}
    assert not step.is_decode and tables.dummy_step([2], [3]).is_decode


def test_the_tokens_of_a_step_stand_behind_each_other() -> None:
    tables = Tables.make(3, 6, CPU).with_dummy_slot(32)
    step = tables.dummy_step([0, 2], [3, 3])
    layout = Layout(token_fields(2, 4))
    arrays = layout.arrays(np.zeros(layout.end, np.uint8))
    fill_tokens(arrays, step, tables)
    assert arrays["cu_seqlens_q"].tolist() == [0, 3, 4]
    assert arrays["last_indices"].tolist() == [2, 3]


def test_the_first_dummy_request_takes_the_tokens_that_a_graph_has_left() -> None:
    tables = Tables.make(3, 16, CPU).with_dummy_slot(32)
    step = tables.dummy_step([0, 2], [3, 3])
    step.out_loc[:] = 7
    for left in (0, 5):
        layout = Layout(request_fields(5) + token_fields(5, 4 + left))
        arrays = layout.arrays(np.full(layout.end, 99, np.uint8))
        fill_requests(arrays, step, SamplingTable(3), tables)
        fill_tokens(arrays, step, tables)
        before, after = padded_lens(step, 5, 4 + left)
        assert arrays["lens"].tolist() == after.tolist() == [3, 3, left or 1, 1, 1]
        assert before.tolist() == [0, 2, 0 if left else 1, 1, 1]
        assert arrays["cu_seqlens_q"].tolist() == [0, 3, 4, *[4 + left] * 3]
        assert arrays["positions"].tolist() == [0, 1, 2, 2, *range(left)]
        assert arrays["out_loc"].tolist() == [7] * 4 + [32] * left
        assert np.diff(arrays["cu_seqlens_q"]).tolist() == (after - before).tolist()
