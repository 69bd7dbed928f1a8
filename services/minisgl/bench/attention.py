"""`minisgl bench attention`: how fast each backend reads keys and values in decode steps.

A step is one CUDA graph: the backend's metadata, then all layers, each with keys and values of its
own, so that none finds the last one's in the L2 cache. Backends take turns, round by round, and the
fastest of the rounds counts.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import torch

from minisgl.attention.base import AttentionBackend, AttentionContext, ForwardBatch
from minisgl.attention.registry import BACKENDS, backend_names, device_capability, make_backend
from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import lengths, output_file, positive_int
from minisgl.bench.stats import write_json
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool

STEP_BYTES = 2**30
"""Keys and values of all layers together, at least: many times the L2 cache."""
MOST_LAYERS = 256
DEFAULTS = ("fi@1", "fi@64", "fa@64", "fa@256", "mini@1", "mini@64")


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the dim of a head."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend on one batch."""

    backend: str
    page_size: int
    heads: str
    batch: int
    tokens: str
    layers: int
    seconds: float
    """Of one layer."""
    bytes_per_second: float
    """Keys and values, read once."""


class Slots:
    """The part of `KVPool` that backends read, over a buffer that all page sizes share."""

    def __init__(self, buffer: torch.Tensor, layers: int, heads: Heads, page_size: int) -> None:
        """Uses the start of the flat `buffer`; `slots` says how many tokens a layer holds."""
        each = heads.kv * heads.dim
        self.slots = buffer.numel() // (2 * layers * each) // page_size * page_size
        size = self.slots * each
        flat = buffer[: 2 * layers * size].view(2 * layers, self.slots, heads.kv, heads.dim)
        paged = flat.view(2 * layers, -1, page_size, heads.kv, heads.dim)
        self._flat, self._paged = list(flat.unbind()), list(paged.unbind())

    def k(self, layer: int) -> torch.Tensor:
        return self._flat[2 * layer]

    def v(self, layer: int) -> torch.Tensor:
        return self._flat[2 * layer + 1]

    def k_pages(self, layer: int) -> torch.Tensor:
        return self._paged[2 * layer]

    def v_pages(self, layer: int) -> torch.Tensor:
        return self._paged[2 * layer + 1]


def ragged(batch: int, tokens: int) -> np.ndarray:
    """Lengths about evenly from a quarter to seven quarters of `tokens`, in random order."""
    spread = np.linspace(tokens / 4, tokens * 7 / 4, batch) if batch > 1 else np.array([tokens])
    return np.random.default_rng(0).permutation(spread.astype(np.int32))


@dataclass(frozen=True, slots=True)
class Step:
    """A captured step of all layers."""

    replay: Callable[[], None]
    out: torch.Tensor
    """Result of the last layer."""
    kept: tuple[object, ...]
    """What the graph reads."""


