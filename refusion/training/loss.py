"""The hybrid loss: next tokens inside clean slots, own tokens at masks.

L = L_AR + lambda L_MDM (arXiv 2512.13586 eq. 5), both normalised by counts over the whole
optimiser step, so that micro-batches and devices add up to the loss of one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from refusion.model.transformer import Transformer
from refusion.training.batches import Counts, MicroBatch
from refusion.training.noise import NO_LABEL


@dataclass(frozen=True)
class HybridLoss:
    """total: scalar to differentiate; ar, mdm: its two parts, detached, before lambda."""

    total: Tensor
    ar: Tensor
    mdm: Tensor


ROWS_IN_CACHE = 64
"""Rows of logits that are turned into gradients together: small enough to stay in a CPU's cache."""


class _LinearCrossEntropy(torch.autograd.Function):
    """sum_n w_n CE(h_n W^T, y_n) in chunks; the logits of a chunk never outlive it.

    Gradients are formed in the forward pass, in the place of the logits, so that the [N, V]
    logits are computed once and the memory is one chunk's. Products run in autocast's type,
    into which hidden states and weight are cast once; softmax is float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int) -> Tensor:
        kind = hidden.device.type
        compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        need_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty(hidden.shape, dtype=compute, device=hidden.device) if need_grad else None
        grad_weight: Tensor | None = None
        with torch.autocast(kind, enabled=False):
            low_hidden, low = hidden.to(compute), weight.to(compute)
            for start in range(0, len(labels), chunk):
                span = slice(start, start + chunk)
                logits = low_hidden[span] @ low.t()
                losses[span] = _to_gradient(logits, labels[span], scale[span], need_grad)
                if grad_hidden is not None:
                    grad_hidden[span] = logits @ low
                if ctx.needs_input_grad[1]:
                    share = logits.t() @ low_hidden[span]
                    grad_weight = share.float() if grad_weight is None else grad_weight.add_(share)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(losses)
        ctx.hidden_dtype, ctx.weight_dtype = hidden.dtype, weight.dtype
        return (losses * scale).sum(), losses  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            (grad_hidden * grad.to(grad_hidden.dtype)).to(ctx.hidden_dtype) if grad_hidden is not None else None,
            (grad_weight * grad).to(ctx.weight_dtype) if grad_weight is not None else None,
            None, None, None,
        )


def _to_gradient(logits: Tensor, labels: Tensor, scale: Tensor, need_grad: bool) -> Tensor:
    """Cross-entropies [n] of logits [n, V], which are overwritten by scale * (softmax - one-hot) if needed."""
    losses = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    for start in range(0, len(labels), ROWS_IN_CACHE):
        rows = slice(start, start + ROWS_IN_CACHE)
        picked = labels[rows].unsqueeze(1)
        log_p = torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32)
        losses[rows] = -log_p.gather(1, picked).squeeze(1)
        if need_grad:
            p = log_p.exp_()
            p.scatter_add_(1, picked, torch.full_like(p[:, :1], -1.0))
            logits[rows] = p.mul_(scale[rows].unsqueeze(1))
    return losses


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor, chunk: int = 512
) -> tuple[Tensor, Tensor]:
    """Scaled sum of cross-entropies and the single ones.

    hidden [N, E], weight [V, E], labels int64 [N], scale float32 [N].
    Returns the scalar sum_n scale_n CE_n (differentiable) and CE [N] (not).
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale, chunk)  # type: ignore[return-value]


def hybrid_loss(
    transformer: Transformer,
    forward: Any,
    batch: MicroBatch,
    counts: Counts,
    mdm_weight: float = 1.0,
    mdm_normalizer: str = "ratio",
) -> HybridLoss:
    """One micro-batch's share of the step's loss.

    forward: callable(tokens, positions, mask) -> hidden states [B, T, E]; the transformer itself, or
        its compiled or distributed form.
    mdm_normalizer: "ratio" weights each masked token 1/(t L) and averages over examples (the
        published code); "mean" averages over masked tokens (the published paper). Both count
        tokens past the end by their weight.
    A step without labels of one kind gives exactly 0 for it, with finite gradients.
    """
    hidden = forward(batch.tokens, batch.positions, batch.mask)
    is_ar, is_mdm = batch.ar_labels != NO_LABEL, batch.mdm_labels != NO_LABEL
    scale = torch.zeros_like(batch.mdm_weights)
    scale[is_ar] = 1.0 / max(counts.ar_labels, 1)
    if mdm_normalizer == "ratio":
        mdm_scale = batch.mdm_weights / max(counts.examples, 1)
    else:
        mdm_scale = batch.mdm_shares / (counts.mdm_shares or 1.0)
    scale[is_mdm] = mdm_weight * mdm_scale[is_mdm]
    wanted = is_ar | is_mdm
    if not bool(wanted.any()):
        zero = hidden.float().sum() * 0.0
        return HybridLoss(zero, zero.detach(), zero.detach())
    labels = torch.where(is_ar, batch.ar_labels, batch.mdm_labels)[wanted]
    weight = transformer.embedding.weight if transformer.head is None else transformer.head.weight
    total, single = linear_cross_entropy(hidden[wanted], weight, labels, scale[wanted])
    ar_part = (single * is_ar[wanted]).sum() / max(counts.ar_labels, 1)
    mdm_part = (single * mdm_scale[wanted] * is_mdm[wanted]).sum()
    return HybridLoss(total, ar_part, mdm_part)
