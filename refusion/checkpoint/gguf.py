"""GGUF -> network: the Llama, Qwen2 and Qwen3 architectures as llama.cpp writes them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.gguf_tokenizer import read_tokenizer
from refusion.checkpoint.hf_config import FAMILIES, MOST_LAYERS, check_family
from refusion.checkpoint.names import Part, table
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.checkpoint.types import Checkpoint
from refusion.checkpoint.weights import Adapt, check_shape, empty_transformer, fill
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig, RopeScaling

_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = {_ROPE_FACTORS}


def read_config(file: GgufFile) -> ModelConfig:
    """The architecture a GGUF file's metadata describe; end tokens are the tokenizer's affair.

    Raises:
        CheckpointError: an architecture or a feature of it isn't supported.
    """
    family = file.need("general.architecture")
    if family not in FAMILIES:
        raise CheckpointError(f"{file.path}: architecture '{family}' isn't supported (llama, qwen2 and qwen3 are)")
    if file.metadata.get(f"{family}.expert_count", 0):
        raise CheckpointError(f"{file.path}: mixture of experts (MoE) isn't supported; use a dense model")
    if file.metadata.get(f"{family}.attention.sliding_window", 0):
        raise CheckpointError(f"{file.path}: sliding-window attention isn't supported; use a model with full attention")
    if file.metadata.get(f"{family}.final_logit_softcapping") or file.metadata.get(f"{family}.attn_logit_softcapping"):
        raise CheckpointError(f"{file.path}: logit soft-capping isn't supported")
    hidden = int(file.number(f"{family}.embedding_length"))
    heads = max(int(file.number(f"{family}.attention.head_count")), 1)
    layers = int(file.number(f"{family}.block_count"))
    if layers > MOST_LAYERS:
        raise CheckpointError(f"{file.path}: {family}.block_count is {layers}; convert the model to GGUF again")
    head_dim = int(file.number(f"{family}.attention.key_length", hidden // heads))
    rotated = int(file.number(f"{family}.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise CheckpointError(f"{file.path}: partial rotary embeddings ({rotated} of {head_dim}) aren't supported")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing; convert the model to GGUF again")
    rows = file.tensors["token_embd.weight"].shape[0]
    try:
        return ModelConfig(
            vocab_size=rows,
            hidden_size=hidden,
            intermediate_size=int(file.number(f"{family}.feed_forward_length")),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(file.number(f"{family}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            max_positions=int(file.number(f"{family}.context_length")),
            family=family,
            # the file keeps float32; the shortest decimal with that value is what was meant
            rms_eps=_short(file.number(f"{family}.attention.layer_norm_rms_epsilon")),
            rope_theta=_short(file.number(f"{family}.rope.freq_base", 10000.0)),
            rope_scaling=_scaling(file, family, head_dim),
            tie_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            output_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        )
    except ValueError as error:
        raise CheckpointError(f"{file.path}: the metadata don't fit together: {error}") from error


def _short(value: float) -> float:
    return float(f"{float(value):.7g}")


def _scaling(file: GgufFile, family: str, head_dim: int) -> RopeScaling | None:
    prefix = f"{family}.rope.scaling."
    kind = file.metadata.get(f"{prefix}type", "none")
    if _ROPE_FACTORS in file.tensors:
        return _llama3(file, family, head_dim)
    factor = _short(file.number(f"{prefix}factor", 1.0))
    original = int(file.number(f"{prefix}original_context_length", 0.0))
    if kind == "linear":
        return RopeScaling("linear", factor=factor)
    if kind == "yarn":
        # llama.cpp derives the attention factor from the scale and multiplies it by this
        default = _yarn_attention(factor) * _short(file.number(f"{prefix}attn_factor", 1.0))
        return RopeScaling(
            "yarn",
            factor=factor,
            original_max_positions=original or int(file.number(f"{family}.context_length")),
            beta_fast=_short(file.number(f"{prefix}yarn_beta_fast", 32.0)),
            beta_slow=_short(file.number(f"{prefix}yarn_beta_slow", 1.0)),
            attention_factor=default,
        )
    if kind not in ("none", ""):
        raise CheckpointError(f"{file.path}: RoPE scaling '{kind}' isn't supported (linear, llama3 and yarn are)")
    return None


def _yarn_attention(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(file: GgufFile, family: str, head_dim: int) -> RopeScaling:
    """Llama 3's scaling, which GGUF keeps only as one divisor per frequency: found again and checked."""
    divisors = file.tensor(_ROPE_FACTORS).flatten()
    theta = float(file.number(f"{family}.rope.freq_base", 10000.0))
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    factor = _short(float(divisors.max()))
    for original in (8192, 4096, 2048, 16384, 32768):
        rotations = original * plain / (2 * math.pi)
        smooth = ((rotations - 1.0) / 3.0).clamp(0, 1)
        if divisors.shape == plain.shape and torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
            return RopeScaling("llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                               original_max_positions=original)
    raise CheckpointError(
        f"{file.path}: the frequency factors in {_ROPE_FACTORS} aren't those of Llama 3 and aren't supported; "
        "use the Hugging Face folder of the model"
    )


def _read_part(file: GgufFile, part: Part, permuted: bool) -> Tensor:
    tensor = file.tensor(part.gguf)
    if permuted and part.permuted_heads:
        # llama.cpp rotates neighbouring rows, so its converter interleaved the halves of each head
        return tensor.unflatten(0, (part.permuted_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return tensor


def check_tensors(file: GgufFile, config: ModelConfig) -> None:
    """
    Raises:
        CheckpointError: a tensor is missing, of another shape, or has no place in the architecture.
    """
    parts = {part.gguf: part for parts in table(config).values() for part in parts}
    for name, part in parts.items():
        if name not in file.tensors:
            raise CheckpointError(f"{file.path}: tensor {name} is missing; convert the model to GGUF again")
        check_shape(str(file.path), name, file.tensors[name].shape, part.shape)
    extra = sorted(set(file.tensors) - set(parts) - _IGNORED)
    if extra:
        raise CheckpointError(
            f"{file.path}: tensor {extra[0]} is unexpected in the {config.family} architecture; "
            "this kind of model isn't supported"
        )


def load_gguf(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, mask_token_id: int | None = None,
    adapt: Adapt | None = None,
) -> Checkpoint:
    """A checkpoint from a GGUF file, its weights dequantised to `dtype`; adapt: see refusion.checkpoint.weights.fill.

    Raises:
        CheckpointError: the file is damaged or of a kind that isn't supported.
    """
    file = GgufFile(path)
    tokenizer = read_tokenizer(file, mask_token_id)
    config = complete(read_config(file), tokenizer)
    check_family(config, str(path))
    check_tensors(file, config)
    transformer = empty_transformer(config, dtype, device)
    fill(transformer, lambda part: _read_part(file, part, permuted=config.family == "llama"), adapt)
    return Checkpoint(transformer, tokenizer, str(path), {"format": "gguf"})


def complete(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The config with what the tokenizer knows: how many ids have tokens, and the control tokens.

    Raises:
        CheckpointError: the mask token is outside the vocabulary.
    """
    rows = config.vocab_size
    mask = tokenizer.mask_id
    try:
        return replace(
            config,
            num_tokens=min(max(tokenizer.vocab_size, 0 if mask is None else mask + 1), rows),
            mask_token_id=mask,
            eos_token_ids=tuple(i for i in tokenizer.eos_ids if i < rows),
            bos_token_id=tokenizer.bos_id if tokenizer.bos_id is not None and tokenizer.bos_id < rows else None,
            pad_token_id=tokenizer.pad_id if tokenizer.pad_id is not None and tokenizer.pad_id < rows else None,
        )
    except ValueError as error:
        raise CheckpointError(f"{error}; give another mask_token_id") from error