def captured_step(
    name: str, page_size: int, heads: Heads, lens: np.ndarray, buffer: torch.Tensor, layers: int
) -> Step:
    """One step of a backend, with the pages of the requests in random order."""
    device, batch = buffer.device, len(lens)
    longest = int(lens.max())
    slots = Slots(buffer, layers, heads, page_size)
    pages = -(-lens // page_size)
    order = np.random.default_rng(1).permutation(slots.slots // page_size)[: pages.sum()]
    table = np.zeros((batch, longest + page_size), np.int32)
    start = 0
    for row, count in enumerate(pages):
        names = order[start : start + count, None] * page_size + np.arange(page_size)
        table[row, : count * page_size] = names.reshape(-1)
        start += count
    context = AttentionContext(
        device=device, dtype=buffer.dtype, num_qo_heads=heads.query, num_kv_heads=heads.kv,
        head_dim=heads.dim, page_size=page_size, max_running=batch, max_seq_len=table.shape[1],
        capability=device_capability(device),
    )  # fmt: skip
    backend = _decoder(name, context)
    backend.measure_device()
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    step = ForwardBatch(
        input_ids=rows, positions=rows, out_loc=rows, rows=rows,
        page_table=torch.from_numpy(table).to(device), cached_lens=lens - 1, device_lens=lens,
        last_indices=rows, is_decode=True, device_lens_dev=torch.from_numpy(lens).to(device),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=device),
    )  # fmt: skip
    q = torch.randn(batch, heads.query, heads.dim, device=device).to(buffer.dtype)
    pool = cast(KVPool, slots)

    def compute() -> torch.Tensor:
        backend.capture_metadata(step)
        for layer in range(layers):
            out = backend.forward(q, layer, pool, step)
        return out

    backend.init_capture(batch)
    backend.replay_metadata(step)
    compute()  # libraries choose and compile their kernels
    backend.replay_metadata(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    return Step(graph.replay, out, (backend, step, q, slots))


def _decoder(name: str, context: AttentionContext) -> AttentionBackend:
    """The backend as the second of a pair: some of them cannot prefill."""
    BACKENDS[name].check(context.capability, prefill=False, decode=True)
    return make_backend((name,), context)


def best_seconds(replays: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The shortest time of each, in turns. A turn is some replays, at least about 5 ms."""
    counts = []
    for replay in replays:
        once = _elapsed(replay, 1)
        counts.append(max(1, min(200, int(0.005 / once))))
    best = [float("inf")] * len(replays)
    for _ in range(rounds):
        for i, (replay, count) in enumerate(zip(replays, counts, strict=True)):
            best[i] = min(best[i], _elapsed(replay, count) / count)
    return best


def _elapsed(replay: Callable[[], None], count: int) -> float:
    begin, end = _event(), _event()
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def read_ceiling(buffer: torch.Tensor, rounds: int) -> float:
    """Bytes a second of a sum over 2 GiB, which only reads."""
    part = buffer[: 2**30].view(torch.float32)
    total = torch.empty((), dtype=torch.float32, device=buffer.device)

    def read() -> None:
        torch.sum(part, (0,), out=total)

    (seconds,) = best_seconds([read], rounds)
    return part.nbytes / seconds


def measure(
    heads: Heads, batch: int, tokens: int, backends: Sequence[tuple[str, int]],
    buffer: torch.Tensor, rounds: int, *, uneven: bool = False,
) -> list[Measured]:  # fmt: skip
    """Each of `backends` (name, page size) on one batch; what does not fit into `buffer` is left
    out. Raises `UsageError` for a result that is not finite."""
    lens = ragged(batch, tokens) if uneven else np.full(batch, tokens, np.int32)
    width = 2 * heads.kv * heads.dim * buffer.element_size()
    read = int(lens.sum()) * width
    largest = max(size for _, size in backends)
    held = int((-(-lens // largest)).sum()) * largest * width
    layers = min(MOST_LAYERS, max(2, -(-STEP_BYTES // read)))
    if held * layers > buffer.nbytes:
        return []
    steps = []
    for name, page_size in backends:
        step = captured_step(name, page_size, heads, lens, buffer, layers)
        step.replay()
        if not bool(torch.isfinite(step.out).all()):
            raise UsageError(f"{name} with pages of {page_size} gives results that are not finite")
        steps.append(step)
    times = best_seconds([step.replay for step in steps], rounds)
    label = f"{heads.query}x{heads.kv}x{heads.dim}"
    return [
        Measured(
            name, page_size, label, batch, f"{tokens} uneven" if uneven else str(tokens), layers,
            seconds / layers, read / (seconds / layers),
        )
        for (name, page_size), seconds in zip(backends, times, strict=True)
    ]  # fmt: skip


def _backend(text: str) -> tuple[str, int]:
    name, at, size = text.partition("@")
    if name not in BACKENDS or name == "torch" or not at:
        raise argparse.ArgumentTypeError(
            f"must be NAME@PAGE_SIZE with a name of {', '.join(BACKENDS)} but torch, not {text!r}"
        )
    return name, positive_int(size)


def _heads(text: str) -> Heads:
    parts = [positive_int(part) for part in text.split("x")]
    if len(parts) != 3 or parts[0] % parts[1]:
        raise argparse.ArgumentTypeError(f"must be QUERYxKVxDIM, such as 16x8x128, not {text!r}")
    return Heads(*parts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--backend", action="append", type=_backend, metavar="NAME@PAGE_SIZE",
        help=f"may be repeated (default: {', '.join(DEFAULTS)})",
    )  # fmt: skip
    parser.add_argument(
        "--heads", action="append", type=_heads, metavar="QUERYxKVxDIM",
        help="may be repeated (default: 16x8x128 and 40x8x128, Qwen3 0.6B and 14B)",
    )  # fmt: skip
    parser.add_argument("--batch", type=lengths, default=(1, 16, 64, 128, 256), metavar="N,N")
    parser.add_argument("--tokens", type=lengths, default=(512, 1024, 2048, 8192), metavar="N,N")
    parser.add_argument(
        "--rounds", type=positive_int, default=5, help="turns of each backend (default: 5)"
    )
    parser.add_argument(
        "--gib", type=positive_int, default=24,
        help="device memory for keys and values; larger batches are left out (default: 24)",
    )  # fmt: skip
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write all figures to this file"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0. Raises `UsageError` without a GPU."""
    if not torch.cuda.is_available():
        raise UsageError("minisgl bench attention needs an NVIDIA GPU that torch can use")
    device = torch.device("cuda", torch.cuda.current_device())
    backends = args.backend or [_backend(text) for text in DEFAULTS]
    for name, _ in backends:
        backend_names(f"torch,{name}", device_capability(device))
    buffer = torch.empty(args.gib * 2**29, dtype=torch.bfloat16, device=device)
    for start in range(0, buffer.numel(), 2**29):
        buffer[start : start + 2**29].normal_()
    ceiling = read_ceiling(buffer, args.rounds)
    print(f"{torch.cuda.get_device_name(device)}, read ceiling {ceiling / 1e12:.2f} TB/s")
    labels = [f"{name}@{size}" for name, size in backends]
    titles = "".join(f"{label:>10}" for label in labels)
    print(f"{'heads':<11}{'batch':>6}{'tokens':>12}{titles}  TB/s")
    found: list[Measured] = []
    with ending_on_signals(), torch.inference_mode():
        for heads in args.heads or [Heads(16, 8, 128), Heads(40, 8, 128)]:
            for batch in args.batch:
                for tokens in args.tokens:
                    for uneven in (False, True) if batch > 1 else (False,):
                        row = measure(
                            heads, batch, tokens, backends, buffer, args.rounds, uneven=uneven
                        )
                        found += row
                        _print(row)
    if args.json:
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(device),
            "read_bytes_per_second": ceiling,
            "decode_attention": [asdict(one) for one in found],
        }
        write_json(args.json, report)
    return 0


def _print(row: Sequence[Measured]) -> None:
    if row:
        first = row[0]
        rates = "".join(f"{one.bytes_per_second / 1e12:>10.2f}" for one in row)
        print(f"{first.heads:<11}{first.batch:>6}{first.tokens:>12}{rates}", flush=True)
