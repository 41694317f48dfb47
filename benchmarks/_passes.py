"""Passes of a network behind a filled cache, and their matrix products alone.

Legend of shape suffixes: T tokens of a pass, E hidden size, K key/value heads, G query heads
per key/value head, D head dimension, C cells, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from refusion.model.cache import Cache
from refusion.model.config import ModelConfig
from refusion.model.rope import inverse_frequencies, rotation
from refusion.model.transformer import Segment, Transformer
from refusion.model.visibility import attention_mask, visible

QWEN3_8B = ModelConfig(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, max_positions=40960, family="qwen3", rms_eps=1e-6, rope_theta=1e6, qk_norm=True,
    mask_token_id=151670,
)
SHAPES: dict[str, ModelConfig] = {
    "qwen3-8b": QWEN3_8B,
    "qwen3-4b": replace(QWEN3_8B, hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
    "qwen3-1.7b": replace(
        QWEN3_8B, hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, tie_embeddings=True
    ),
    "qwen3-0.6b": replace(
        QWEN3_8B, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
    ),
    "tiny": replace(
        QWEN3_8B, vocab_size=320, num_tokens=320, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, mask_token_id=300,
    ),
}
"""Largest first, as a card that lacks the memory falls back."""

CHUNK = 256
BUCKET = 128
"""A captured pass has room for a multiple of so many cells, and serves every shorter cache."""


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def random_transformer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Weights from N(0, 0.02), norms of 1; made on the device itself."""
    with torch.device("meta"):
        transformer = Transformer(config)
    transformer = transformer.to(dtype).to_empty(device=device)
    transformer.frequencies = inverse_frequencies(config)[0].to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            _ = parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    return transformer.eval().requires_grad_(False)


def compiled_twin(transformer: Transformer) -> Transformer:
    """Another network object on the very same weights, with the package's own compiled step."""
    with torch.device("meta"):
        other = Transformer(transformer.config)
    other.load_state_dict(transformer.state_dict(), assign=True)
    other.frequencies = transformer.frequencies
    allow_recompiles()
    other.compile_steps()
    return other.eval().requires_grad_(False)


def allow_recompiles() -> None:
    """Lets every shape that is met anew have its own code; the default limit falls back to eager in silence."""
    from torch._dynamo import config

    config.recompile_limit = 64


def weight_bytes(transformer: Transformer) -> int:
    """Bytes of weights that a pass reads: all but the rows of an embedding table that isn't the head too."""
    tied = transformer.head is None and transformer.int8_head is None
    table = None if tied else transformer.embedding.weight
    tensors = (*transformer.parameters(), *transformer.buffers())
    return sum(t.numel() * t.element_size() for t in tensors if t is not table)


