"""The default decoder: one fused pass verifies drafts and plans the next ones.

A pass feeds, in this order: tokens decided but not yet cached, the drafts being verified, and
masks for open positions. Causality leaves the verification unchanged by the masks behind it,
and where every draft holds, the masks' predictions are the next drafts (DESIGN section 5,
ideas 1 to 6). A pass fixes at least one token where the text goes on from the left, since the
verifier also names the token behind what it accepted; the one exception is a plan right behind
a slot that was finished early, whose tokens more than pay for it. So the number of passes
never exceeds left-to-right decoding's, whatever the drafts are worth.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from refusion.decoding.board import Board
from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Algorithm, Answer, Ask, Event, Reading, Row, Step
from refusion.decoding.draw import Draws
from refusion.slots import blocks

Passes = Generator[Step | Event, Reading | None, None]


@dataclass
class Slot:
    """A slot under way. Its decided tokens are a prefix, since it is verified from left to right.

    known: positions decided; cached: those whose cells are committed; known - cached is 0 or 1
    between passes. drafts: proposed (token, probability) for the positions from `known` on.
    certainty: probability of its first mask's best token when that was planned last.
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
    def stop(self) -> int:
        """The position behind its last one, before it is judged."""
        return self.slot.positions.start + self.slot.cached + len(self.tokens)


@dataclass
class Branch:
    """Masks that hang on a fed cell, for the case that the draft token behind it is rejected.

    cell: the fed cell, counted from the first piece's. masks: (slot, position) from the rejected
    position on. ask: index of the first mask's ask.
    """

    cell: int
    masks: list[tuple[Slot, int]]
    ask: int = 0


def refusion(row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int) -> Algorithm:
    """Fills the blocks in turn until the text is complete."""
    decoder = _Decoder(row, prompt, config, board, mask_id)
    yield from decoder.run()
    return Answer(board.tokens(), board.finish_reason)


