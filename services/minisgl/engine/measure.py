"""What a CUDA device needs beside weights and KV cache: measured, not guessed.

The largest steps are computed on the dummy row, with a pool of the dummy page alone. What the
device has less afterwards is what they took: activations as the allocator laid them out, workspaces
of libraries, code of kernels.
"""

import numpy as np
import torch

from minisgl.engine.cuda import CudaRunner
from minisgl.engine.sampler import Sampler
from minisgl.messages import SamplingParams
from minisgl_kernels.tuned_linear import measuring

DECODE_LENGTH = 1024
"""Tokens of each request of the measured decode step: beyond it, kernels need no more memory."""
EVERYTHING = SamplingParams(
    temperature=1.0, top_p=0.5, min_p=1e-9, presence_penalty=0.5, frequency_penalty=0.5,
    repetition_penalty=1.1, logit_bias={0: 0.0}, logprobs=20, seed=1,
)  # fmt: skip
"""All that a request can ask of sampling, in its most expensive form."""


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that nobody has, blocks that torch keeps for later not among them."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return free


def largest_steps(runner: CudaRunner, requests: int, tokens: int) -> int:
    """Compute the largest prefill and a full decode batch: bytes that they took at their peak."""
    tables = runner.parts.tables
    device = tables.pages.device
    before = free_bytes(device)
    for lens in (_prefill(requests, tokens, tables.width), _decode(requests, tables.width)):
        runner.forward(tables.dummy_step(*lens)).wait()
    return _taken_since(before, device)


def full_chunk(runner: CudaRunner, requests: int, tokens: int) -> None:
    """Compute a step of so many prompt tokens, most steps of long prompts, and measure by which
    algorithms its products are computed fastest."""
    tables = runner.parts.tables
    with measuring():
        runner.forward(tables.dummy_step(*_prefill(requests, tokens, tables.width))).wait()


def largest_sampling(vocab_size: int, requests: int, device: torch.device) -> int:
    """Sample for a full batch that asks for everything: bytes that it took at its peak.

    The logits are all equal, so that no token is out of the question.
    """
    before = free_bytes(device)
    sampler = Sampler(vocab_size, device, requests)
    for row in range(requests):
        sampler.admit(row, EVERYTHING, np.zeros(1, np.int32), np.zeros(1, np.int32))
    logits = torch.zeros((requests, vocab_size), dtype=torch.bfloat16, device=device)
    rows = np.arange(requests)
    with torch.inference_mode():
        sampler.sample(logits, sampler.prepare(rows, np.ones(requests, np.int32)))
    return _taken_since(before, device)


def graphs(runner: CudaRunner, sizes: list[int]) -> int:
    """Bytes that the graphs of these batch sizes, rising, will take: of the largest, and so much
    for each other one as the second largest takes beside it."""
    if not sizes:
        return 0
    device = runner.parts.tables.pages.device
    before = free_bytes(device)
    runner.capture(sizes[-1:])
    one = before - free_bytes(device)
    if len(sizes) == 1:
        runner.drop_graphs()
        return max(one, 0)
    runner.capture(sizes[-2:])
    two = before - free_bytes(device)
    runner.drop_graphs()
    return max(one, 0) + (len(sizes) - 1) * max(two - one, 0)


def _prefill(requests: int, tokens: int, width: int) -> tuple[list[int], list[int]]:
    """Lengths before and after a step of so many tokens: one each, and the first ones the rest."""
    count = min(requests, tokens)
    rest = tokens - count
    after = []
    for _ in range(count):
        more = min(rest, width - 1)
        after.append(1 + more)
        rest -= more
    return [0] * count, after


def _decode(requests: int, width: int) -> tuple[list[int], list[int]]:
    length = min(width, DECODE_LENGTH)
    return [length - 1] * requests, [length] * requests


def _taken_since(before: int, device: torch.device) -> int:
    """Without giving torch's blocks back first: they are the peak."""
    torch.cuda.synchronize(device)
    free, _ = torch.cuda.mem_get_info(device)
    return max(before - free, 0)
