"""Gives a left-to-right model the mask token that ReFusion needs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from refusion.checkpoint.types import Checkpoint
from refusion.model.config import ModelConfig
from refusion.model.transformer import Attention

MULTIPLE = 64


def add_mask_token(checkpoint: Checkpoint) -> Checkpoint:
    """Adds the mask token in place and returns the same checkpoint; one that has a mask token is left alone.

    The token gets the first unused id. Its rows of the embedding and of an untied head start as
    the mean of all real rows, and so do padding rows, whose logit then never is the highest. The
    vocabulary grows to a multiple of 64. Parameters are replaced: make the optimiser afterwards.
    """
    if checkpoint.config.mask_token_id is not None:
        return checkpoint
    old, tokenizer, transformer = checkpoint.config, checkpoint.tokenizer, checkpoint.transformer
    index = tokenizer.add_mask_token(_free_name(checkpoint))
    rows = max(old.vocab_size, index + 1)
    config = replace(
        old,
        vocab_size=-(-rows // MULTIPLE) * MULTIPLE,
        num_tokens=max(old.num_tokens, index + 1),
        mask_token_id=index,
    )
    real = min(old.num_tokens, index) if index < old.num_tokens else old.num_tokens
    embedding = nn.Embedding(0, 0, device="meta")
    embedding.weight = _grown(transformer.embedding.weight, config.vocab_size, real)
    embedding.num_embeddings, embedding.embedding_dim = config.vocab_size, config.hidden_size
    transformer.embedding = embedding
    if transformer.head is not None:
        transformer.head.weight = _grown(transformer.head.weight, config.vocab_size, real)
        transformer.head.out_features = config.vocab_size
    set_config(transformer, config)
    return checkpoint


def _free_name(checkpoint: Checkpoint) -> str:
    tokenizer = checkpoint.tokenizer
    name, number = "<|mask|>", 0
    while tokenizer.token_to_id(name) is not None:
        number += 1
        name = f"<|mask_{number}|>"
    return name


def _grown(weight: torch.Tensor, rows: int, real: int) -> nn.Parameter:
    with torch.no_grad():
        grown = weight.new_empty(rows, weight.shape[1])
        grown[:real] = weight[:real]
        grown[real:] = weight[:real].float().mean(dim=0).to(weight.dtype)
    return nn.Parameter(grown, requires_grad=weight.requires_grad)


def set_config(transformer: nn.Module, config: ModelConfig) -> None:
    """Gives a network whose parameters were replaced the config that describes them."""
    transformer.config = config  # type: ignore[assignment]
    for module in transformer.modules():
        if isinstance(module, Attention):
            module.config = config