class _Decoder:
    def __init__(self, row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int) -> None:
        self.row, self.prompt, self.config, self.board, self.mask_id = row, prompt, config, board, mask_id
        self.draws, self.offset = Draws(config), len(prompt)
        self._exact = config.acceptance == "speculative"
        plan = blocks(board.length, config.block_size, config.slot_size)
        parts = [part for block in plan for part in block]
        self.slots = [Slot(part, index) for index, part in enumerate(parts)]
        self.block_of = [number for number, block in enumerate(plan) for _ in block]

    def run(self) -> Passes:
        first = True
        while not self.board.complete:
            active = self._active()
            pieces = self._pieces(active)
            masks = self._masks(active, pieces)
            yield from self._pass(pieces, masks, self._branches(active, pieces), first)
            first = False

    # what to feed

    def _active(self) -> list[Slot]:
        """Unfinished slots up to the current block, and those of the next one, which only masks may enter early."""
        open_slots = [s for s in self.slots if s.positions.start < self.board.length and self._open(s)]
        block = self.block_of[self._leftmost(open_slots).index]
        return [s for s in open_slots if self.block_of[s.index] <= block + 1]

    def _leftmost(self, slots: list[Slot]) -> Slot:
        """Where the text goes on; its block is the current one."""
        return next(s for s in slots if self._room(s) > 0)

    def _open(self, slot: Slot) -> bool:
        return self._room(slot) > 0 or slot.cached < slot.known

    def _room(self, slot: Slot) -> int:
        """Positions of a slot that are still to be decided."""
        return min(slot.positions.stop, self.board.length) - slot.next_position

    def _pieces(self, active: list[Slot]) -> list[Piece]:
        """Slots to verify: the leftmost, those with a decided token to feed, and those certain enough."""
        pieces: list[Piece] = []
        cell, blocked = 0, False
        leftmost = self._leftmost(active)
        block = self.block_of[leftmost.index]
        for slot in active:
            waiting = slot.tokens[slot.cached :]
            follows = slot.known == 0 and bool(pieces) and pieces[-1].stop == slot.positions.start
            if slot is leftmost:
                # where no cell can judge its first token, a stale plan doesn't vouch for it either
                chosen = slot.known > 0 or follows or not slot.stale
            else:
                certain = self.block_of[slot.index] == block and slot.certainty > self.config.slot_threshold
                chosen = slot.known > 0 or certain
            drafts = self._confident(slot) if chosen and not blocked else []
            # a leftmost slot without a draft gets a plan that no rejected token can spoil
            blocked = blocked or (slot is leftmost and not waiting and not drafts)
            if waiting or drafts:
                tokens = waiting + [token for token, _ in drafts]
                if follows:
                    pieces[-1].then = tokens[0]
                pieces.append(Piece(slot, cell, len(waiting), tokens, follows))
                cell += len(tokens)
        return pieces

    def _confident(self, slot: Slot) -> list[tuple[int, float]]:
        """A slot's draft up to its end, its first end token or its first token below draft_threshold."""
        found: list[tuple[int, float]] = []
        for token, probability in slot.drafts[: max(self._room(slot), 0)]:
            unjudged = not found and slot.known == 0
            if probability < self.config.draft_threshold and not unjudged:
                break
            found.append((token, probability))
            if self.board.is_end(token):
                break
        return found

    def _masks(self, active: list[Slot], pieces: list[Piece]) -> list[tuple[Slot, int]]:
        """Open positions that this pass doesn't verify, by position: the next block's as far as plan_size allows."""
        fed = {id(p.slot): p for p in pieces}
        masks: list[tuple[Slot, int]] = []
        for slot in active:
            piece = fed.get(id(slot))
            drafted = len(piece.tokens) - piece.fixed if piece else 0
            masks += [(slot, slot.next_position + n) for n in range(drafted, self._room(slot))]
        return masks[: self.config.plan_size]

    def _branches(self, active: list[Slot], pieces: list[Piece]) -> list[Branch]:
        """A branch for every judged draft token that is likely enough to be the first rejected."""
        if not self.config.branch_size:
            return []
        branches: list[Branch] = []
        holds = 1.0
        for piece in pieces:
            for n in range(piece.fixed, len(piece.tokens)):
                probability = piece.slot.drafts[n - piece.fixed][1]
                cell = piece.first + n - 1
                judged = n > 0 or piece.follows
                if judged and holds * (1 - probability) >= self.config.branch_threshold:
                    position = piece.stop - len(piece.tokens) + n
                    branches.append(Branch(cell, self._open_from(active, position)))
                holds *= probability
        return branches

    def _open_from(self, active: list[Slot], position: int) -> list[tuple[Slot, int]]:
        """The next undecided positions from one on, with their slots."""
        masks = [
            (slot, at)
            for slot in active
            for at in range(max(slot.next_position, position), slot.next_position + max(self._room(slot), 0))
        ]
        return masks[: self.config.branch_size]

    # one pass

    def _pass(
        self, pieces: list[Piece], masks: list[tuple[Slot, int]], branches: list[Branch], first: bool
    ) -> Passes:
        lead = len(self.prompt) if first else 0
        tokens = list(self.prompt) if first else []
        positions = list(range(lead))
        for piece in pieces:
            tokens += piece.tokens
            positions += range(self.offset + piece.stop - len(piece.tokens), self.offset + piece.stop)
        fed = len(tokens)
        tokens += [self.mask_id] * len(masks)
        positions += [self.offset + at for _, at in masks]
        parents = self._plant(branches, tokens, positions, lead) if branches else None

        asks = [self.draws.ask(lead - 1)] if lead else []
        for piece in pieces:
            asks += self._asks(piece, lead)
        begin = len(asks)
        for branch in branches:
            branch.ask += begin - fed
        asks += [Ask(cell) if self._exact else self.draws.ask(cell) for cell in range(fed, len(tokens))]
        kind = "prompt" if lead else ("fused" if masks else "verify") if pieces else "plan"
        reading = yield self.draws.step(kind, tokens, positions, asks, parents=parents)
        assert reading is not None

        if lead:
            yield from self._go_on(0, reading, 0)
        accepted = lead + (yield from self._judge_all(pieces, reading, 1 if lead else 0))
        self.row.commit(range(accepted))
        yield from self._replan(masks, reading, begin, accepted == fed)
        for branch in branches:
            if accepted < fed and branch.cell == accepted - lead - 1:
                yield from self._replan(branch.masks, reading, branch.ask, True)

    def _plant(self, branches: list[Branch], tokens: list[int], positions: list[int], lead: int) -> list[int]:
        """Adds the branches' masks to a pass; returns every cell's parent and notes where each branch begins."""
        parents = list(range(-1, len(tokens) - 1))
        for branch in branches:
            branch.ask = len(tokens)
            parents += [lead + branch.cell, *range(len(tokens), len(tokens) + len(branch.masks) - 1)]
            tokens += [self.mask_id] * len(branch.masks)
            positions += [self.offset + at for _, at in branch.masks]
        return parents

    def _asks(self, piece: Piece, lead: int) -> list[Ask]:
        """Every fed cell names the next token; where a draft follows, its probability too."""
        following = [*piece.tokens[1:], piece.then]
        return [self.draws.ask(lead + piece.first + n, given=token) for n, token in enumerate(following)]

    def _judge_all(
        self, pieces: list[Piece], reading: Reading, at: int
    ) -> Generator[Step | Event, Reading | None, int]:
        """Accepts pieces up to the first rejected token; returns how many cells hold.

        at: index of the first piece's first ask.
        """
        accepted, whole = 0, True
        for piece in pieces:
            if not whole:
                self._discount(piece.slot)
                continue
            count, whole = yield from self._judge(piece, reading, at)
            accepted += count
            at += len(piece.tokens)
            if whole and piece.then is None:
                yield from self._go_on(piece.slot.next_position, reading, at - 1)
        return accepted

    def _judge(
        self, piece: Piece, reading: Reading, at: int
    ) -> Generator[Step | Event, Reading | None, tuple[int, bool]]:
        """Accepts a prefix of a piece; returns its cells and whether what follows it may be judged.

        at: index of the piece's first ask.
        """
        slot = piece.slot
        slot.cached += piece.fixed
        slot.drafts = slot.drafts[: len(piece.tokens) - piece.fixed]
        for n in range(piece.fixed, len(piece.tokens)):
            token, judge = piece.tokens[n], at + n - 1
            # a first token that has no cell before it in the text can't be judged: the plan vouches for it
            judged = n > 0 or (piece.follows and slot.positions.start == self.board.contiguous)
            probability = reading.given_probability[judge] if judged else slot.drafts[0][1]
            if judged and not self._accepts(token, probability, reading, judge):
                yield Event("rejected", range(slot.next_position, slot.next_position + len(slot.drafts)),
                            [t for t, _ in slot.drafts], [p for _, p in slot.drafts], slot.index)
                self._discount(slot)
                yield from self._decide(slot, reading.sample[judge], reading.sample_probability[judge])
                return n, False
            slot.cached += 1
            yield from self._decide(slot, token, probability)
            if self.board.is_end(token) or self.board.complete:
                return n + 1, False
        return len(piece.tokens), True

    def _discount(self, slot: Slot) -> None:
        """What was verified behind a rejected token is a stale draft, and the slot must prove itself again."""
        factor = self.config.stale_factor
        slot.certainty *= factor
        slot.stale = True
        slot.drafts = [(token, p * factor) for token, p in slot.drafts] if factor else []

    def _accepts(self, token: int, probability: float, reading: Reading, judge: int) -> bool:
        # a draft that is a fixed guess is kept with the probability p(draft), and a rejected one is replaced by a
        # draw from p without it: both are done by drawing once from p (arXiv 2211.17192 with a one-point proposal)
        if token == (reading.sample if self._exact else reading.best)[judge]:
            return True
        return self.config.acceptance == "threshold" and probability > self.config.token_threshold

    def _go_on(self, position: int, reading: Reading, ask: int) -> Passes:
        """The token behind an accepted prefix comes free: inside its slot, or where the text goes on from the left."""
        slot = next((s for s in self.slots if position in s.positions), None)
        if slot is None or position != slot.next_position:
            return
        if position == slot.positions.start and position != self.board.contiguous:
            return
        yield from self._decide(slot, reading.sample[ask], reading.sample_probability[ask])

    def _decide(self, slot: Slot, token: int, probability: float) -> Passes:
        position = slot.next_position
        if self.board.decide(position, token):
            slot.tokens.append(token)
            slot.drafts = slot.drafts[1:]
            yield Event("committed", (position,), (token,), (probability,), slot.index)

    def _replan(self, masks: list[tuple[Slot, int]], reading: Reading, begin: int, whole: bool) -> Passes:
        """Takes the masks' predictions as drafts: in full where all before them held, discounted where not."""
        factor = 1.0 if whole else self.config.stale_factor
        by_slot: dict[int, list[tuple[int, int]]] = {}
        for n, (slot, position) in enumerate(masks):
            if position < self.board.length:
                by_slot.setdefault(slot.index, []).append((position, begin + n))
        for index, entries in by_slot.items():
            slot, (first, ask) = self.slots[index], entries[0]
            if first == slot.positions.start:
                slot.certainty, slot.stale = reading.best_probability[ask] * factor, not whole
            # what was masked is drafted anew, behind what was fed and is stale now
            slot.drafts = slot.drafts[: max(first - slot.next_position, 0)]
            fresh = [ask for position, ask in entries if position >= slot.next_position]
            if fresh and factor:
                token, chance = reading.sample, reading.sample_probability
                if self._exact:
                    token, chance = reading.best, reading.best_probability
                slot.drafts += [(token[ask], chance[ask] * factor) for ask in fresh]
                yield Event("draft", range(slot.next_position, slot.next_position + len(slot.drafts)),
                            [t for t, _ in slot.drafts], [p for _, p in slot.drafts], index)
