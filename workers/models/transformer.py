"""The decoder that all dense families share: a stage's layers, with embeddings on the first stage and logits on the last.

What differs between families stands in ModelConfig.traits; what differs between ranks is inside the layers.
Shape suffixes as in kernels.ops; H, K and F are this rank's heads and feed-forward width.
"""

import torch
from torch import Tensor

from kernels.ops import AttentionBatch, Ops
from workers.kv.layout import shard
from workers.models.config import ModelConfig
from workers.models.layers import ColumnLinear, Columns, Parts, RowLinear, Vocabulary
from workers.models.parallel import RankContext
from workers.models.rope import cos_sin_table
from workers.models.weights import Wanted


class Transformer:
    """One stage of the model on one rank. Weights are undefined until `wanted` is loaded.

    Stateless between calls: K and V live in the pool that is passed in, which alone is written.
    """

    def __init__(
        self, config: ModelConfig, context: RankContext, ops: Ops, dtype: torch.dtype, max_context_tokens: int
    ) -> None:
        parts = Parts(context, ops, dtype)
        self._ops, self._context = ops, context
        self._eps = config.rms_norm_eps
        self.hidden_size = config.hidden_size
        first, last = shard(config.shape, context.layout, context.rank).layers
        self._cos_sin_PE = cos_sin_table(config.rope, config.head_dim, max_context_tokens, context.device)
        self._layers = [Layer(config, parts, ops, layer, layer - first) for layer in range(first, last)]
        self._embedding = self._vocabulary = None
        if context.is_first_stage:
            self._embedding = Vocabulary(parts, "model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        if context.is_last_stage:
            self._norm_D = parts.vector("model.norm.weight", config.hidden_size)
            if config.tied_embeddings and self._embedding is not None:
                self._vocabulary = self._embedding
            else:
                name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
                self._vocabulary = Vocabulary(parts, name, config.vocab_size, config.hidden_size)
        self.wanted: tuple[Wanted, ...] = tuple(parts.wanted)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """First stage only: the residual stream that the layers begin with."""
        assert self._embedding is not None
        return self._embedding.embed(token_ids_T)

    def forward(self, residual_TD: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
        """The residual stream after this stage's layers; writes K and V of the step's tokens into the pool."""
        x_TD: Tensor | None = None
        for layer in self._layers:
            x_TD, residual_TD = layer.forward(x_TD, residual_TD, self._cos_sin_PE, pool, batch)
        return residual_TD if x_TD is None else self._context.all_reduce(x_TD) + residual_TD

    def logits(self, residual_RD: Tensor) -> Tensor | None:
        """Last stage only: [R, vocabulary] on tp rank 0, None on the stage's other ranks."""
        assert self._vocabulary is not None
        return self._vocabulary.logits(self._ops.rms_norm(residual_RD, self._norm_D, self._eps))


class Layer:
    """Attention and feed-forward, each after a norm and added to the residual stream. `slot`: its place in the pool."""

    def __init__(self, config: ModelConfig, parts: Parts, ops: Ops, number: int, slot: int) -> None:
        prefix = f"model.layers.{number}"
        self._ops, self._context = ops, parts.context
        self._eps = config.rms_norm_eps
        self._input_norm_D = parts.vector(f"{prefix}.input_layernorm.weight", config.hidden_size)
        self._attention = Attention(config, parts, ops, f"{prefix}.self_attn", slot)
        self._post_norm_D = parts.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden_size)
        self._feed_forward = FeedForward(config, parts, ops, f"{prefix}.mlp")

    def forward(
        self, x_TD: Tensor | None, residual_TD: Tensor, cos_sin_PE: Tensor, pool: Tensor, batch: AttentionBatch
    ) -> tuple[Tensor, Tensor]:
        """x is what the layer before has not yet added to the residual stream, nor summed over the ranks; so is what is
        returned."""
        if x_TD is None:
            x_TD = self._ops.rms_norm(residual_TD, self._input_norm_D, self._eps)
        else:
            x_TD, residual_TD = self._add_norm(x_TD, residual_TD, self._input_norm_D)
        x_TD = self._attention.forward(x_TD, cos_sin_PE, pool, batch)
        x_TD, residual_TD = self._add_norm(x_TD, residual_TD, self._post_norm_D)
        return self._feed_forward.forward(x_TD), residual_TD

    def _add_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> tuple[Tensor, Tensor]:
        return self._context.add_rms_norm(self._ops, x_TD, residual_TD, weight_D, self._eps)


class Attention:
    """Causal attention with this rank's query heads, over the KV heads that they read."""

    def __init__(self, config: ModelConfig, parts: Parts, ops: Ops, prefix: str, slot: int) -> None:
        dim, traits = config.head_dim, config.traits
        mine = shard(config.shape, parts.context.layout, parts.context.rank)
        self._num_heads = config.num_heads // parts.context.layout.tp
        self._num_kv_heads = mine.num_kv_heads
        self._dim, self._slot, self._ops, self._eps = dim, slot, ops, config.rms_norm_eps
        width = self._num_heads * dim
        queries = (mine.tp_rank * width, (mine.tp_rank + 1) * width)
        keys = (mine.kv_heads[0] * dim, mine.kv_heads[1] * dim)
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self._qkv = ColumnLinear(
            parts,
            config.hidden_size,
            (
                Columns(f"{prefix}.q_proj", q_size, queries),
                Columns(f"{prefix}.k_proj", kv_size, keys),
                Columns(f"{prefix}.v_proj", kv_size, keys),
            ),
            bias=traits.qkv_bias,
        )
        self._output = RowLinear(
            parts, f"{prefix}.o_proj", q_size, queries, config.hidden_size, bias=traits.output_bias
        )
        self._q_norm_E = parts.vector(f"{prefix}.q_norm.weight", dim) if traits.qk_norm else None
        self._k_norm_E = parts.vector(f"{prefix}.k_norm.weight", dim) if traits.qk_norm else None

    def forward(self, x_TD: Tensor, cos_sin_PE: Tensor, pool: Tensor, batch: AttentionBatch) -> Tensor:
        heads, kv_heads, dim = self._num_heads, self._num_kv_heads, self._dim
        qkv_TNE = self._qkv(x_TD).view(-1, heads + 2 * kv_heads, dim)
        q_THE, k_TKE, v_TKE = torch.split(qkv_TNE, [heads, kv_heads, kv_heads], 1)
        if self._q_norm_E is not None and self._k_norm_E is not None:
            q_THE = self._ops.rms_norm(q_THE, self._q_norm_E, self._eps)
            k_TKE = self._ops.rms_norm(k_TKE, self._k_norm_E, self._eps)
        q_THE = self._ops.rope_store(q_THE, k_TKE, v_TKE, cos_sin_PE, pool, self._slot, batch)
        out_THE = self._ops.attention(q_THE, pool, self._slot, batch, dim**-0.5)
        return self._output(out_THE.flatten(1))


class FeedForward:
    """down(silu(gate(x)) · up(x)), the inner width spread over the ranks."""

    def __init__(self, config: ModelConfig, parts: Parts, ops: Ops, prefix: str) -> None:
        width, span, bias = config.intermediate_size, parts.share_of(config.intermediate_size), config.traits.mlp_bias
        self._ops = ops
        self._gate_up = ColumnLinear(
            parts,
            config.hidden_size,
            (Columns(f"{prefix}.gate_proj", width, span), Columns(f"{prefix}.up_proj", width, span)),
            bias=bias,
        )
        self._down = RowLinear(parts, f"{prefix}.down_proj", width, span, config.hidden_size, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(x_TD)))
