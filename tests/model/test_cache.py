"""Cells: what is committed stays, wherever it came from and however the cache grows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion.model.cache import Cache
from refusion.model.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=2,
    max_positions=64,
)


def write(cache: Cache, row: int, values: list[int]) -> None:
    """What a pass does: keys and values behind the committed cells, here a number in every place of a cell."""
    start = cache.lengths[row]
    for at, value in enumerate(values):
        cache.keys(row)[:, :, start + at] = value
        cache.values(row)[:, :, start + at] = -value


def contents(cache: Cache, row: int) -> list[int]:
    keys = cache.keys(row)[:, :, : cache.lengths[row]]
    assert (keys == keys[:1, :1, :, :1]).all(), "all layers, heads and dimensions alike"
    assert torch.equal(keys, -cache.values(row)[:, :, : cache.lengths[row]])
    return [int(value) for value in keys[0, 0, :, 0]]


@given(data=st.data())
def test_any_choice_of_cells_is_kept_in_its_order(data: st.DataObject) -> None:
    cache, wanted, number = Cache(CONFIG, rows=3, capacity=4), [], 1
    write(cache, 0, [99, 98])
    cache.commit(0, [0, 1])
    for _ in range(data.draw(st.integers(1, 5))):
        count = data.draw(st.integers(1, 6))
        fed = list(range(number, number + count))
        number += count
        cache.reserve(1, cache.lengths[1] + count)
        write(cache, 1, fed)
        cells = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
        cache.commit(1, cells)
        wanted += [fed[cell] for cell in cells]
        assert contents(cache, 1) == wanted
    assert contents(cache, 0) == [99, 98] and cache.lengths[2] == 0


def test_a_run_from_the_first_cell_on_moves_nothing() -> None:
    cache = Cache(CONFIG, rows=1, capacity=4)
    write(cache, 0, [1, 2, 3])
    before = cache.keys(0).clone()
    cache.commit(0, range(2))
    assert torch.equal(cache.keys(0), before) and contents(cache, 0) == [1, 2]
    cache.commit(0, [])
    assert cache.lengths == [2]


def test_growing_keeps_what_is_committed_and_never_shrinks() -> None:
    cache = Cache(CONFIG, rows=2, capacity=2)
    for row, value in enumerate((5, 7)):
        write(cache, row, [value, value + 1])
        cache.commit(row, range(2))
    cache.reserve(0, 9)
    cache.reserve(0, 3)
    write(cache, 0, [6, 1])
    cache.reserve(0, 12)  # what a pass has written counts before it is committed
    cache.commit(0, range(1))
    assert cache.capacity(0) == 12 and cache.keys(0).shape == cache.values(0).shape == (2, 2, 12, 2)
    assert cache.capacity(1) == 2 and cache.cells == 14, "a row's cells are its own"
    assert contents(cache, 0) == [5, 6, 6] and contents(cache, 1) == [7, 8]


def test_a_cleared_row_starts_anew() -> None:
    cache = Cache(CONFIG, rows=2, capacity=2)
    write(cache, 1, [1, 2])
    cache.commit(1, range(2))
    cache.clear(1)
    write(cache, 1, [3])
    cache.commit(1, [0])
    assert contents(cache, 1) == [3] and cache.lengths == [0, 1]


@pytest.mark.parametrize("cells", [[-1], [0, 3], range(4), [2, -2]])
def test_cells_outside_the_row_are_refused(cells: list[int]) -> None:
    cache = Cache(CONFIG, rows=1, capacity=4)
    cache.commit(0, [0])
    with pytest.raises(IndexError, match="lie outside row 0"):
        cache.commit(0, cells)
    assert cache.lengths == [1]


def test_a_released_row_gives_its_memory_back() -> None:
    cache = Cache(CONFIG, rows=2, capacity=3)
    write(cache, 0, [4])
    cache.commit(0, [0])
    cache.release(1)
    assert (cache.capacity(1), cache.cells, contents(cache, 0)) == (0, 3, [4])
    assert cache.bytes_per_cell == 2 * 2 * 2 * 2 * 4, "keys and values, layers, heads, dimension, bytes of a float"
    cache.reserve(1, 2)
    write(cache, 1, [8])
    cache.commit(1, [0])
    assert contents(cache, 1) == [8]


@pytest.mark.parametrize(("rows", "capacity"), [(0, 4), (1, -1)])
def test_an_empty_cache_is_refused(rows: int, capacity: int) -> None:
    with pytest.raises(ValueError, match="at least one row and no fewer than 0 cells"):
        Cache(CONFIG, rows, capacity)


def test_type_and_rows() -> None:
    cache = Cache(CONFIG, rows=3, capacity=2, dtype=torch.bfloat16)
    assert cache.rows == 3 and cache.keys(2).dtype == torch.bfloat16
    cache.reserve(2, 5)
    assert cache.values(2).dtype == torch.bfloat16
