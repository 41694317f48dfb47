"""The key-value cache: rows of cells, where storage order and position are two things.

L layers, R rows, C cells, H key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refusion.model.config import ModelConfig


class Cache:
    """Keys and values of `rows` sequences, `capacity` cells each, preallocated.

    A pass writes its keys and values behind a row's committed cells; `commit` then keeps
    the chosen ones. Keys are stored rotated to their true position, so a cell's content
    never depends on where it is stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if rows < 1 or capacity < 1:
            raise ValueError(f"a cache needs at least one row and one cell, got {rows} rows of {capacity} cells")
        shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        self.keys_LRHCD = torch.zeros(shape, dtype=dtype, device=device)
        self.values_LRHCD = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = [0] * rows
        self.capacity = capacity

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def reserve(self, capacity: int) -> None:
        """Grows every row to at least `capacity` cells, keeping what is committed."""
        if capacity <= self.capacity:
            return
        extra = capacity - self.capacity
        self.keys_LRHCD = torch.nn.functional.pad(self.keys_LRHCD, (0, 0, 0, extra))
        self.values_LRHCD = torch.nn.functional.pad(self.values_LRHCD, (0, 0, 0, extra))
        self.capacity = capacity

    def clear(self, row: int) -> None:
        """Forgets a row; its cells are free for another sequence."""
        self.lengths[row] = 0

    def commit(self, row: int, cells: Sequence[int]) -> None:
        """Keeps the given cells of the last pass, counted from its first, in the given order.

        A run from the first cell on is a change of length only; anything else is gathered once.

        Raises:
            IndexError: a cell lies outside the row.
        """
        count = len(cells)
        if not count:
            return
        start = self.lengths[row]
        if min(cells) < 0 or start + max(cells) >= self.capacity:
            raise IndexError(f"cells {min(cells)} to {max(cells)} lie outside row {row}")
        if any(cell != place for place, cell in enumerate(cells)):
            source = torch.tensor(cells, device=self.keys_LRHCD.device) + start
            for store in (self.keys_LRHCD, self.values_LRHCD):
                store[:, row, :, start : start + count] = store[:, row].index_select(2, source)
        self.lengths[row] = start + count
