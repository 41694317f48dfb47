"""How positions split into slots and blocks: one rule for training and decoding.

All positions are counted from the answer's first one.
"""

from __future__ import annotations


def split(start: int, stop: int, size: int) -> list[range]:
    """Cuts [start, stop) into consecutive ranges of `size` positions; the last may be shorter.

    Raises:
        ValueError: size is below 1 or the span is reversed.
    """
    if size < 1:
        raise ValueError(f"a slot or block needs at least one position, got {size}")
    if stop < start:
        raise ValueError(f"positions {start} to {stop} run backwards")
    return [range(at, min(at + size, stop)) for at in range(start, stop, size)]


def slots(length: int, slot_size: int) -> list[range]:
    """Slots of an answer of `length` positions."""
    return split(0, length, slot_size)


def blocks(length: int, block_size: int, slot_size: int) -> list[list[range]]:
    """Blocks of an answer, each a list of its slots; no slot crosses a block's border.

    Any three sizes work: where slot_size doesn't divide block_size, a block's last slot is shorter.
    """
    return [split(block.start, block.stop, slot_size) for block in split(0, length, block_size)]
