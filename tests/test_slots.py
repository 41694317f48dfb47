"""Slots and blocks against a brute-force reading of their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.slots import blocks, slots, split


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 64))
def test_split_covers_every_position_once(start: int, count: int, size: int) -> None:
    parts = split(start, start + count, size)
    assert [at for part in parts for at in part] == list(range(start, start + count))
    assert all(len(part) == size for part in parts[:-1])
    assert all(1 <= len(part) <= size for part in parts)


@given(st.integers(0, 200), st.integers(1, 40))
def test_a_position_belongs_to_the_slot_of_its_quotient(length: int, size: int) -> None:
    for number, part in enumerate(slots(length, size)):
        assert {at // size for at in part} == {number}


@given(st.integers(0, 200), st.integers(1, 70), st.integers(1, 40))
def test_no_slot_crosses_a_block(length: int, block: int, size: int) -> None:
    found = blocks(length, block, size)
    assert [at for parts in found for part in parts for at in part] == list(range(length))
    for number, parts in enumerate(found):
        first = number * block
        for part in parts:
            assert {at // block for at in part} == {number}
            assert len({(at - first) // size for at in part}) == 1
        # and no slot is shorter than it must be
        assert len(parts) == -(-min(block, length - first) // size)


def test_examples() -> None:
    assert slots(10, 4) == [range(0, 4), range(4, 8), range(8, 10)]
    assert blocks(13, 8, 3) == [[range(0, 3), range(3, 6), range(6, 8)], [range(8, 11), range(11, 13)]]
    assert slots(0, 4) == [] and blocks(0, 4, 2) == []


@pytest.mark.parametrize(("start", "stop", "size"), [(0, 4, 0), (0, 4, -1), (3, 2, 1)])
def test_impossible_cuts_are_refused(start: int, stop: int, size: int) -> None:
    with pytest.raises(ValueError):
        split(start, stop, size)
