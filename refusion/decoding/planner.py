"""How sure a plan is of a slot: what decides which slots are written before their turn.

Whether the diffusion plan is needed at all is asked by exchanging this part and nothing else.
"""

from __future__ import annotations

import random

from refusion.decoding.config import DecodeConfig
from refusion.decoding.seen import Seen

MEASURES = ("margin", "entropy")


class Planner:
    """A slot's certainty, in [0, 1], from what was read at its first mask.

    measure: what an ask at a slot's first mask has to name (Ask.certainty), or None.
    in_order: slots are taken from left to right only, however certain others are.
    """

    def __init__(self, config: DecodeConfig) -> None:
        self._seed, self._random = config.seed, config.planner == "random"
        self.measure = config.planner if config.planner in MEASURES else None
        self.in_order = config.planner == "left-to-right"

    def certainty(self, slot: int, seen: Seen) -> float:
        """slot: its index in the answer. seen: at its first mask."""
        if self._random:
            return random.Random(f"refusion/planner/{self._seed}/{slot}").random()
        return seen.best_probability if self.measure is None else seen.certainty
