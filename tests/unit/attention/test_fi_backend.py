"""What FlashInfer is told of a step, with wrappers that only note it."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.attention import fi_backend
from minisgl.attention.base import AttentionContext, ForwardBatch
from minisgl.attention.fi_backend import FlashInferBackend
from minisgl.attention.staging import PinnedRing

PAGE_SIZE, WIDTH = 16, 112
TABLE = (torch.arange(7).unsqueeze(1) * WIDTH + torch.arange(WIDTH)).int()
ROWS = [3, 1, 0, 5]


class FakeModule:
    """The compiled part, which plans decode from arrays on the host."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> list[int]:
        self.plans.append(args)
        return [len(self.plans)]


class FakeWrapper:
    """The part of both wrappers that the backend uses."""

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        self.is_cuda_graph_enabled = options.get("use_cuda_graph", False)
        self.options, self._cached_module = options, FakeModule()
        self.plans: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def plan(self, *args: Any, **options: Any) -> None:
        self.plans.append((args, options))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FlashInferBackend:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)

    def ring(nbytes: int) -> PinnedRing:
        return PinnedRing(
            nbytes, allocate=lambda n: torch.empty(n, dtype=torch.uint8), event=lambda: event
        )

    monkeypatch.setattr(fi_backend, "PinnedRing", ring)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: event)
    return FlashInferBackend(
        AttentionContext(
            device=torch.device("cpu"), dtype=torch.bfloat16, num_qo_heads=4, num_kv_heads=2,
            head_dim=64, page_size=PAGE_SIZE, max_running=6, max_seq_len=100, capability=(9, 0),
        )
    )  # fmt: skip


def step(cached: list[int], lens: list[int]) -> ForwardBatch:
    new = np.array(lens) - np.array(cached)
    rows = torch.tensor(ROWS[: len(lens)], dtype=torch.int32)
    return ForwardBatch(
        input_ids=rows, positions=rows, out_loc=rows, rows=rows, page_table=TABLE,
        cached_lens=np.array(cached, np.int32), device_lens=np.array(lens, np.int32),
        last_indices=rows, is_decode=bool((new == 1).all()),
        device_lens_dev=torch.tensor(lens, dtype=torch.int32),
    )  # fmt: skip


def pages(backend: FlashInferBackend) -> list[int]:
    return backend._indices.tolist()


def test_decode_is_planned_by_page_counts_and_lengths(backend: FlashInferBackend) -> None:
    batch = step([0, 15, 16, 99], [1, 16, 17, 100])
    backend.prepare_metadata(batch)
    wrapper = batch.metadata.wrapper
    (plan,) = wrapper._cached_module.plans
    assert plan[4].tolist() == [0, 1, 2, 4, 11]
    assert plan[5].tolist() == [1, 16, 17, 100]
    assert wrapper._paged_kv_indptr_buf.tolist() == [0, 1, 2, 4, 11]
    assert wrapper._paged_kv_last_page_len_buf.tolist() == [1, 16, 1, 4]
    first = [row * WIDTH // PAGE_SIZE for row in ROWS]
    assert pages(backend)[:4] == [first[0], first[1], first[2], first[2] + 1]
    assert pages(backend)[4:11] == list(range(first[3], first[3] + 7))


def test_prefill_is_planned_with_the_new_tokens_of_each_request(
    backend: FlashInferBackend,
) -> None:
    batch = step([0, 0, 5, 96], [1, 16, 17, 100])
    backend.prepare_metadata(batch)
    ((args, options),) = batch.metadata.wrapper.plans
    assert args[0].tolist() == [0, 1, 17, 29, 33]
    assert args[1].tolist() == [0, 1, 2, 4, 11]
    assert args[3].tolist() == [1, 16, 1, 4]
    assert options["causal"] and options["seq_lens"].tolist() == [1, 16, 17, 100]


def test_a_graph_is_planned_on_the_host_and_told_its_pages_in_the_capture(
    backend: FlashInferBackend,
) -> None:
    batch = step([0, 15, 16], [1, 16, 17])
    backend.replay_metadata(batch)
    assert not any(pages(backend))
    backend.capture_metadata(batch)
    wrapper = batch.metadata.wrapper
    assert wrapper.options["paged_kv_last_page_len_buffer"].tolist() == [1, 16, 1]
    assert pages(backend)[:4] != [0] * 4
    backend.replay_metadata(step([31, 31, 1], [32, 32, 2]))
    assert wrapper.options["paged_kv_indptr_buffer"].tolist() == [0, 2, 4, 5]


def test_arrays_of_one_step_are_not_those_of_the_next(backend: FlashInferBackend) -> None:
    """E03: the device may still read those of the step before."""
    for cached, lens in (([3], [4]), ([5], [6]), ([2], [9]), ([0], [8])):
        backend.prepare_metadata(step(cached, lens))
    decode, prefill = backend._eager._cached_module.plans, backend._prefill.plans
    for index in (2, 4, 5):  # the plan's own memory, and the arrays
        assert decode[0][index].data_ptr() != decode[1][index].data_ptr()
    assert prefill[0][0][1].data_ptr() != prefill[1][0][1].data_ptr()


def test_tensor_cores_are_used_for_real_pages(backend: FlashInferBackend) -> None:
    assert backend._eager.options["use_tensor_cores"]
