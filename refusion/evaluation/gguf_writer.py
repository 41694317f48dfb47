"""Our network -> a GGUF file that llama.cpp can run on token ids, so that it is compared on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.names import table
from refusion.errors import ConfigError
from refusion.evaluation.floats import float_weights, is_int8, rounded
from refusion.model.config import ModelConfig
from refusion.model.rope import inverse_frequencies
from refusion.model.transformer import Transformer

_QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types of blocks that the package gguf can write."""
_PLAIN = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ROPE_FACTORS = "rope_freqs.weight"


def same_architecture(left: ModelConfig, right: ModelConfig) -> bool:
    """Whether two networks differ in nothing but their weights, their vocabulary and its control tokens."""
    return _shape(left) == _shape(right)


def _shape(config: ModelConfig) -> dict[str, Any]:
    vocabulary = {"vocab_size", "num_tokens", "mask_token_id", "eos_token_ids", "bos_token_id", "pad_token_id"}
    return {name: value for name, value in vars(config).items() if name not in vocabulary}


def holds_weights(file: GgufFile, transformer: Transformer) -> bool:
    """Whether a file, dequantised to the network's type, is that very network."""
    in_int8 = is_int8(transformer)
    for name, tensor in _tensors(transformer, transformer.config.vocab_size):
        if name not in file.tensors or file.tensors[name].shape != tuple(tensor.shape):
            return False
        theirs = file.tensor(name).to(transformer.dtype)
        if in_int8 and theirs.ndim == 2 and name != "token_embd.weight":
            theirs = rounded(theirs)
        if not torch.equal(theirs, tensor.cpu()):
            return False
    return True


def written_tokens(config: ModelConfig) -> int:
    """How many rows of the vocabulary are written: without padding, and without a mask token at their end."""
    return config.num_tokens - (config.mask_token_id == config.num_tokens - 1)


def write_gguf(transformer: Transformer, path: Path, like: GgufFile | None = None) -> tuple[str, ...]:
    """Writes a network without a tokenizer; returns the types of its matrices.

    like: whose types to use, tensor by tensor; a type that can't be written becomes Q8_0. None: the network's own.

    Raises:
        ConfigError: the network has a feature that isn't written.
    """
    import gguf

    config = transformer.config
    writer = gguf.GGUFWriter(str(path), config.family)
    _write_config(writer, config)
    kinds: set[str] = set()
    for name, tensor in _tensors(transformer, written_tokens(config)):
        wanted = _kind(name, tensor, _PLAIN.get(transformer.dtype, "F32"), like)
        stored = gguf.GGMLQuantizationType[wanted]
        values = tensor.to("cpu", torch.float32).contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)
        kinds |= {wanted} if tensor.ndim == 2 else set()
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor(_ROPE_FACTORS, factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tuple(sorted(kinds))


def _write_config(writer: Any, config: ModelConfig) -> None:
    import gguf

    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_vocab_size(written_tokens(config))
    writer.add_tokenizer_model("none")  # token ids go in and come out
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling.factor)
    elif scaling is not None and scaling.kind != "llama3":
        raise ConfigError(
            f"the peer llama.cpp can't be given a model with {scaling.kind} RoPE scaling; load the model from its "
            ".gguf file, or leave the peer out"
        )


def _rope_factors(config: ModelConfig) -> Tensor | None:
    """Llama 3's scaling as llama.cpp wants it: a divisor for each frequency."""
    if config.rope_scaling is None or config.rope_scaling.kind != "llama3":
        return None
    plain, _ = inverse_frequencies(replace(config, rope_scaling=None))
    scaled, _ = inverse_frequencies(config)
    return plain / scaled


def _tensors(transformer: Transformer, rows: int) -> Iterator[tuple[str, Tensor]]:
    """Name and weights of each tensor in GGUF's layout, the vocabulary cut to `rows`."""
    config = transformer.config
    weights = float_weights(transformer)
    for name, parts in table(config).items():
        start = 0
        for part in parts:
            tensor = weights[name][start : start + part.shape[0]]
            start += part.shape[0]
            if part.permuted_heads and config.family == "llama":
                # llama.cpp rotates neighbouring rows, so the halves of each head are interleaved
                tensor = tensor.unflatten(0, (part.permuted_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
            yield part.gguf, tensor[:rows] if name in ("embedding.weight", "head.weight") else tensor


def _kind(name: str, tensor: Tensor, plain: str, like: GgufFile | None) -> str:
    """The type to write a tensor in; plain: that of the network."""
    if tensor.ndim < 2:
        return "F32"
    wanted = plain if like is None or name not in like.tensors else like.tensors[name].kind
    if wanted in _PLAIN.values():
        return wanted
    wanted = wanted if wanted in _QUANTISED else "Q8_0"
    block = 32  # of all types in _QUANTISED
    return wanted if tensor.shape[-1] % block == 0 else "F16"
