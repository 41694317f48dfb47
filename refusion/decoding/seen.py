"""A pass's reading by cell, so that a decoder needn't count which cells it asked about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from refusion.decoding.contract import Ask, Reading


class Seen(NamedTuple):
    """What was read at one cell; the fields are Reading's."""

    best: int
    best_probability: float
    given_probability: float
    sample: int
    sample_probability: float
    certainty: float


def by_cell(asks: Sequence[Ask], reading: Reading) -> dict[int, Seen]:
    """The reading of every cell that was asked about; at most one ask a cell."""
    columns = (
        reading.best, reading.best_probability, reading.given_probability, reading.sample,
        reading.sample_probability, reading.certainty or [0.0] * len(asks),
    )
    return {ask.cell: Seen(*read) for ask, *read in zip(asks, *columns, strict=True)}
