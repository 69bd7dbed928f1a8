"""From the QKV product to attention in one pass: QK norm, rotary embedding, KV store."""

from collections.abc import Callable

import torch

from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.cuda_build import Family, cuda_type
from minisgl_kernels.kv_store import store_kv_reference
from minisgl_kernels.norm import rms_norm_reference

QkRopeStore = Callable[..., torch.Tensor]

MAX_HEAD_DIM = 256


def _macros(head_dim: int, dtype: torch.dtype, norm: bool) -> dict[str, str | int]:
    if dtype.itemsize != 2 or head_dim % 16 or head_dim > MAX_HEAD_DIM:
        raise KernelUnavailable(f"qk_rope_store has no kernel for heads of {head_dim} {dtype}")
    return {"ELEMENT": cuda_type(dtype), "DIM": head_dim, "NORM": int(norm)}


_family = Family("qk_rope_store", "qk_rope_store", _macros, joined=True)


def qk_rope_store_reference(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
    cos_sin: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor, k_slots: torch.Tensor,
    v_slots: torch.Tensor, hq: int, hkv: int,
) -> torch.Tensor:  # fmt: skip
    """The same as `qk_rope_store`, in float32 torch operations for any device."""
    heads = qkv.view(qkv.shape[0], hq + 2 * hkv, cos_sin.shape[1])
    q, k = heads[:, :hq].float(), heads[:, hq : hq + hkv].float()
    if q_weight is not None and k_weight is not None:
        q = rms_norm_reference(q, q_weight.float(), eps)
        k = rms_norm_reference(k, k_weight.float(), eps)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(qkv.dtype)

    store_kv_reference(rotate(k), heads[:, hq + hkv :], k_slots, v_slots, out_loc)
    return rotate(q)


def qk_rope_store(
    qkv: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float,
    cos_sin: torch.Tensor, positions: torch.Tensor, out_loc: torch.Tensor, k_slots: torch.Tensor,
    v_slots: torch.Tensor, hq: int, hkv: int,
) -> torch.Tensor:  # fmt: skip
    """Queries [T, hq, d], normalised and rotated; keys and values go to their slots.

    qkv is [T, (hq + 2 hkv) d], weights [d] or both None, cos_sin [positions, d] float32 (cosines of
    d / 2 pairs, then sines; pair i is dimensions i and i + d / 2), positions and out_loc [T] of one
    index type, slots [n, hkv, d]. Raises `KernelUnavailable`.
    """
    dim = cos_sin.shape[1]
    q = qkv.new_empty((qkv.shape[0], hq, dim))
    _family[dim, qkv.dtype, q_weight is not None](
        q, qkv, q_weight, k_weight, eps, cos_sin, positions, out_loc, k_slots, v_slots, hq, hkv
    )
    return q


def qk_rope_store_function() -> QkRopeStore | None:
    """`qk_rope_store`, or None, with one warning, where CUDA kernels cannot be compiled."""
    return qk_rope_store if _family.usable() else None
