"""The decoder that all supported families share; they differ in `ModelConfig` only."""

import contextlib
from collections.abc import Callable
from functools import cached_property, partial

import torch

from minisgl.attention.base import AttentionBackend, ForwardBatch, Turn
from minisgl.distributed import Communicator
from minisgl.kvcache.pool import KVPool
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.base import BaseOP, OPList
from minisgl.layers.embedding import ParallelLMHead, TiedLMHead, VocabParallelEmbedding
from minisgl.layers.linear import MergedColumnLinear, Part, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Angles, RotaryEmbedding
from minisgl.layers.sharding import HeadShard, Shard, even_shard, head_shard
from minisgl.models.config import ModelConfig
from minisgl.models.packed import PackedDecoder
from minisgl.models.products import NAMES, Choice, Kernels, Way, Ways
from minisgl.models.trial import Trial
from minisgl.moe.layer import MoeMLP
from minisgl_kernels import skinny_linear, wide_linear
from minisgl_kernels.build import KernelUnavailable
from minisgl_kernels.qk_rope_store import qk_rope_store_function
from minisgl_kernels.wide_linear import Normed, Turned

TIMED_LAYERS = 12
"""More would only take longer to time: their weights are beyond the L2 cache."""


class Rope:
    """How the positions of one step turn queries and keys, the same for every layer."""

    def __init__(
        self, rotary: RotaryEmbedding, table: torch.Tensor | None, positions: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._rotary, self._positions, self._dtype = rotary, positions, dtype
        self.table = table
        """For the kernel, [max_model_len, head_dim] float32: cosines, then sines."""

    @cached_property
    def angles(self) -> Angles:
        """For the torch operations."""
        return self._rotary.angles(self._positions, self._dtype)


class Attention(BaseOP):
    """Self-attention of one layer with this rank's heads."""

    def __init__(
        self, config: ModelConfig, layer: int, heads: HeadShard, dtype: torch.dtype,
        comm: Communicator, rotary: RotaryEmbedding,
    ) -> None:  # fmt: skip
        dim, hidden = config.head_dim, config.hidden_size
        self._layer, self._rotary = layer, rotary
        self._q, self._kv, self._dim = heads.q.local, heads.kv.local, dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        q, kv = heads.q.scaled(dim), heads.kv.scaled(dim)
        parts = (
            Part("q_proj", q_size, q),
            Part("k_proj", kv_size, kv),
            Part("v_proj", kv_size, kv),
        )
        self.qkv_proj = MergedColumnLinear(hidden, parts, config.qkv_bias, dtype)
        self.o_proj = RowParallelLinear(q_size, q, hidden, config.o_bias, dtype, comm)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, rope: Rope, batch: ForwardBatch, attn: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:  # fmt: skip
        """x is [T, hidden]; so is the result."""
        return self.o_proj.forward(self.heads(self.qkv_proj.forward(x), rope, batch, attn, pool))

    def heads(
        self, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch, attn: AttentionBackend,
        pool: KVPool,
    ) -> torch.Tensor:  # fmt: skip
        """From the QKV product to what the O projection takes."""
        turn = None if rope.table is None else self._turn(rope.table)
        if turn is not None and batch.is_decode and len(qkv) <= attn.fuses:
            out = attn.forward_qkv(qkv, turn, self._layer, pool, batch)
            return out.reshape(-1, self._q * self._dim)
        q = self._turn_and_store(qkv, rope, turn, batch, pool)
        return self.attend(q, batch, attn, pool)

    def attend(
        self, q: torch.Tensor, batch: ForwardBatch, attn: AttentionBackend, pool: KVPool
    ) -> torch.Tensor:
        """From queries [T, heads, dim] to what the O projection takes."""
        return attn.forward(q, self._layer, pool, batch).reshape(-1, self._q * self._dim)

    def turned(
        self, rope: Rope, batch: ForwardBatch, attn: AttentionBackend, pool: KVPool
    ) -> Turned | None:
        """What a QKV product that turns its heads is told; None where attention does that."""
        if rope.table is None or len(batch.positions) <= attn.fuses:
            return None
        return Turned(
            *self._turn_weights, rope.table, batch.positions, batch.out_loc, pool.k(self._layer),
            pool.v(self._layer), self._q, self._kv,
        )  # fmt: skip

    def turned_alone(self, table: torch.Tensor, tokens: int) -> Turned:
        """The same for some tokens that come first, each to a slot of its own that is kept nowhere
        else."""
        ids = torch.arange(tokens, dtype=torch.int32, device=table.device)
        slots = self.qkv_proj.weight.new_empty((2, tokens, self._kv, self._dim))
        return Turned(
            *self._turn_weights, table, ids * 0, ids, slots[0], slots[1], self._q, self._kv
        )

    @property
    def _turn_weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
        if self.q_norm is None or self.k_norm is None:
            return None, None, 0.0
        return self.q_norm.weight, self.k_norm.weight, self.q_norm.eps

    def _turn(self, table: torch.Tensor) -> Turn:
        return Turn(table, *self._turn_weights)

    def _turn_and_store(
        self, qkv: torch.Tensor, rope: Rope, turn: Turn | None, batch: ForwardBatch, pool: KVPool
    ) -> torch.Tensor:
        """Normalise and rotate queries and keys, store keys and values: queries [T, heads, dim]."""
        if turn is not None and (fused := qk_rope_store_function()) is not None:
            with contextlib.suppress(KernelUnavailable):  # of this type or width of heads
                return fused(
                    qkv, turn.q_weight, turn.k_weight, turn.eps, turn.table, batch.positions,
                    batch.out_loc, pool.k(self._layer), pool.v(self._layer), self._q, self._kv,
                )  # fmt: skip
        heads = qkv.view(-1, self._q + 2 * self._kv, self._dim)
        qk, v = heads[:, : self._q + self._kv], heads[:, self._q + self._kv :]
        q, k = qk[:, : self._q], qk[:, self._q :]
        if self.q_norm is None or self.k_norm is None:
            self._rotary.rotate(qk, rope.angles)
        else:
            q, k = self.q_norm.forward(q), self.k_norm.forward(k)
            self._rotary.rotate(q, rope.angles)
            self._rotary.rotate(k, rope.angles)
        pool.store(self._layer, k, v, batch.out_loc)
        return q


class MLP(BaseOP):
    """The gated MLP of a dense layer."""

    def __init__(
        self, hidden: int, width: int, shard: Shard, bias: bool, dtype: torch.dtype,
        comm: Communicator,
    ) -> None:  # fmt: skip
        parts = (Part("gate_proj", width, shard), Part("up_proj", width, shard))
        self.gate_up_proj = MergedColumnLinear(hidden, parts, bias, dtype)
        self.down_proj = RowParallelLinear(width, shard, hidden, bias, dtype, comm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x is [T, hidden]; so is the result."""
        return self.down_proj.forward(silu_and_mul(self.gate_up_proj.forward(x)))


class DecoderLayer(BaseOP):
    """Attention, then MLP, each behind a norm and added to the residual."""

    def __init__(
        self, config: ModelConfig, layer: int, heads: HeadShard, dtype: torch.dtype,
        comm: Communicator, rotary: RotaryEmbedding,
    ) -> None:  # fmt: skip
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attn = Attention(config, layer, heads, dtype, comm, rotary)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.mlp = _mlp(config, layer, dtype, comm)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, batch: ForwardBatch,
        attn: AttentionBackend, pool: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """x and residual are [T, hidden]: what was computed last and what it is to be added to."""
        x, residual = self.input_layernorm.forward_add(x, residual)
        x = self.self_attn.forward(x, rope, batch, attn, pool)
        x, residual = self.post_attention_layernorm.forward_add(x, residual)
        return self.mlp.forward(x), residual

    def forward_few(
        self, h: torch.Tensor, ready: Normed | None, rope: Rope, batch: ForwardBatch,
        attn: AttentionBackend, pool: KVPool, kernels: Kernels, ways: Ways,
        following: "DecoderLayer | None",
    ) -> Normed | None:  # fmt: skip
        """The same for few tokens of one rank: adds to the residual h [T, hidden] in place.

        `ready` is h behind `input_layernorm`, and the result is it behind that of `following`, the
        next layer, where products leave that behind.
        """
        attention, norm = self.self_attn, self.input_layernorm
        turned, q = attention.turned(rope, batch, attn, pool), None
        if turned is not None:
            q = kernels.turned(ways.qkv, h, ready, norm, attention.qkv_proj, turned)
        if q is not None:
            heads = attention.attend(q, batch, attn, pool)
        else:
            qkv = kernels.normed(ways.qkv, h, ready, norm, attention.qkv_proj)
            heads = attention.heads(qkv, rope, batch, attn, pool)
        return self._behind_attention(h, heads, kernels, ways, following)

    def products_alone(
        self, h: torch.Tensor, ready: Normed | None, heads: torch.Tensor, kernels: Kernels,
        ways: Ways, following: "DecoderLayer | None", turned: Turned | None,
    ) -> Normed | None:  # fmt: skip
        """`forward_few` without attention, to be timed: its result is `heads`. With `turned` the
        heads of the QKV product are turned."""
        qkv_proj, norm = self.self_attn.qkv_proj, self.input_layernorm
        if turned is None or kernels.turned(ways.qkv, h, ready, norm, qkv_proj, turned) is None:
            qkv = kernels.normed(ways.qkv, h, ready, norm, qkv_proj)
            if turned is not None and (apart := qk_rope_store_function()) is not None:
                apart(qkv, *turned)
        return self._behind_attention(h, heads, kernels, ways, following)

    def _behind_attention(
        self, h: torch.Tensor, heads: torch.Tensor, kernels: Kernels, ways: Ways,
        following: "DecoderLayer | None",
    ) -> Normed | None:  # fmt: skip
        norm, mlp, project = self.post_attention_layernorm, self.mlp, self.self_attn.o_proj
        if not isinstance(mlp, MLP):
            kernels.added(ways.o, h, heads, project)
            h.add_(mlp.forward(norm.forward(h)))
            return None
        then = norm if ways.gate_up.way == Way.WIDE else None
        ready = kernels.added(ways.o, h, heads, project, then)
        x = kernels.normed(ways.gate_up, h, ready, norm, mlp.gate_up_proj, silu=True)
        if following is None:
            return kernels.added(ways.down, h, x, mlp.down_proj)
        then = following.input_layernorm if ways.qkv.way == Way.WIDE else None
        return kernels.added(ways.down, h, x, mlp.down_proj, then)


class Decoder(BaseOP):
    """Embedding, layers and the last norm."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, comm: Communicator, device: torch.device
    ) -> None:
        heads = head_shard(config.num_heads, config.num_kv_heads, comm.rank, comm.size)
        rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self._rotary, self._dtype = rotary, dtype
        self._rope_table: torch.Tensor | None = None
        if device.type == "cuda" and qk_rope_store_function() is not None:
            self._rope_table = rotary.table(config.max_model_len)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, dtype, comm
        )
        self._layers = [
            DecoderLayer(config, i, heads, dtype, comm, rotary) for i in range(config.num_layers)
        ]
        self.layers = OPList(self._layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        widths = (config.hidden_size, heads.q.local * config.head_dim, config.intermediate_size)
        alone = device.type == "cuda" and comm.size == 1
        # Not float16: before it is divided by its norm, the residual may be too large for it.
        self._own = alone and dtype == torch.bfloat16 and not config.mlp_bias
        self._steps = tuple(
            all(width % step == 0 for width in widths)
            for step in (skinny_linear.K_STEP, wide_linear.K_STEP)
        )
        self._kernels = Kernels()
        self._choice = Choice()
        self._device = device

    def trial(self, fuses: int = 0) -> Trial | None:
        """What finds out who computes products of few tokens faster, if that is a question here.
        Attention of up to `fuses` tokens turns the heads by itself."""
        dense = [layer for layer in self._layers if isinstance(layer.mlp, MLP)]
        if not self._own or not dense:
            return None
        skinny, wide = self._steps
        self._kernels = kernels = Kernels(
            skinny=skinny_linear.skinny_linear_function() if skinny else None,
            skinny_tokens=skinny_linear.max_tokens(),
            wide=wide_linear.wide_linear_function() if wide else None,
            wide_add=wide_linear.wide_add,
            wide_turn=wide_linear.wide_turn,
            wide_tokens=wide_linear.max_tokens(),
        )
        if not kernels.most:
            return None
        some = dense[: min(len(dense), TIMED_LAYERS)]

        def table_for(tokens: int) -> torch.Tensor | None:
            """What the heads are turned by behind the QKV product; None if attention does that."""
            return self._rope_table if tokens > fuses else None

        def turned_heads(tokens: int) -> int:
            return 0 if (table := table_for(tokens)) is None else table.shape[1]

        def calls(tokens: int, ways: Ways) -> list[Callable[[], object]]:
            """A layer's products each, on any numbers."""
            first = some[0].self_attn
            hidden, heads = (p.weight.shape[1] for p in (first.qkv_proj, first.o_proj))
            h, x = (
                torch.randn((tokens, width), dtype=self._dtype, device=self._device) * 0.1
                for width in (hidden, heads)
            )
            # All are kept: a graph reads what the call before its capture left behind.
            ready: list[Normed | None] = [None]
            table = table_for(tokens)
            turned = [None if table is None else first.turned_alone(table, tokens) for _ in some]

            def run(i: int) -> None:
                following = some[(i + 1) % len(some)]
                ready.append(
                    some[i].products_alone(h, ready[-1], x, kernels, ways, following, turned[i])
                )

            return [partial(run, i) for i in range(len(some))]

        layer, mlp = dense[0], dense[0].mlp
        assert isinstance(mlp, MLP)
        shapes = {
            name: (*linear.weight.shape, mode)
            for name, linear, mode in zip(
                NAMES,
                (layer.self_attn.qkv_proj, layer.self_attn.o_proj, mlp.gate_up_proj, mlp.down_proj),
                wide_linear.MODES, strict=True,
            )
        }  # fmt: skip
        return Trial(self._choice, kernels, shapes, turned_heads, len(some), calls)

    @property
    def chosen(self) -> dict[int, Ways]:
        """By numbers of tokens, who computes products; without own ones, nothing."""
        return self._choice.chosen if self._kernels.most else {}

    @property
    def rotary(self) -> RotaryEmbedding:
        """How positions turn heads, in all layers."""
        return self._rotary

    @property
    def dense_layers(self) -> list[tuple[DecoderLayer, MLP]]:
        """The layers without experts, and their MLPs."""
        return [(layer, layer.mlp) for layer in self._layers if isinstance(layer.mlp, MLP)]

    @property
    def captures(self) -> bool:
        """Whether its steps may be part of a CUDA graph: experts in torch operations may not."""
        return all(getattr(layer.mlp, "captures", True) for layer in self._layers)

    def forward(self, batch: ForwardBatch, attn: AttentionBackend, pool: KVPool) -> torch.Tensor:
        """The hidden state of each request's last token: [B, hidden]."""
        rope = Rope(self._rotary, self._rope_table, batch.positions, self._dtype)
        x, residual = self.embed_tokens.forward(batch.input_ids), None
        ways = self._choice[len(x)]
        if len(x) <= self._kernels.most and ways != Ways():
            ready = None
            for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
                ready = layer.forward_few(
                    x, ready, rope, batch, attn, pool, self._kernels, ways, following
                )
        else:
            for layer in self._layers:
                x, residual = layer.forward(x, residual, rope, batch, attn, pool)
        if not batch.is_decode:
            x = x.index_select(0, batch.last_indices)
            residual = None if residual is None else residual.index_select(0, batch.last_indices)
        return self.norm.forward_add(x, residual)[0]


class CausalLM(BaseOP):
    """One rank's part of a model, on the meta device until `load_state_dict`."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, comm: Communicator, device: torch.device
    ) -> None:
        self.model = Decoder(config, dtype, comm, device)
        self.lm_head: ParallelLMHead | TiedLMHead
        if config.tie_word_embeddings:
            self.lm_head = TiedLMHead(self.model.embed_tokens)
        else:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, dtype, comm)
        self._config = config
        self._packed: PackedDecoder | None = None

    def pack(self, positions: int, threads: int, *, int8: bool = False) -> None:
        """Pack the loaded weights, so that one call computes all layers on a CPU: of bfloat16, on
        one rank, without experts. No sequence will be longer than `positions`.

        Raises `KernelUnavailable` or `UsageError` where that cannot be; then nothing has changed.
        """
        self._packed = PackedDecoder(self, self._config, positions, threads, int8)

    @property
    def packed(self) -> PackedDecoder | None:
        """What computes in place of the operators, if the weights are packed."""
        return self._packed

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        parameters = sum(t.numel() * t.element_size() for t in self.state_dict().values())
        return parameters + (0 if self._packed is None else self._packed.nbytes)

    def forward(
        self, batch: ForwardBatch, attn: AttentionBackend, pool: KVPool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Scores of each request's next token: [B, vocab], whole on every rank; in `out` if given.

        `attn.prepare_metadata(batch)` has run. Keys and values of the new tokens go to `pool`. If
        the weights are packed, the scores are float32 and hold until the next call.
        """
        if self._packed is not None:
            return self._packed.forward(batch, pool)
        return self.lm_head.forward(self.model.forward(batch, attn, pool), out)


def _mlp(config: ModelConfig, layer: int, dtype: torch.dtype, comm: Communicator) -> MLP | MoeMLP:
    hidden, moe = config.hidden_size, config.moe
    if moe is not None and layer in moe.layers:
        width = moe.intermediate_size
        return MoeMLP(
            experts=moe.num_experts, top_k=moe.experts_per_token, normalise=moe.norm_topk_prob,
            hidden=hidden, width=width, dtype=dtype, comm=comm,
            shard=even_shard("moe_intermediate_size", width, comm.rank, comm.size),
        )  # fmt: skip
    width = config.intermediate_size
    shard = even_shard("intermediate_size", width, comm.rank, comm.size)
    return MLP(hidden, width, shard, config.mlp_bias, dtype, comm)
