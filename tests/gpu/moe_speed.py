"""Times one MoE layer of Qwen3-30B-A3B against its bounds: `python -m tests.gpu.moe_speed`.

Bounds: reading the weights of the experts that are chosen at 4.1 TB/s, and the two products done
densely by torch. With `--sweep` also the time of other block sizes. One JSON line a measurement.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from minisgl.layers.activation import silu_and_mul
from minisgl_kernels.moe import moe_kernels
from minisgl_kernels.moe_experts import Blocks, choose_blocks
from tests.gpu.test_moe import EXPERTS, HIDDEN, TOP_K, WIDTH, make_layer, tokens

READ_BYTES_PER_SECOND = 4.1e12
REPEATS = 20


def microseconds(work: Callable[[], object]) -> float:
    """Median over replays of a graph of one call, caches of the chip flushed between them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[REPEATS // 2]


def dense(rows: int) -> Callable[[], object]:
    """The same arithmetic with one expert for all rows."""
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    gate_up = torch.randn(2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16)
    return lambda: F.linear(silu_and_mul(F.linear(x, gate_up)), down)


def candidates(rows: int) -> Iterator[tuple[Blocks, Blocks]]:
    """Other blocks for so many rows: one of the two products changes at a time."""
    wide, back = choose_blocks(rows, EXPERTS, torch.bfloat16)
    m = wide.m
    columns = (32, 64, 128) if m == 16 else (64, 128, 256)
    for n in columns:
        for k, warps, stages in ((64, 4, 4), (128, 4, 3), (64, 8, 3)):
            block = Blocks(m, n, k, warps, stages)
            if m * n <= 128 * 128:
                yield block, back
            yield wide, block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", type=int, nargs="*", default=[], help="token counts to sweep")
    sweep = parser.parse_args().sweep
    layer, kernels = make_layer(), moe_kernels()
    if kernels is None:
        raise SystemExit("the kernels do not run here")
    gate_up, down = layer.experts.gate_up_proj, layer.experts.down_proj
    for count in (1, 8, 32, 128, 256, 512, 2048, 8192):
        x = tokens(count)
        scores = layer.gate.forward(x)
        weights, ids = kernels.route(scores, TOP_K, True)
        used = ids.unique().numel()
        floor = used * 3 * WIDTH * HIDDEN * 2 / READ_BYTES_PER_SECOND * 1e6
        whole = microseconds(lambda x=x: layer.forward(x))
        experts = microseconds(
            lambda x=x, w=weights, i=ids: kernels.run_experts(x, gate_up, down, w, i)
        )
        routing = microseconds(lambda s=scores: kernels.route(s, TOP_K, True))
        print(json.dumps({
            "tokens": count, "experts_used": used, "layer_us": round(whole, 1),
            "experts_us": round(experts, 1), "route_us": round(routing, 1),
            "weights_floor_us": round(floor, 1),
            "dense_us": round(microseconds(dense(count * TOP_K)), 1),
            "tflops": round(count * TOP_K * 6 * WIDTH * HIDDEN / experts / 1e6, 1),
        }), flush=True)  # fmt: skip
    for count in sweep:
        x = tokens(count)
        weights, ids = kernels.route(layer.gate.forward(x), TOP_K, True)
        run = functools.partial(kernels.run_experts, x, gate_up, down, weights, ids)
        now = choose_blocks(count * TOP_K, EXPERTS, torch.bfloat16)
        found = []
        for blocks in (now, *candidates(count * TOP_K)):
            try:
                time = microseconds(functools.partial(run, blocks))
            except Exception:  # more shared memory or registers than there are
                torch.cuda.synchronize()
                continue
            found.append((round(time, 1), *map(str, blocks)))
        print(json.dumps({"sweep": count, "now": found[0], "best": sorted(found)[:6]}), flush=True)


if __name__ == "__main__":
    main()
