"""Weighted mixtures: which row of which source comes when, the same for the same seed and epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from refusion.data.split import apportion
from refusion.errors import ConfigError

Row = TypeVar("Row")
_SOURCE_STRIDE = 2**32


class Pick(NamedTuple):
    """One place in an epoch: a row of a source.

    visit: how often this row came before, over all epochs; with `example` it names one showing of one row.
    """

    source: int
    row: int
    visit: int

    @property
    def example(self) -> int:
        """An id of (source, row) that doesn't depend on the sizes of the other sources; below 2**63."""
        return self.source * _SOURCE_STRIDE + self.row


class Mixture:
    """Rows of several sources, each appearing in proportion to its weight.

    An epoch has as many examples as all sources have rows. A source smaller than its share comes again in another
    order once all its rows were shown; a larger one goes on in the next epoch where it stopped.
    """

    def __init__(self, sources: Sequence[Sequence[Row]], weights: Sequence[float], seed: int) -> None:
        """Mixes `sources`; weights are relative and above 0.

        Raises:
            ConfigError: a source is empty, or a weight is not above 0 or missing.
        """
        if len(sources) != len(weights) or not sources:
            raise ConfigError(f"a mixture of {len(sources)} sources needs as many weights, and one at least")
        for number, (rows, weight) in enumerate(zip(sources, weights, strict=True)):
            if not rows or not weight > 0:
                raise ConfigError(f"source {number} of the mixture has {len(rows)} rows and the weight {weight}")
        self.sources, self.seed = sources, seed
        self.shares = apportion(sum(map(len, sources)), weights)

    def __len__(self) -> int:
        """Examples of an epoch."""
        return sum(self.shares)

    def epoch(self, number: int) -> list[Pick]:
        """The examples of one epoch in order; epochs count from 0."""
        picks = []
        for source, share in enumerate(self.shares):
            picks += self._stretch(source, number * share, (number + 1) * share)
        random.Random(f"epoch/{self.seed}/{number}").shuffle(picks)
        return picks

    def _stretch(self, source: int, start: int, stop: int) -> list[Pick]:
        """Places start to stop of a source's endless order, which is one shuffled pass over its rows after another."""
        size, picks = len(self.sources[source]), []
        while start < stop:
            visit, begin = divmod(start, size)
            order = list(range(size))
            random.Random(f"pass/{self.seed}/{source}/{visit}").shuffle(order)
            end = min(size, begin + stop - start)
            picks += [Pick(source, row, visit) for row in order[begin:end]]
            start += end - begin
        return picks
