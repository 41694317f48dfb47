"""What the default decoder works with: slots under way, what a pass feeds of them, and branches."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Slot:
    """A slot under way. Its decided tokens are a prefix, since it is verified from left to right.

    known: positions decided; cached: those whose cells are committed; known - cached is 0 or 1
    between passes. drafts: proposed (token, probability) for the positions from `known` on.
    certainty: the planner's word on its first mask when that was planned last.
    stale: its drafts were made behind a rejected token.
    """

    positions: range
    index: int
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    drafts: list[tuple[int, float]] = field(default_factory=list)
    certainty: float = 0.0
    stale: bool = False

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def next_position(self) -> int:
        return self.positions.start + self.known


@dataclass
class Piece:
    """What a pass feeds of one slot: cells from `first` on, the first `fixed` of them decided tokens.

    follows: a draft begins the slot, right behind the last position of the piece before; then: that
    draft's first token, for the piece before.
    """

    slot: Slot
    first: int
    fixed: int
    tokens: list[int]
    follows: bool = False
    then: int | None = None

    @property
    def start(self) -> int:
        """Its first position, before it is judged."""
        return self.slot.positions.start + self.slot.cached

    @property
    def stop(self) -> int:
        """The position behind its last one, before it is judged."""
        return self.start + len(self.tokens)


@dataclass
class Branch:
    """Masks that hang on a fed cell, for the case that the draft token behind it is rejected.

    cell: the fed cell. masks: (slot, position) from the rejected position on. begin: the first mask's cell.
    """

    cell: int
    masks: list[tuple[Slot, int]]
    begin: int = 0
