"""Names of tensors: ours, Hugging Face's and GGUF's, in one table.

Our network fuses what is multiplied with the same input, so one of our parameters may hold
several tensors of a file, one after the other along the first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from refusion.model.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """A tensor of a file: its names there, its shape, and the heads whose rows GGUF permutes (0: none)."""

    huggingface: str
    gguf: str
    shape: tuple[int, ...]
    permuted_heads: int = 0


def table(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """The tensors that make up each parameter of `Transformer(config)`, in their order inside it."""
    c = config
    parts: dict[str, tuple[Part, ...]] = {
        "embedding.weight": (Part("model.embed_tokens.weight", "token_embd.weight", (c.vocab_size, c.hidden_size)),),
        "norm.weight": (Part("model.norm.weight", "output_norm.weight", (c.hidden_size,)),),
    }
    if not c.tie_embeddings:
        parts["head.weight"] = (Part("lm_head.weight", "output.weight", (c.vocab_size, c.hidden_size)),)
    for layer in range(c.num_layers):
        parts.update(_layer(c, layer))
    return parts


def _layer(c: ModelConfig, layer: int) -> dict[str, tuple[Part, ...]]:
    hidden, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def part(name: str, gguf: str, shape: tuple[int, ...], permuted: int = 0) -> Part:
        return Part(f"model.layers.{layer}.{name}", f"blk.{layer}.{gguf}", shape, permuted)

    def linear(
        pieces: list[tuple[str, str, int, int]], inputs: int, bias: bool, ours: str
    ) -> dict[str, tuple[Part, ...]]:
        found = {f"{ours}.weight": tuple(
            part(f"{hf}.weight", f"{gg}.weight", (rows, inputs), heads) for hf, gg, rows, heads in pieces)}
        if bias:
            found[f"{ours}.bias"] = tuple(
                part(f"{hf}.bias", f"{gg}.bias", (rows,), heads) for hf, gg, rows, heads in pieces)
        return found

    q = ("self_attn.q_proj", "attn_q", queries, c.num_heads)
    k = ("self_attn.k_proj", "attn_k", keys, c.num_kv_heads)
    v = ("self_attn.v_proj", "attn_v", keys, 0)
    ours: dict[str, tuple[Part, ...]] = {
        "attention_norm.weight": (part("input_layernorm.weight", "attn_norm.weight", (hidden,)),),
        "mlp_norm.weight": (part("post_attention_layernorm.weight", "ffn_norm.weight", (hidden,)),),
        **linear([q, k, v], hidden, c.qkv_bias, "attention.qkv"),
        **linear([("self_attn.o_proj", "attn_output", hidden, 0)], queries, c.output_bias, "attention.out"),
        **linear([("mlp.gate_proj", "ffn_gate", inner, 0), ("mlp.up_proj", "ffn_up", inner, 0)],
                 hidden, c.mlp_bias, "mlp.gate_up"),
        **linear([("mlp.down_proj", "ffn_down", hidden, 0)], inner, c.mlp_bias, "mlp.down"),
    }
    if c.qk_norm:
        ours["attention.query_norm.weight"] = (part("self_attn.q_norm.weight", "attn_q_norm.weight", (c.head_dim,)),)
        ours["attention.key_norm.weight"] = (part("self_attn.k_norm.weight", "attn_k_norm.weight", (c.head_dim,)),)
    return {f"layers.{layer}.{name}": found for name, found in ours.items()}
