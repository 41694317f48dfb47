"""Which cells a token of a step may see: the one rule of DESIGN section 4.

T tokens of a row's step, P committed cells, G query heads per key/value head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def visible(
    count: int, groups: Sequence[int] | None, bidirectional: bool, parents: Sequence[int] | None = None
) -> Tensor:
    """Boolean [T, T]: query by key inside the step. Every committed cell is visible besides.

    Causal within a group (all of one group where `groups` is None), or the whole group if
    bidirectional. With `parents`, each cell sees itself and the cells it descends from.
    """
    if parents is not None:
        return _ancestors(parents)
    seen = torch.ones(count, count, dtype=torch.bool)
    if not bidirectional:
        seen = seen.tril()
    if groups is not None:
        group_T = torch.tensor(groups)
        seen &= group_T.unsqueeze(1) == group_T.unsqueeze(0)
    return seen


def _ancestors(parents: Sequence[int]) -> Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for cell, parent in enumerate(parents):
        if parent >= 0:
            seen[cell] |= seen[parent]
    return seen


def attention_mask(
    committed: int,
    count: int,
    groups: Sequence[int] | None,
    bidirectional: bool,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    parents: Sequence[int] | None = None,
) -> Tensor | None:
    """Additive mask [G*T, P+T], 0 or -inf, or None where nothing is hidden."""
    seen = visible(count, groups, bidirectional, parents)
    if bool(seen.all()):
        return None
    mask = torch.zeros(count, committed + count, dtype=dtype)
    mask[:, committed:].masked_fill_(~seen, float("-inf"))
    return mask.repeat(group_size, 1).to(device)
