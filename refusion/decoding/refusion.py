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

from collections.abc import Container, Generator, Mapping, Sequence

from refusion.decoding.board import Board
from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Algorithm, Answer, Ask, Event, Reading, Row, Step
from refusion.decoding.draw import Draws
from refusion.decoding.parts import Branch, Piece, Slot
from refusion.decoding.planner import Planner
from refusion.decoding.seen import Seen, by_cell
from refusion.slots import blocks

Passes = Generator[Step | Event, Reading | None, None]


def refusion(
    row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int, draws: Draws
) -> Algorithm:
    """Fills the blocks in turn until the text is complete."""
    decoder = _Decoder(row, prompt, config, board, mask_id, draws)
    yield from decoder.run()
    return Answer(board.tokens(), board.finish_reason)


class _Decoder:
    def __init__(
        self, row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int, draws: Draws
    ) -> None:
        self.row, self.prompt, self.config, self.board, self.mask_id = row, prompt, config, board, mask_id
        self.draws, self.planner, self.offset = draws, Planner(config), len(prompt)
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
            masks, branches = self._plan(active, pieces, first)
            yield from self._pass(pieces, masks, branches, first)
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
                chosen = bool(waiting) or follows or not slot.stale
            elif slot.known > 0:
                chosen = bool(waiting) or not slot.stale
            else:
                certain = self.block_of[slot.index] == block and slot.certainty > self.config.slot_threshold
                chosen = certain and (follows or not self.planner.in_order)
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
            unjudged = not found and slot.cached == slot.known
            if probability < self.config.draft_threshold and not unjudged:
                break
            found.append((token, probability))
            if self.board.is_end(token):
                break
        return found

    def _plan(
        self, active: list[Slot], pieces: list[Piece], first: bool
    ) -> tuple[list[tuple[Slot, int]], list[Branch]]:
        """Masks and branches to feed beside the pieces, where the settings let one pass do both."""
        verifies = any(len(piece.tokens) > piece.fixed for piece in pieces)
        if (first and not self.config.prompt_plan) or (verifies and not self.config.fused_pass):
            return [], []
        return self._masks(active, pieces), self._branches(active, pieces)

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
        parents = self._plant(branches, tokens, positions) if branches else None

        asks = self._asks(pieces, masks, branches, lead, fed)
        kind = "prompt" if lead else ("fused" if masks else "verify") if pieces else "plan"
        reading = yield self.draws.step(kind, tokens, positions, asks, parents=parents)
        assert reading is not None
        seen = by_cell(asks, reading)

        if lead and self.config.bonus_token:
            yield from self._go_on(0, seen, lead - 1)
        accepted = lead + (yield from self._judge_all(pieces, seen))
        self.row.commit(range(accepted))
        yield from self._replan(masks, seen, fed, accepted == fed)
        for branch in branches:
            if accepted < fed and branch.cell == accepted - 1:
                yield from self._replan(branch.masks, seen, branch.begin, True)

    def _plant(self, branches: list[Branch], tokens: list[int], positions: list[int]) -> list[int]:
        """Adds the branches' masks to a pass; returns every cell's parent and notes where each branch begins."""
        parents = list(range(-1, len(tokens) - 1))
        for branch in branches:
            branch.begin = len(tokens)
            parents += [branch.cell, *range(len(tokens), len(tokens) + len(branch.masks) - 1)]
            tokens += [self.mask_id] * len(branch.masks)
            positions += [self.offset + at for _, at in branch.masks]
        return parents

    # what to read

    def _asks(
        self, pieces: list[Piece], masks: list[tuple[Slot, int]], branches: list[Branch], lead: int, fed: int
    ) -> list[Ask]:
        """Every cell whose reading may be used, in the cells' order."""
        ends, bonus = self._ends(pieces), self.config.bonus_token
        asks = [self.draws.ask(lead - 1)] if lead and bonus else []
        for piece, used in zip(pieces, ends, strict=True):
            asks += self._piece_asks(piece, used)
        judging = {ask.cell for ask in asks} if bonus else set()
        free = ([0] if lead else self._sure(pieces, ends)) if bonus else []
        asks += self._mask_asks(masks, fed, free)
        for branch in branches:
            # what was rejected is replaced by the verifier's own token; what can't be rejected needs no plan
            known = [branch.masks[0][1]] if branch.cell in judging else [at for _, at in branch.masks] if bonus else []
            asks += self._mask_asks(branch.masks, branch.begin, known)
        return asks

    def _ends(self, pieces: list[Piece]) -> list[bool]:
        """Of each piece, whether its last cell's reading may be used, once all up to there hold.

        It judges the draft that begins the next slot, where the text goes on from the left, or it
        gives a free token there or inside the slot. Nothing follows an end token.
        """
        bonus = self.config.bonus_token
        held: set[int] = set()
        reach = self.board.contiguous
        ends: list[bool] = []
        for piece in pieces:
            held.update(range(piece.start, piece.stop))
            while reach in held or reach in self.board:
                reach += 1
            open_ended = piece.stop < piece.slot.positions.stop or piece.stop == reach
            wanted = open_ended and (bonus or piece.then is not None)
            ends.append(wanted and piece.stop < self.board.length and not self.board.is_end(piece.tokens[-1]))
            if ends[-1] and bonus:
                held.add(piece.stop)
        return ends

    def _sure(self, pieces: list[Piece], ends: list[bool]) -> list[int]:
        """Positions that get a free token in any case: behind the first pieces, as long as these hold no draft."""
        sure: list[int] = []
        for piece, used in zip(pieces, ends, strict=True):
            if len(piece.tokens) > piece.fixed:
                break
            if used and piece.then is None:
                sure.append(piece.stop)
        return sure

    def _piece_asks(self, piece: Piece, used: bool) -> list[Ask]:
        """Every cell names the next token, the last one if it is of use; where a draft follows, its probability too."""
        asks = [self.draws.ask(piece.first + n, given=token) for n, token in enumerate(piece.tokens[1:])]
        if used:
            return [*asks, self.draws.ask(piece.first + len(asks), given=piece.then)]
        self.draws.skip()
        return asks

    def _mask_asks(self, masks: list[tuple[Slot, int]], begin: int, known: Container[int]) -> list[Ask]:
        """A draft for every mask but those whose token will be known; the planner's measure at slots' first ones."""
        asks: list[Ask] = []
        for cell, (slot, at) in enumerate(masks, begin):
            measure = self.planner.measure if at == slot.positions.start else None
            # speculative acceptance draws at the verifier's cells only
            ask = Ask(cell, certainty=measure) if self._exact else self.draws.ask(cell, certainty=measure)
            if at not in known:
                asks.append(ask)
        return asks

    # what came of it

    def _judge_all(
        self, pieces: list[Piece], seen: Mapping[int, Seen]
    ) -> Generator[Step | Event, Reading | None, int]:
        """Accepts pieces up to the first rejected token; returns how many cells hold."""
        accepted, whole = 0, True
        for piece in pieces:
            if not whole:
                self._discount(piece.slot)
                continue
            count, whole = yield from self._judge(piece, seen)
            accepted += count
            if whole and piece.then is None and self.config.bonus_token:
                yield from self._go_on(piece.slot.next_position, seen, accepted - 1)
        return accepted

    def _judge(
        self, piece: Piece, seen: Mapping[int, Seen]
    ) -> Generator[Step | Event, Reading | None, tuple[int, bool]]:
        """Accepts a prefix of a piece; returns its cells and whether what follows it may be judged."""
        slot = piece.slot
        slot.cached += piece.fixed
        slot.drafts = slot.drafts[: len(piece.tokens) - piece.fixed]
        for n in range(piece.fixed, len(piece.tokens)):
            token, probability = piece.tokens[n], slot.drafts[0][1]
            # a first token that has no cell before it in the text can't be judged: the plan vouches for it
            if n > 0 or (piece.follows and slot.positions.start == self.board.contiguous):
                judge = seen[piece.first + n - 1]
                probability = judge.given_probability
                if not self._accepts(token, judge):
                    yield Event("rejected", range(slot.next_position, slot.next_position + len(slot.drafts)),
                                [t for t, _ in slot.drafts], [p for _, p in slot.drafts], slot.index)
                    self._discount(slot)
                    if self.config.bonus_token:
                        yield from self._decide(slot, judge.sample, judge.sample_probability)
                    else:
                        slot.drafts = []  # without a correction in its first place the rest follows on nothing
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

    def _accepts(self, token: int, judge: Seen) -> bool:
        # a draft that is a fixed guess is kept with the probability p(draft), and a rejected one is replaced by a
        # draw from p without it: both are done by drawing once from p (arXiv 2211.17192 with a one-point proposal)
        if token == (judge.sample if self._exact else judge.best):
            return True
        return self.config.acceptance == "threshold" and judge.given_probability > self.config.token_threshold

    def _go_on(self, position: int, seen: Mapping[int, Seen], cell: int) -> Passes:
        """The token behind an accepted prefix comes free: inside its slot, or where the text goes on from the left.

        cell: the prefix's last.
        """
        slot = next((s for s in self.slots if position in s.positions), None)
        if slot is None or position != slot.next_position or position >= self.board.length:
            return
        if position == slot.positions.start and position != self.board.contiguous:
            return
        yield from self._decide(slot, seen[cell].sample, seen[cell].sample_probability)

    def _decide(self, slot: Slot, token: int, probability: float) -> Passes:
        position = slot.next_position
        if self.board.decide(position, token):
            slot.tokens.append(token)
            slot.drafts = slot.drafts[1:]
            yield Event("committed", (position,), (token,), (probability,), slot.index)

    def _replan(self, masks: list[tuple[Slot, int]], seen: Mapping[int, Seen], begin: int, whole: bool) -> Passes:
        """Takes the masks' predictions as drafts: in full where all before them held, discounted where not.

        begin: the first mask's cell.
        """
        factor = 1.0 if whole else self.config.stale_factor
        by_slot: dict[int, list[tuple[int, int]]] = {}
        for cell, (slot, position) in enumerate(masks, begin):
            if position < self.board.length:
                by_slot.setdefault(slot.index, []).append((position, cell))
        for index, entries in by_slot.items():
            slot, (first, cell) = self.slots[index], entries[0]
            if first == slot.next_position == slot.positions.start:
                slot.certainty = self.planner.certainty(index, seen[cell]) * factor
            if first == slot.next_position:
                slot.stale = not whole
            # what was masked is drafted anew, behind what was fed and is stale now
            slot.drafts = slot.drafts[: max(first - slot.next_position, 0)]
            if len(slot.drafts) < first - slot.next_position:
                continue  # what lies between was dropped
            fresh = [seen[cell] for position, cell in entries if position >= slot.next_position]
            if fresh and factor:
                slot.drafts += [
                    (one.best, one.best_probability * factor) if self._exact
                    else (one.sample, one.sample_probability * factor) for one in fresh
                ]
                yield Event("draft", range(slot.next_position, slot.next_position + len(slot.drafts)),
                            [t for t, _ in slot.drafts], [p for _, p in slot.drafts], index)
