"""Noised examples into padded micro-batches, with the counts that normalise their losses.

B rows of a micro-batch, T tokens, padding on the right (harmless under causal attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from refusion.training.noise import NO_LABEL, Noised


@dataclass(frozen=True)
class Counts:
    """What an optimiser step's losses are divided by, over all its micro-batches and devices.

    mdm_shares: masked tokens, those past the end counted by their weight.
    """

    ar_labels: int
    mdm_labels: int
    mdm_shares: float
    examples: int
    tokens: int

    @staticmethod
    def of(examples: Sequence[Noised]) -> Counts:
        return Counts(
            ar_labels=int(sum((e.ar_labels != NO_LABEL).sum() for e in examples)),
            mdm_labels=int(sum((e.mdm_labels != NO_LABEL).sum() for e in examples)),
            mdm_shares=float(sum(e.mdm_shares.sum(dtype=np.float64) for e in examples)),
            examples=len(examples),
            tokens=int(sum(len(e.tokens) for e in examples)),
        )


@dataclass(frozen=True)
class MicroBatch:
    """tokens, positions, ar_labels, mdm_labels, depth: int64 [B, T]; mdm_weights, mdm_shares: float32 [B, T].

    mask: boolean [B, 1, T, T], what each cell sees; None where that is every cell before it.
    """

    tokens: Tensor
    positions: Tensor
    ar_labels: Tensor
    mdm_labels: Tensor
    mdm_weights: Tensor
    mdm_shares: Tensor
    depth: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: part.to(device) for name, part in parts.items() if part is not None})


def micro_batches(examples: Sequence[Noised], micro_tokens: int) -> list[MicroBatch]:
    """Sorts by length and cuts into batches of at most `micro_tokens` cells, padding included.

    A single example longer than that forms a batch of its own.
    """
    ordered = sorted(examples, key=lambda e: (len(e.tokens), e.tokens.tobytes()), reverse=True)
    groups: list[list[Noised]] = []
    for example in ordered:
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0].tokens) <= micro_tokens:
            groups[-1].append(example)
        else:
            groups.append([example])
    return [_pad(group) for group in groups]


def _pad(group: Sequence[Noised]) -> MicroBatch:
    width = max(len(e.tokens) for e in group)

    def stack(name: str, fill: int | float) -> Tensor:
        rows = [getattr(e, name) for e in group]
        out = np.full((len(rows), width), fill, dtype=rows[0].dtype)
        for at, row in enumerate(rows):
            out[at, : len(row)] = row
        return torch.from_numpy(out)

    return MicroBatch(
        tokens=stack("tokens", 0),
        positions=stack("positions", 0),
        ar_labels=stack("ar_labels", NO_LABEL),
        mdm_labels=stack("mdm_labels", NO_LABEL),
        mdm_weights=stack("mdm_weights", 0.0),
        mdm_shares=stack("mdm_shares", 0.0),
        depth=stack("depth", 0),
        mask=_visible(group, width),
    )


def _visible(group: Sequence[Noised], width: int) -> Tensor | None:
    """See Noised.branch; None where no example has branches. Padding sees what is before it, which does no harm."""
    if all(e.branch is None for e in group):
        return None
    branch = torch.full((len(group), width), -1)
    for row, e in zip(branch, group, strict=True):
        if e.branch is not None:
            row[: len(e.branch)] = torch.from_numpy(e.branch)
    seen, sees = branch[:, None, :], branch[:, :, None]
    before = torch.arange(width) < sees  # the prefix that a branch stands behind
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return (causal & ((sees == seen) | before)).unsqueeze(1)
