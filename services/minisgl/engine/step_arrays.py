"""Which arrays a step on a CUDA device has, and what stands in them.

A graph has a fixed number of requests, and of tokens if it is one for prompts: what a step lacks is
filled up with the dummy row, whose tokens are read from and written to the dummy page.
"""

import numpy as np

from minisgl.engine import sampling_table as table_
from minisgl.engine.staging import Array
from minisgl.engine.step import Int32s, StepInput
from minisgl.engine.tables import Tables

Fields = list[tuple[str, type[np.generic], int]]


def request_fields(count: int) -> Fields:
    """What every step has, for so many requests."""
    return [
        ("seeds", np.int64, count), ("output_pos", np.int64, count),
        ("output_index", np.int64, count), ("rows", np.int32, count), ("lens", np.int32, count),
        ("temperature", np.float32, count), ("greedy", np.uint8, count),
        ("top_k", np.int64, count), ("top_p", np.float64, count), ("min_p", np.float64, count),
    ]  # fmt: skip


def token_fields(count: int, tokens: int) -> Fields:
    """What an eager step has beside them: a graph computes it from the tables."""
    return [
        ("input_index", np.int64, tokens), ("positions", np.int32, tokens),
        ("out_loc", np.int32, tokens), ("last_indices", np.int32, count),
        ("cu_seqlens_q", np.int32, count + 1),
    ]  # fmt: skip


def fill_requests(
    arrays: dict[str, Array], step: StepInput, table: table_.SamplingTable, tables: Tables
) -> None:
    """Write the requests of a step; arrays that are longer get dummy requests of one token."""
    n, rows, dummy_row, width = len(step.rows), step.rows, tables.dummy_row, tables.width
    arrays["rows"][:n], arrays["rows"][n:] = rows, dummy_row
    arrays["lens"][:n], arrays["lens"][n:] = step.device_lens, 1
    arrays["output_index"][:n], arrays["output_index"][n:] = step.output_index, dummy_row * width
    arrays["output_pos"][:n], arrays["output_pos"][n:] = step.output_pos, 0
    arrays["seeds"][:n], arrays["seeds"][n:] = table.seed[rows], 0
    arrays["temperature"][:n], arrays["temperature"][n:] = table.temperature[rows], 1
    arrays["greedy"][:n] = table.needs[rows] & table_.SAMPLED == 0
    arrays["greedy"][n:] = 1


def fill_limits(arrays: dict[str, Array], step: StepInput, table: table_.SamplingTable) -> None:
    """Write what the requests of a step limit their draws by; the others have no limit."""
    n, rows = len(step.rows), step.rows
    needs = table.needs[rows]
    arrays["top_k"].fill(table_.NO_TOP_K)
    arrays["top_k"][:n] = np.where(needs & table_.TOP_K, table.top_k[rows], table_.NO_TOP_K)
    arrays["top_p"].fill(1.0)
    arrays["top_p"][:n] = np.where(needs & table_.TOP_P, table.top_p[rows], 1.0)
    arrays["min_p"].fill(0.0)
    arrays["min_p"][:n] = np.where(needs & table_.MIN_P, table.min_p[rows], 0.0)


def fill_tokens(arrays: dict[str, Array], step: StepInput, tables: Tables) -> None:
    """Write the tokens of a step, after its requests. If the arrays are longer, the first dummy
    request gets all other tokens, and those behind it none."""
    n, count = len(step.rows), len(step.positions)
    ends = np.cumsum(step.device_lens - step.cached_lens)
    left = len(arrays["positions"]) - count
    arrays["input_index"][:count] = step.input_index
    arrays["input_index"][count:] = tables.dummy_row * tables.width
    arrays["positions"][:count], arrays["positions"][count:] = step.positions, np.arange(left)
    arrays["out_loc"][:count], arrays["out_loc"][count:] = step.out_loc, tables.dummy_slot
    arrays["last_indices"][:n], arrays["last_indices"][n:] = ends - 1, 0
    starts = arrays["cu_seqlens_q"]
    starts[0], starts[1 : n + 1], starts[n + 1 :] = 0, ends, count + left
    if left:
        arrays["lens"][n] = left


def padded_lens(step: StepInput, requests: int, tokens: int) -> tuple[Int32s, Int32s]:
    """(Lengths before, lengths after) of a step that is filled up to so many requests and tokens,
    as `fill_requests` and `fill_tokens` do it."""
    n, left = len(step.rows), tokens - len(step.positions)
    before, after = np.ones(requests, np.int32), np.ones(requests, np.int32)
    before[:n], after[:n] = step.cached_lens, step.device_lens
    if left:
        before[n], after[n] = 0, left
    return before, after