def random_tokens(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    """Ids that a prompt may hold."""
    draw = torch.Generator().manual_seed(seed)
    limit = config.num_tokens if config.mask_token_id is None else min(config.num_tokens, config.mask_token_id)
    return torch.randint(limit, (count,), generator=draw).tolist()


@torch.inference_mode()
def filled_cache(transformer: Transformer, behind: int, room: int) -> Cache:
    """One row with `behind` committed cells that passes have written, and room for `room` more."""
    cache = Cache(transformer.config, 1, behind + room, transformer.dtype, transformer.device)
    tokens = torch.tensor(random_tokens(transformer.config, behind), device=transformer.device)
    for start in range(0, behind, CHUNK):
        stop = min(start + CHUNK, behind)
        positions = torch.arange(start, stop, device=transformer.device)
        # who sees whom doesn't matter to the times of later passes
        transformer.step(tokens[start:stop], positions, cache, [Segment(0, 0, stop - start, None)])
        cache.commit(0, range(stop - start))
    return cache


class Pass:
    """A causal pass of `count` tokens behind a cache's committed cells; commits nothing, so it can be repeated.

    asked: rows of hidden states that go through the head.
    """

    def __init__(self, transformer: Transformer, cache: Cache, count: int, asked: int | None = None) -> None:
        self.transformer, self.cache, self.count = transformer, cache, count
        self.asked = count if asked is None else min(asked, count)
        config, device, behind = transformer.config, transformer.device, cache.lengths[0]
        self.tokens = torch.tensor(random_tokens(config, count, seed=1), device=device)
        self.positions = torch.arange(behind, behind + count, device=device)
        mask = attention_mask(behind, count, None, False, config.group_size, transformer.dtype, device)
        self.segments = [Segment(0, 0, count, mask)]

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Hidden states [T, E]."""
        return self.transformer.step(self.tokens, self.positions, self.cache, self.segments)

    @torch.inference_mode()
    def head(self, hidden_TE: Tensor) -> Tensor:
        return self.transformer.project(hidden_TE[: self.asked])

    def __call__(self) -> Tensor:
        """Logits of the asked tokens."""
        return self.head(self.step())


class Products:
    """The matrix products of a pass alone: every linear layer in order on inputs that are there, then the head."""

    def __init__(self, transformer: Transformer, count: int, asked: int | None = None) -> None:
        c = transformer.config
        self.transformer = transformer
        self.asked = count if asked is None else min(asked, count)

        def states(width: int) -> Tensor:
            return torch.randn(count, width, device=transformer.device).to(transformer.dtype)

        self.hidden, self.attended, self.inner = map(
            states, (c.hidden_size, c.num_heads * c.head_dim, c.intermediate_size)
        )

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        layers: Any = self.transformer.layers
        for layer in layers:
            layer.attention.qkv(self.hidden)
            layer.attention.out(self.attended)
            layer.mlp.gate_up(self.hidden)
            layer.mlp.down(self.inner)
        return self.transformer.project(self.hidden[: self.asked])


def static_layer(
    layer: Any, x_TE: Tensor, cos: Tensor, sin: Tensor, keys_KCD: Tensor, values_KCD: Tensor, cells_T: Tensor,
    mask_GTC: Tensor,
) -> Tensor:
    """A layer's step over all C cells, whatever is written: where to write and what to see are tensors."""
    c = layer.attention.config
    q, k, v = layer.attention.project(layer.attention_norm(x_TE), cos, sin)
    keys_KCD.index_copy_(1, cells_T, k.transpose(0, 1))
    values_KCD.index_copy_(1, cells_T, v.transpose(0, 1))
    count = x_TE.shape[0]
    q = q.unflatten(1, (c.num_kv_heads, c.group_size)).permute(1, 2, 0, 3)
    q = q.reshape(1, c.num_kv_heads, c.group_size * count, c.head_dim)
    out = F.scaled_dot_product_attention(q, keys_KCD[None], values_KCD[None], attn_mask=mask_GTC)
    out = out.view(c.num_kv_heads, c.group_size, count, c.head_dim).permute(2, 0, 1, 3)
    x_TE = x_TE + layer.attention.out(out.reshape(count, c.num_heads * c.head_dim))
    return x_TE + layer.mlp(layer.mlp_norm(x_TE))


def compiled_static_layer() -> Callable[..., Tensor]:
    """`static_layer` compiled for every shape anew; all layers share the code."""
    allow_recompiles()
    return torch.compile(static_layer, dynamic=False)


class StaticPass:
    """The pass of a `Pass` with shapes and addresses that never change, as a CUDA graph needs.

    Its cells are a multiple of BUCKET; a mask hides those that aren't written. layer: what runs
    for each layer, as `static_layer`.
    """

    def __init__(self, source: Pass, layer: Callable[..., Tensor] = static_layer) -> None:
        self.source, self.layer = source, layer
        transformer, behind, count = source.transformer, source.cache.lengths[0], source.count
        c = transformer.config
        self.cells = -(-(behind + count) // BUCKET) * BUCKET
        shape = (c.num_layers, c.num_kv_heads, self.cells, c.head_dim)
        self.keys_LKCD, self.values_LKCD = (
            torch.zeros(shape, dtype=transformer.dtype, device=transformer.device) for _ in range(2)
        )
        self.keys_LKCD[:, :, :behind] = source.cache.keys(0)[:, :, :behind]
        self.values_LKCD[:, :, :behind] = source.cache.values(0)[:, :, :behind]
        self.cells_T = torch.arange(behind, behind + count, device=transformer.device)
        seen_TC = torch.zeros(count, self.cells, dtype=torch.bool)
        seen_TC[:, :behind] = True
        seen_TC[:, behind : behind + count] = visible(count, None, False)
        mask = torch.zeros(count, self.cells, dtype=transformer.dtype).masked_fill(~seen_TC, float("-inf"))
        self.mask_GTC = mask.repeat(c.group_size, 1).to(transformer.device)

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        """Logits of the asked tokens."""
        transformer: Any = self.source.transformer
        cos, sin = rotation(transformer.frequencies, transformer.rope_factor, self.source.positions)
        x = transformer.embedding(self.source.tokens)
        for index, layer in enumerate(transformer.layers):
            keys, values = self.keys_LKCD[index], self.values_LKCD[index]
            x = self.layer(layer, x, cos, sin, keys, values, self.cells_T, self.mask_GTC)
        return self.source.head(transformer.norm(x))


class Captured:
    """A run as a CUDA graph: one launch for all its kernels."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = run()

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._result
