"""The key-value cache: rows of cells, where storage order and position are two things.

L layers, C cells, H key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refusion.model.config import ModelConfig


class Cache:
    """Keys and values of `rows` sequences, each row with as many cells as it was given.

    A pass writes its keys and values behind a row's committed cells; `commit` then keeps
    the chosen ones. Keys are stored rotated to their true position, so a cell's content
    never depends on where it is stored. A row's memory is its own: a long one costs the
    others nothing, and a released one is free again.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """capacity: cells that every row begins with."""
        if rows < 1 or capacity < 0:
            raise ValueError(f"a cache needs at least one row and no fewer than 0 cells, got {rows} rows of {capacity}")
        self._config = config
        self._stores: list[Tensor] = [torch.empty(0) for _ in range(rows)]
        self.dtype, self.device = dtype, torch.device(device)
        self.lengths = [0] * rows
        for row in range(rows):
            self._stores[row] = self._allocate(capacity)

    def _allocate(self, capacity: int) -> Tensor:
        c = self._config
        shape = (2, c.num_layers, c.num_kv_heads, capacity, c.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def cells(self) -> int:
        """Cells of all rows together, written or not: what the memory is paid for."""
        return sum(map(self.capacity, range(self.rows)))

    @property
    def bytes_per_cell(self) -> int:
        c = self._config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * self.dtype.itemsize

    def capacity(self, row: int) -> int:
        """Cells of a row."""
        return self._stores[row].shape[3]

    def keys(self, row: int) -> Tensor:
        """[L, H, C, D], to read and to write; replaced when the row grows."""
        return self._stores[row][0]

    def values(self, row: int) -> Tensor:
        """As `keys`."""
        return self._stores[row][1]

    def reserve(self, row: int, capacity: int) -> None:
        """Grows a row to at least `capacity` cells, keeping all that is written."""
        before = self.capacity(row)
        if capacity <= before:
            return
        grown = self._allocate(capacity)
        grown[:, :, :, :before] = self._stores[row]
        self._stores[row] = grown

    def clear(self, row: int) -> None:
        """Forgets a row's content; its cells are free for another sequence."""
        self.lengths[row] = 0

    def release(self, row: int) -> None:
        """Forgets a row's content and gives its memory back."""
        self.lengths[row] = 0
        self._stores[row] = self._allocate(0)

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
        if min(cells) < 0 or start + max(cells) >= self.capacity(row):
            raise IndexError(f"cells {min(cells)} to {max(cells)} lie outside row {row}")
        moved = next((place for place, cell in enumerate(cells) if cell != place), count)
        if moved < count:
            store = self._stores[row]
            source = torch.tensor(cells[moved:], device=store.device) + start
            store[:, :, :, start + moved : start + count] = store.index_select(3, source)
        self.lengths[row] = start + count
