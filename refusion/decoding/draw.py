"""Random numbers of one answer: fixed by the seed and its own asks, whatever else is decoded beside it."""

from __future__ import annotations

import random

from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Ask, Step


class Draws:
    """Hands out the uniform numbers that select samples; none at temperature 0."""

    def __init__(self, config: DecodeConfig) -> None:
        self._random = random.Random(f"refusion/{config.seed}") if config.temperature > 0 else None
        self._temperature, self._top_p = config.temperature, config.top_p

    def ask(self, cell: int, given: int | None = None) -> Ask:
        """A reading of the best or a sampled token at a cell, and of a given one's probability."""
        return Ask(cell, given, None if self._random is None else self._random.random())

    def step(
        self, kind: str, tokens: list[int], positions: list[int], ask: list[Ask], groups: list[int] | None = None,
        parents: list[int] | None = None,
    ) -> Step:
        """A causal step with this answer's sampling settings."""
        return Step(tokens, positions, ask, groups, False, kind, self._temperature, self._top_p, parents)
