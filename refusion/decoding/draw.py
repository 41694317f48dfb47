"""Random numbers of one answer: fixed by the seed and its own asks, whatever else is decoded beside it."""

from __future__ import annotations

import random

from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Ask, Step


class Draws:
    """Hands out the uniform numbers that select samples; none at temperature 0.

    index: the prompt's place in its call; each place has a stream of its own under the same seed.
    """

    def __init__(self, config: DecodeConfig, index: int = 0) -> None:
        name = f"refusion/{config.seed}/{index}" if index else f"refusion/{config.seed}"
        self._random = random.Random(name) if config.temperature > 0 else None
        self._temperature, self._top_p = config.temperature, config.top_p

    def ask(self, cell: int, given: int | None = None, certainty: str | None = None) -> Ask:
        """A reading of the best or a sampled token at a cell, and of a given one's probability."""
        return Ask(cell, given, None if self._random is None else self._random.random(), certainty)

    def skip(self) -> None:
        """Passes over the number of a cell that isn't asked, so that leaving it out changes no later draw."""
        if self._random is not None:
            self._random.random()

    def step(
        self, kind: str, tokens: list[int], positions: list[int], ask: list[Ask], groups: list[int] | None = None,
        parents: list[int] | None = None,
    ) -> Step:
        """A causal step with this answer's sampling settings."""
        return Step(tokens, positions, ask, groups, False, kind, self._temperature, self._top_p, parents)
