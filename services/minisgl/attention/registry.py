"""The attention backends, one line an entry."""

from collections.abc import Callable

import torch

from minisgl.attention.base import AttentionBackend, ForwardBatch
from minisgl.attention.torch_backend import TorchBackend
from minisgl.config import UsageError
from minisgl.kvcache.pool import KVPool

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "torch": TorchBackend,
}
"""Each by its name in `--attention-backend`."""

ANNOUNCED = ("cpu", "fi", "fa", "trtllm")
"""Names that this build does not have."""


class HybridBackend(AttentionBackend):
    """One backend for steps that only decode, another one for all other steps."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill, self._decode = prefill, decode

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self._of(batch).prepare_metadata(batch)

    def forward(
        self, q: torch.Tensor, layer: int, pool: KVPool, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._of(batch).forward(q, layer, pool, batch)

    def _of(self, batch: ForwardBatch) -> AttentionBackend:
        return self._decode if batch.is_decode else self._prefill


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend `name`, or a pair PREFILL,DECODE, or `auto` for what suits the device.

    `UsageError` lists the choices.
    """
    if name == "auto":
        name = "torch"
    names = name.split(",")
    if len(names) > 2:
        raise UsageError(
            f"--attention-backend takes one name or a pair PREFILL,DECODE, not {name!r}"
        )
    for part in names:
        if part not in BACKENDS:
            known = part in ANNOUNCED
            raise UsageError(
                f"--attention-backend {part!r} is not {'available here' if known else 'known'}; "
                f"choices: auto, {', '.join(BACKENDS)}, or a pair PREFILL,DECODE of them"
            )
    if len(names) == 1:
        return BACKENDS[name]()
    return HybridBackend(BACKENDS[names[0]](), BACKENDS[names[1]]())
