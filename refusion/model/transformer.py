"""A lean decoder-only transformer: tokens, true positions and cells in, hidden states out.

Legend of shape suffixes: B batch, T tokens of a batch row or of a packed step, E hidden
size, H query heads, K key/value heads, G query heads per key/value head, D head dimension,
C cells of a cache row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusion.model.cache import Cache
from refusion.model.config import ModelConfig
from refusion.model.rope import inverse_frequencies, rotate, rotation


@dataclass(frozen=True)
class Segment:
    """The tokens of one cache row inside a packed step.

    mask_GTC is added to attention scores: G*T rows (the T tokens once per query head of a
    key/value head, head by head) over the row's cells before these, followed by the T own ones;
    None where every token sees every one of them. See refusion.model.visibility.
    fed: cells of the same step that earlier passes have written behind the committed ones.
    """

    row: int
    start: int
    stop: int
    mask_GTC: Tensor | None
    fed: int = 0


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


DENSE_LIMIT = 1024
"""Tokens up to which whole-sequence attention on a CPU forms its scores at once: torch's fused kernel for CPUs
takes 2.5 times as long forward and backward at 200 tokens, and only beyond does its smaller memory count."""


def dense_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention [B, H, T, D], causal or under a boolean mask; query heads that share a key become its further rows.

    mask: broadcasts to [B, H, T, T], True where a query sees a key; None for causal.
    """
    batch, heads, count, dim = q_BHTD.shape
    kv = k_BKTD.shape[1]
    scores = q_BHTD.reshape(batch, kv, -1, dim) @ k_BKTD.transpose(-1, -2)
    if mask is None:
        mask = torch.ones(count, count, dtype=torch.bool, device=q_BHTD.device).tril()
    scores = (scores * dim**-0.5).view(batch, heads, count, count).masked_fill(~mask, float("-inf"))
    shares = scores.softmax(dim=-1).to(v_BKTD.dtype).view(batch, kv, -1, count)
    return (shares @ v_BKTD).view(batch, heads, count, dim)


class Attention(nn.Module):
    """Grouped-query attention with one fused projection for queries, keys and values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, (heads + 2 * kv) * dim, bias=config.qkv_bias)
        self.out = nn.Linear(heads * dim, config.hidden_size, bias=config.output_bias)
        self.query_norm = RMSNorm(dim, config.rms_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, config.rms_eps) if config.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [..., H, D] and keys [..., K, D], values [..., K, D]."""
        c = self.config
        qkv = self.qkv(x).unflatten(-1, (c.num_heads + 2 * c.num_kv_heads, c.head_dim))
        qk, v = qkv.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = qk.split((c.num_heads, c.num_kv_heads), dim=-2)
            qk = torch.cat((self.query_norm(q), self.key_norm(k)), dim=-2)
        q, k = rotate(qk, cos, sin).split((c.num_heads, c.num_kv_heads), dim=-2)
        return q, k, v

    def forward(self, x_BTE: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Whole sequences without a cache: causal over storage order, or under `mask`."""
        q, k, v = (t.transpose(1, 2) for t in self.project(x_BTE, cos, sin))
        dense = x_BTE.device.type == "cpu" and x_BTE.shape[1] <= DENSE_LIMIT
        if dense and (mask is None or mask.dtype == torch.bool):
            attended = dense_attention(q, k, v, mask)
        else:
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.config.group_size > 1
            )
        return self.out(attended.transpose(1, 2).flatten(2))

    def attend(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, cache: Cache, segments: Sequence[Segment]
    ) -> Tensor:
        """Packed tokens of several rows: writes their keys and values, attends over each row; [T, H*D]."""
        parts = [self._attend_row(q_THD, k_TKD, v_TKD, layer, cache, segment) for segment in segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_row(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, cache: Cache, segment: Segment
    ) -> Tensor:
        c = self.config
        span, count = slice(segment.start, segment.stop), segment.stop - segment.start
        begin = cache.lengths[segment.row] + segment.fed
        end = begin + count
        keys_KCD, values_KCD = cache.keys(segment.row)[layer], cache.values(segment.row)[layer]
        keys_KCD[:, begin:end] = k_TKD[span].transpose(0, 1)
        values_KCD[:, begin:end] = v_TKD[span].transpose(0, 1)
        # query heads that share keys become further query rows: no key is ever repeated
        q = q_THD[span].unflatten(1, (c.num_kv_heads, c.group_size)).permute(1, 2, 0, 3)
        q = q.reshape(1, c.num_kv_heads, c.group_size * count, c.head_dim)
        out = F.scaled_dot_product_attention(
            q, keys_KCD[None, :, :end], values_KCD[None, :, :end], attn_mask=segment.mask_GTC
        )
        out = out.view(c.num_kv_heads, c.group_size, count, c.head_dim).permute(2, 0, 1, 3)
        return out.reshape(count, c.num_heads * c.head_dim)


class MLP(nn.Module):
    """SwiGLU with one fused projection for gate and up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))

    def before(self, x_TE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The part of a step before attention: queries [T, H, D], keys and values [T, K, D]."""
        return self.attention.project(self.attention_norm(x_TE), cos, sin)

    def after(self, x_TE: Tensor, attended_TE: Tensor) -> Tensor:
        """The part of a step behind attention."""
        x_TE = x_TE + self.attention.out(attended_TE)
        return x_TE + self.mlp(self.mlp_norm(x_TE))

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, cache: Cache, segments: Sequence[Segment]
    ) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        return self.after(x, self.attention.attend(q, k, v, layer, cache, segments))


class Transformer(nn.Module):
    """The network. It knows nothing of slots, masks or files."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.int8_head: nn.Module | None = None  # takes the head's place, see refusion.model.int8
        frequencies, self.rope_factor = inverse_frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, mask: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, E] of whole sequences in storage order, after the last norm.

        mask: None for plain causal attention over storage order, else a boolean or additive
        mask that broadcasts to [B, H, T, T].
        """
        cos, sin = rotation(self.frequencies, self.rope_factor, positions_BT)
        x = self.embedding(tokens_BT)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)

    def step(self, tokens_T: Tensor, positions_T: Tensor, cache: Cache, segments: Sequence[Segment]) -> Tensor:
        """Hidden states [T, E] of packed tokens; writes their cells behind each row's committed ones.

        The caller has reserved the cells and commits those that stay.
        """
        cos, sin = rotation(self.frequencies, self.rope_factor, positions_T)
        x = self.embedding(tokens_T)
        for index, layer in enumerate(self.layers):
            x = layer.step(x, cos, sin, index, cache, segments)  # type: ignore[operator]
        return self.norm(x)

    def compile_steps(self) -> None:
        """Compiles what a step does around attention: norms, rotation and activation fuse; all layers share it."""
        for layer in self.layers:
            layer.before = torch.compile(layer.before, dynamic=True)  # type: ignore[method-assign]
            layer.after = torch.compile(layer.after, dynamic=True)  # type: ignore[method-assign]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] in the model's own type, for the hidden states asked for only."""
        if self.int8_head is not None:
            return self.int8_head(hidden)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(hidden, weight.to(hidden.dtype))
