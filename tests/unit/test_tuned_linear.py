"""The choice among cuBLASLt's algorithms, on a library that only notes what it is asked."""

import ctypes
import logging

import pytest
import torch

from minisgl_kernels import tuned_linear
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.measured import Measured
from minisgl_kernels.tuned_linear import (
    CublasLt,
    measuring,
    tuned_linear_function,
    tuned_linear_reference,
)


class Library:
    """Offers `count` algorithms; the one numbered `fastest` takes the least time."""

    def __init__(self, count=4, fastest=2):
        self.count, self.fastest = count, fastest
        self.ran, self.clock, self.status, self.refused = [], 0.0, 0, None

    def __getattr__(self, name):
        def call(*arguments):
            if name == "cublasLtMatmulAlgoGetHeuristic":
                for i in range(self.count):
                    arguments[-2][i].algorithm[0] = i
                arguments[-1]._obj.value = self.count
            if name == "cublasLtMatmul":
                algorithm = arguments[12]._obj[0]
                if algorithm == self.refused:
                    return 15
                beta = arguments[7]._obj.value
                self.ran.append((algorithm, beta))
                self.clock += 1.0 if algorithm == self.fastest else 2.0 + algorithm
            return self.status

        return call


@pytest.fixture
def library(monkeypatch):
    made = Library()

    class Event:
        def record(self):
            self.at = made.clock

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at - self.at

    class Stream:
        cuda_stream = 0

    monkeypatch.setattr(tuned_linear, "_load", lambda: made)
    monkeypatch.setattr(tuned_linear, "_event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    made.capturing = False
    with measuring():
        yield made


def operands(tokens=3):
    return [torch.zeros(s, dtype=torch.bfloat16) for s in ((tokens, 64), (8, 64), (tokens, 8))]


def test_the_fastest_algorithm_is_found_once_and_then_used(library):
    lt = CublasLt(torch.device("cpu"))
    x, weight, out = operands()
    lt.linear(x, weight, None, out)
    measured = len(library.ran)
    assert {algorithm for algorithm, _ in library.ran} == {0, 1, 2, 3}
    assert library.ran[-1] == (2, 0.0)
    lt.linear(x, weight, None, out)
    assert library.ran[measured:] == [(2, 0.0)]


def test_what_was_found_is_taken_at_the_next_start(library, tmp_path):
    x, weight, out = operands()
    CublasLt(torch.device("cpu"), Measured(tmp_path / "kept")).linear(x, weight, None, out)
    library.ran.clear()
    CublasLt(torch.device("cpu"), Measured(tmp_path / "kept")).linear(x, weight, None, out)
    assert library.ran == [(2, 0.0)]
    library.count = 2  # another library
    CublasLt(torch.device("cpu"), Measured(tmp_path / "kept")).linear(x, weight, None, out)
    assert {algorithm for algorithm, _ in library.ran[1:]} == {0, 1}


def test_an_algorithm_that_does_not_take_the_operands_is_passed_over(library):
    library.refused = library.fastest
    CublasLt(torch.device("cpu")).linear(*operands()[:2], None, operands()[2])
    assert library.ran[-1] == (0, 0.0)


def test_a_residual_is_an_operand_of_a_plan_of_its_own(library):
    lt = CublasLt(torch.device("cpu"))
    x, weight, out = operands()
    lt.linear(x, weight, out, out)
    assert {beta for _, beta in library.ran} == {1.0}
    measured = len(library.ran)
    lt.linear(x, weight, None, out)
    assert len(library.ran) > measured + 4


def test_a_shape_is_not_measured_outside_of_the_warm_up_or_while_a_graph_is_captured(library):
    lt = CublasLt(torch.device("cpu"))
    x, weight, out = operands()
    library.capturing = True
    assert not lt.linear(x, weight, None, out)
    library.capturing = False
    tuned_linear._MEASURING.set(False)
    assert not lt.linear(x, weight, None, out)
    assert library.ran == []
    tuned_linear._MEASURING.set(True)
    assert lt.linear(x, weight, None, out)
    tuned_linear._MEASURING.set(False)
    assert lt.linear(x, weight, None, out)
    assert library.ran[-1] == (2, 0.0)


def test_a_shape_without_an_algorithm_and_a_failure_are_told(library):
    library.count = 0
    with pytest.raises(KernelUnavailable, match="3 tokens of 64 with 8 rows"):
        CublasLt(torch.device("cpu")).linear(*operands()[:2], None, operands()[2])
    library.status = 15
    with pytest.raises(KernelUnavailable, match="cublasLtCreate of cuBLASLt failed with status 15"):
        CublasLt(torch.device("cpu"))


def test_the_heuristics_result_has_the_size_of_the_librarys_struct():
    assert ctypes.sizeof(tuned_linear._Heuristic) == 96


def test_without_a_gpu_the_function_is_none_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tuned_linear_function.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [tuned_linear_function() for _ in range(3)] == [None] * 3
    assert [r.message for r in caplog.records] == [
        "products run in torch, because cuBLASLt cannot be called: there is no CUDA device"
    ]
    tuned_linear_function.cache_clear()


def test_the_reference_adds_to_a_residual_in_place():
    x, weight, residual = torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 3)
    assert tuned_linear_reference(x, weight, residual=residual) is residual
    assert residual.tolist() == [[5.0] * 3] * 2
    out = torch.empty(2, 3)
    assert tuned_linear_reference(x, weight, out=out) is out
