"""A tiny random network, its plain logits without a cache, and algorithms that are written down as steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from refusion.decoding.contract import Algorithm, Answer, Reading, Row, Step
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer

MASK, END, TOKENS, ROWS = 59, 58, 60, 64
"""Ids 60 to 63 are padding rows of the vocabulary."""
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS, "num_tokens": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "max_positions": 256, "mask_token_id": MASK,
    "eos_token_ids": (END,),
}


def tiny(seed: int = 0, sharp: float = 1.0, **changes: Any) -> Transformer:
    """Random weights in float32; sharp: a factor on the logits."""
    transformer = Transformer(ModelConfig(**{**SHAPE, **changes})).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for parameter in transformer.parameters():
        scale, base = (0.1, 1.0) if parameter.ndim == 1 else (0.25, 0.0)
        parameter.data = base + scale * torch.randn(parameter.shape, generator=draw)
    if transformer.head is not None:
        transformer.head.weight.data *= sharp
    return transformer


@torch.inference_mode()
def plain_logits(transformer: Transformer, tokens: Sequence[int], positions: Sequence[int], seen: Tensor) -> Tensor:
    """float32 [T, V] of one pass without a cache, under a boolean [T, T] of who sees whom."""
    hidden = transformer(torch.tensor([list(tokens)]), torch.tensor([list(positions)]), seen[None, None])
    return transformer.project(hidden)[0].float()


def allowed(logits: Tensor) -> Tensor:
    """Probabilities over the ids that may be written."""
    logits = logits.clone()
    logits[..., [MASK, *range(TOKENS, ROWS)]] = float("-inf")
    return logits.softmax(-1)


def steps(script: Sequence[tuple[Step, Sequence[int]]], into: list[Reading]) -> Callable[[Row], Algorithm]:
    """An algorithm that asks for these steps and commits these cells after each."""
    def algorithm(row: Row) -> Algorithm:
        for step, cells in script:
            reading = yield step
            assert reading is not None
            into.append(reading)
            before = row.committed
            row.commit(cells)
            assert row.committed == before + len(cells)
        return Answer([0])
    return algorithm
