"""A model whose layers one call computes on a CPU: its weights, packed once after they are loaded.

The packed weights take the place of torch's, so no operator of the model can run any more.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from minisgl.attention.base import ForwardBatch
from minisgl.kvcache.pool import KVPool
from minisgl.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minisgl.layers.linear import Linear
from minisgl.models.config import ModelConfig
from minisgl_kernels.cpu_decoder import PHASES, CpuDecoder, LayerWeights
from minisgl_kernels.cpu_matmul import ISAS, PackedMemory, PackedWeight, chosen_isa, pack

if TYPE_CHECKING:
    from minisgl.models.decoder import MLP, CausalLM, DecoderLayer


class PackedDecoder:
    """Embedding, layers, last norm and LM head of one rank that has no peers."""

    def __init__(
        self, network: "CausalLM", config: ModelConfig, positions: int, threads: int, int8: bool
    ) -> None:
        """Takes the weights out of `network`, whose MLPs are all dense, one after the other.

        No sequence is longer than `positions`. Raises `KernelUnavailable` and `UsageError`, both
        before a weight is touched.
        """
        isa = chosen_isa()
        self.isa = ISAS[isa]
        """The instruction set that computes."""
        self._memory = PackedMemory()
        self.nbytes = 0
        """Of packed weights and the table of angles."""
        self._seconds: npt.NDArray[np.float64] | None = None
        layers = [self._layer(layer, mlp, int8) for layer, mlp in network.model.dense_layers]
        embedding: torch.Tensor | None = network.model.embed_tokens.weight
        if config.tie_word_embeddings:
            head, embedding = self._pack(network.model.embed_tokens, int8=int8), None
        else:
            assert isinstance(network.lm_head, ParallelLMHead)
            head = self._pack(network.lm_head, int8=int8)
        turns = network.model.rotary.table(positions)
        self.nbytes += turns.nbytes
        self._decoder = CpuDecoder(
            layers, head=head, embedding=embedding, last_norm=network.model.norm.weight,
            turns=turns, eps=config.rms_norm_eps, heads=config.num_heads,
            kv_heads=config.num_kv_heads, head_dim=config.head_dim, isa=isa, threads=threads,
        )  # fmt: skip

    def forward(self, batch: ForwardBatch, pool: KVPool) -> torch.Tensor:
        """Scores of each request's next token: [B, vocab] float32, valid until the next call."""
        return self._decoder.step(
            ids=batch.input_ids, positions=batch.positions, slots=batch.out_loc, rows=batch.rows,
            before=batch.cached_lens, after=batch.device_lens, page_table=batch.page_table,
            pool=pool.buffer, seconds=self._seconds,
        )  # fmt: skip

    def each_row(self, function: int, argument: int, rows: int) -> None:
        """Calls the C function at an address with `argument` and each row, on the threads that
        compute steps."""
        self._decoder.each_row(function, argument, rows)

    def take_seconds(self) -> dict[str, float]:
        """What phases took since the last call; the first one begins to count, and has nothing."""
        last, self._seconds = self._seconds, np.zeros(len(PHASES))
        return {} if last is None else dict(zip(PHASES, last.tolist(), strict=True))

    def _layer(self, layer: "DecoderLayer", mlp: "MLP", int8: bool) -> LayerWeights:
        attention = layer.self_attn
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return LayerWeights(
            qkv=self._pack(attention.qkv_proj, int8=int8),
            o=self._pack(attention.o_proj, int8=int8),
            gate_up=self._pack(mlp.gate_up_proj, int8=int8, gated=True),
            down=self._pack(mlp.down_proj, int8=int8),
            input_norm=layer.input_layernorm.weight,
            post_norm=layer.post_attention_layernorm.weight,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
        )

    def _pack(
        self, of: "Linear | VocabParallelEmbedding | ParallelLMHead", *, int8: bool,
        gated: bool = False,
    ) -> PackedWeight:  # fmt: skip
        """The packed weight, which takes the place of torch's."""
        bias = of.bias if isinstance(of, Linear) else None
        packed = pack(of.weight, bias=bias, int8=int8, gated=gated, memory=self._memory)
        of.weight = of.weight.new_empty(0)
        if isinstance(of, Linear) and of.bias is not None:
            of.bias = of.bias.new_empty(0)
        self.nbytes += packed.nbytes
        return packed
