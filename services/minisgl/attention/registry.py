"""The attention backends, one line an entry, and the choice among them."""

import logging
from collections.abc import Callable, Sequence

import torch

from minisgl.attention.base import (
    HALVES,
    AttentionBackend,
    AttentionContext,
    ForwardBatch,
    Needs,
    Turn,
)
from minisgl.attention.cpu_backend import CpuBackend
from minisgl.attention.fa_backend import FlashAttentionBackend
from minisgl.attention.fi_backend import FlashInferBackend
from minisgl.attention.mini_backend import MiniBackend
from minisgl.attention.torch_backend import TorchBackend
from minisgl.attention.trtllm_backend import TrtllmBackend
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool
from minisgl_kernels.cpu_decoder import DIM_STEP, cpu_decoder_available
from minisgl_kernels.decode_attention import decode_attention_function, supports

BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchBackend,
    "fi": FlashInferBackend,
    "fa": FlashAttentionBackend,
    "trtllm": TrtllmBackend,
    "mini": MiniBackend,
    "cpu": CpuBackend,
}
"""Each by its name in `--attention-backend`."""

_log = logging.getLogger(__name__)
_USUAL = Needs()


class HybridBackend(AttentionBackend):
    """One backend for steps that only decode, another one for all other steps."""

    def __init__(
        self, ctx: AttentionContext, prefill: AttentionBackend, decode: AttentionBackend
    ) -> None:
        super().__init__(ctx)
        self._prefill, self._decode = prefill, decode
        # Those of a pair are not those of the class.
        self.captures = decode.captures  # type: ignore[misc]
        self.captures_prefill = prefill.captures_prefill  # type: ignore[misc]
        self.fuses = decode.fuses

    def measure_device(self) -> None:
        self._decode.measure_device()
        self._prefill.measure_device()

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._of(batch).prepare_metadata(batch)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._of(batch).forward(q, layer, pool, batch)

    def forward_qkv(
        self, qkv: torch.Tensor, turn: Turn, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._of(batch).forward_qkv(qkv, turn, layer, pool, batch)

    def init_capture(self, max_bs: int) -> None:
        self._decode.init_capture(max_bs)
        self._prefill.init_capture(max_bs)

    def capture_metadata(self, batch: ForwardBatch) -> None:
        self._of(batch).capture_metadata(batch)

    def replay_metadata(self, batch: ForwardBatch) -> None:
        self._of(batch).replay_metadata(batch)

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self._decode if batch.is_decode else self._prefill


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None for others."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def backend_names(
    name: str, capability: tuple[int, int] | None, needs: Needs = _USUAL, *,
    compiles: Callable[[], bool] = lambda: decode_attention_function() is not None,
    compiles_cpu: Callable[[], bool] = cpu_decoder_available,
) -> tuple[str, ...]:  # fmt: skip
    """What `--attention-backend` names on this device: one backend, or those of prefill and decode.

    `auto` becomes what suits the device and the model; `compiles` and `compiles_cpu` say whether it
    can have kernels of our own. `UsageError` lists the choices, or says what of it this device or
    the model's type cannot do.
    """
    if name == "auto":
        name = _auto(capability, needs, compiles, compiles_cpu)
    names = tuple(name.split(","))
    if len(names) > 2:
        raise UsageError(
            f"--attention-backend takes one name or a pair PREFILL,DECODE, not {name!r}"
        )
    for part in names:
        if part not in BACKENDS:
            raise UsageError(
                f"--attention-backend {part!r} is not known; choices: auto, "
                f"{', '.join(BACKENDS)}, or a pair PREFILL,DECODE of them"
            )
        if needs.dtype not in BACKENDS[part].dtypes:
            types = " or ".join(str(t).removeprefix("torch.") for t in BACKENDS[part].dtypes)
            raise UsageError(
                f"--attention-backend {part} computes in {types}; use --dtype bfloat16, or "
                "--attention-backend torch"
            )
    BACKENDS[names[0]].check(capability, prefill=True, decode=len(names) == 1)
    if len(names) == 2:
        BACKENDS[names[1]].check(capability, prefill=False, decode=True)
    return names


def choose_page_size(names: Sequence[str], requested: int | None) -> int:
    """`--page-size` where these backends can read it; without one, what the last of them wants.

    A size that one of them cannot read gives way, with a warning, to that one's default.
    """
    backends = [BACKENDS[name] for name in names]
    size = backends[-1].default_page_size if requested is None else requested
    for name, backend in zip(names, backends, strict=True):
        if backend.page_sizes and size not in backend.page_sizes:
            if requested is not None:
                _log.warning(
                    "--page-size %d is not one of %s, which --attention-backend %s reads: using %d",
                    size, ", ".join(map(str, backend.page_sizes)), name, backend.default_page_size,
                )  # fmt: skip
            size = backend.default_page_size
    return size


def make_backend(names: Sequence[str], ctx: AttentionContext) -> AttentionBackend:
    """The backend, or the pair, that `backend_names` gave."""
    backends = [BACKENDS[name](ctx) for name in names]
    return backends[0] if len(backends) == 1 else HybridBackend(ctx, backends[0], backends[1])


def _auto(
    capability: tuple[int, int] | None, needs: Needs, compiles: Callable[[], bool],
    compiles_cpu: Callable[[], bool],
) -> str:  # fmt: skip
    """On Hopper our decode kernel read as fast as the best library or faster in all but the longest
    batches that were measured (docs/performance.md); FlashInfer decodes what it does not know."""
    if capability is None:
        known = needs.dtype in CpuBackend.dtypes and needs.whole and needs.head_dim % DIM_STEP == 0
        return "cpu" if known and compiles_cpu() else "torch"
    if capability < (8, 0) or needs.dtype not in HALVES:
        return "torch"
    if capability[0] == 9:
        ours = supports(needs.dtype, needs.head_dim, needs.group) and compiles()
        return "fa,mini" if ours else "fa,fi"
    return "trtllm" if capability[0] == 10 else "fi"
