"""Losses and shares of right predictions on held-out rows under fixed noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from refusion.model.transformer import Transformer
from refusion.training.batches import Counts, micro_batches
from refusion.training.noise import NO_LABEL, Noised

DEPTHS = 16


@dataclass
class Validation:
    """ar, mdm: the losses as in training. right_next: share of right next tokens in clean slots.

    right_by_depth: share of right masks at distance 1..16 from the last known token before them
    (index 0 is the very next position), None where there was no such mask; this is what
    parallel decoding's speed is made of.
    """

    ar: float
    mdm: float
    right_next: float
    right_by_depth: list[float | None] = field(default_factory=list)
    examples: int = 0


@torch.no_grad()
def validate(
    transformer: Transformer, forward: Any, examples: Sequence[Noised], micro_tokens: int, precision: torch.dtype,
    mdm_normalizer: str = "ratio",
) -> Validation:
    """Both losses and the shares over all examples; needs no gradient and changes nothing.

    mdm_normalizer: as for refusion.training.loss.hybrid_loss.
    """
    counts = Counts.of(examples)
    ar = mdm = 0.0
    next_right = 0
    hits, seen = torch.zeros(DEPTHS + 1), torch.zeros(DEPTHS + 1)
    device = transformer.device
    for cpu_batch in micro_batches(examples, micro_tokens):
        batch = cpu_batch.to(device)
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            hidden = forward(batch.tokens, batch.positions, batch.mask)
        is_ar, is_mdm = batch.ar_labels != NO_LABEL, batch.mdm_labels != NO_LABEL
        ce, right = _judge(transformer, hidden[is_ar], batch.ar_labels[is_ar], precision)
        ar += float(ce.sum())
        next_right += int(right.sum())
        ce, right = _judge(transformer, hidden[is_mdm], batch.mdm_labels[is_mdm], precision)
        weights = batch.mdm_weights if mdm_normalizer == "ratio" else batch.mdm_shares
        mdm += float((ce * weights[is_mdm]).sum())
        depth = batch.depth[is_mdm].clamp(max=DEPTHS + 1).cpu() - 1
        hits.index_add_(0, depth.clamp(max=DEPTHS), right.float().cpu())
        seen.index_add_(0, depth.clamp(max=DEPTHS), torch.ones(len(depth)))
    shares = [float(h / n) if n else None for h, n in zip(hits[:DEPTHS], seen[:DEPTHS], strict=True)]
    divisor = counts.examples if mdm_normalizer == "ratio" else counts.mdm_shares
    return Validation(
        ar / max(counts.ar_labels, 1), mdm / (divisor or 1.0),
        next_right / max(counts.ar_labels, 1), shares, counts.examples,
    )


def _judge(transformer: Transformer, hidden: Tensor, labels: Tensor, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cross-entropies [N] and whether the best token is the label [N], in chunks of 512."""
    losses, right = [labels.new_zeros(0, dtype=torch.float32)], [labels.new_zeros(0, dtype=torch.bool)]
    for start in range(0, len(labels), 512):
        part = labels[start : start + 512]
        logits = transformer.project(hidden[start : start + 512].to(precision)).float()
        losses.append(torch.nn.functional.cross_entropy(logits, part, reduction="none"))
        right.append(logits.argmax(-1) == part)
    return torch.cat(losses), torch.cat(right)
