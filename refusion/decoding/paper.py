"""The published algorithm (arXiv 2512.13586, section 3.2 and algorithm 1): plan, verify, complete.

Passes per round: one plan (the first one within the prompt's pass), one verification; if not one
whole slot holds, the chosen slots are completed in parallel by turns of predicting their masked
rest and verifying it. Differences from the official code, all of them faults there: an end token
drops only what is behind it, tokens judged under a rejected draft are judged again, probabilities
are float32, any lengths work, and an uncertain end token isn't believed while earlier positions
are open.

One cost is the official code's and not the paper's, which joins the slots' keys and values without
computing any again: in a completion's verifications, slots that are full already are fed once more
until the slowest is full too, though nothing is read there. Committed cells are seen by every later
query of the row, while these slots must not see one another, so all of them are committed from the
last pass. That costs cells, never a pass, and changes no token.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from refusion.decoding.board import Board
from refusion.decoding.config import DecodeConfig
from refusion.decoding.contract import Algorithm, Answer, Ask, Event, Reading, Row, Step
from refusion.decoding.draw import Draws
from refusion.decoding.planner import Planner
from refusion.decoding.seen import by_cell
from refusion.slots import blocks

Passes = Generator[Step | Event, Reading | None, None]


@dataclass
class Draft:
    """A chosen slot: its open positions, proposed tokens, their probabilities and how many are valid.

    The proposal may end before the slot does, at an end token; while that one isn't valid, it may grow again.
    """

    room: list[int]
    tokens: list[int]
    probabilities: list[float]
    valid: int = 0
    index: int = 0

    @property
    def positions(self) -> list[int]:
        return self.room[: len(self.tokens)]

    @property
    def done(self) -> bool:
        return self.valid >= len(self.tokens)


def paper(
    row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int, draws: Draws
) -> Algorithm:
    """Block by block, as published."""
    decoder = _Paper(row, prompt, config, board, mask_id, draws)
    yield from decoder.run()
    return Answer(board.tokens(), board.finish_reason)


class _Paper:
    def __init__(
        self, row: Row, prompt: Sequence[int], config: DecodeConfig, board: Board, mask_id: int, draws: Draws
    ) -> None:
        self.row, self.prompt, self.config, self.board, self.mask_id = row, prompt, config, board, mask_id
        self.draws, self.planner, self.offset = draws, Planner(config), len(prompt)

    def run(self) -> Passes:
        plan = blocks(self.board.length, self.config.block_size, self.config.slot_size)
        first = 0
        for block in plan:
            while True:
                pending = [(n, p) for n, part in enumerate(block) if (p := self.board.pending(part))]
                if not pending:
                    break
                chosen = yield from self._plan(pending, first)
                accepted = yield from self._verify(chosen)
                if not accepted:
                    yield from self._complete(chosen)
            first += len(block)

    def _plan(
        self, pending: list[tuple[int, list[int]]], first: int
    ) -> Generator[Step | Event, Reading | None, list[Draft]]:
        """Masks at every open position; returns the chosen slots' drafts in position order.

        The first plan is made in the prompt's own pass. first: the answer's index of the block's first slot.
        """
        lead = 0 if self.row.committed else self.offset
        positions = [p for _, part in pending for p in part]
        begins = {part[0] for _, part in pending}
        tokens = [*self.prompt[:lead], *[self.mask_id] * len(positions)]
        asks = [
            self.draws.ask(cell, certainty=self.planner.measure if position in begins else None)
            for cell, position in enumerate(positions, lead)
        ]
        kind = "prompt" if lead else "plan"
        reading = yield self._step(kind, tokens, [*range(-lead, 0), *positions], asks)
        assert reading is not None
        self.row.commit(range(lead))
        seen = by_cell(asks, reading)
        drafts: list[Draft] = []
        certainties: list[float] = []
        cell = lead
        for index, part in pending:
            said = [seen[cell + n] for n in range(len(part))]
            tokens, sure = [one.sample for one in said], [one.sample_probability for one in said]
            drafts.append(self._cut(part, tokens, sure, index))
            certainties.append(self.planner.certainty(first + index, said[0]))
            cell += len(part)
        chosen = self._choose(drafts, certainties)
        for draft in chosen:
            yield Event("draft", draft.positions, draft.tokens, draft.probabilities, draft.index)
        return chosen

    def _choose(self, drafts: list[Draft], certainties: list[float]) -> list[Draft]:
        """The slots certain enough, else the best one; the leftmost alone where the planner keeps the order."""
        if self.planner.in_order:
            return drafts[:1]
        chosen = [d for d, c in zip(drafts, certainties, strict=True) if c > self.config.slot_threshold]
        if chosen:
            return chosen
        # an uncertain end token is believed only where everything before it is decided
        sound = [n for n, d in enumerate(drafts) if n == 0 or not self.board.is_end(d.tokens[0])]
        return [drafts[max(sound, key=lambda n: certainties[n])]]

    def _cut(self, room: list[int], tokens: list[int], probabilities: list[float], index: int) -> Draft:
        """A draft up to its first end token: what stands behind it isn't part of the text."""
        stop = next((at + 1 for at, token in enumerate(tokens) if self.board.is_end(token)), len(tokens))
        return Draft(room, tokens[:stop], probabilities[:stop], index=index)

    def _verify(self, chosen: list[Draft]) -> Generator[Step | Event, Reading | None, bool]:
        """All drafts in one causal sequence; commits the whole slots inside the accepted prefix.

        Also sets the first slot's valid count, which is judged under no rejected draft.
        """
        tokens = [t for d in chosen for t in d.tokens]
        positions = [p for d in chosen for p in d.positions]
        asks, spans = self._judging(chosen)
        reading = yield self._step("verify", tokens, positions, asks)
        assert reading is not None
        whole = 0
        for draft, span in zip(chosen, spans, strict=True):
            draft.valid = self._prefix(draft, reading.given_probability[span])
            if not draft.done:
                break
            whole += 1
        for draft in chosen[whole:]:
            yield Event("rejected", draft.positions[draft.valid :], draft.tokens[draft.valid :], slot=draft.index)
        yield from self._keep(chosen[:whole])
        return whole > 0

    def _judging(self, drafts: list[Draft]) -> tuple[list[Ask], list[slice]]:
        """Asks for each draft token from the cell before it, but for those valid already and a slot's first one.

        The latter is never judged.
        """
        asks: list[Ask] = []
        spans, cell = [], 0
        for draft in drafts:
            begin = len(asks)
            judged = range(max(draft.valid, 1), len(draft.tokens))
            asks += [Ask(cell + at - 1, given=draft.tokens[at]) for at in judged]
            spans.append(slice(begin, len(asks)))
            cell += len(draft.tokens)
        return asks, spans

    def _prefix(self, draft: Draft, probabilities: Sequence[float]) -> int:
        """Tokens before the first whose probability given all before it is too low; what was valid stays so."""
        for at, probability in enumerate(probabilities, max(draft.valid, 1)):
            if not probability > self.config.token_threshold:
                return at
        return len(draft.tokens)

    def _complete(self, chosen: list[Draft]) -> Passes:
        """Chosen slots side by side, each seeing the committed prefix and itself only, until all are full.

        The first slot was judged by the verification; the others were judged behind a rejected
        draft and are judged again. Every turn fixes one more token of each open slot at least.
        """
        if len(chosen) > 1:
            yield from self._judge_apart(chosen)
            chosen = self._up_to_end(chosen)
        while not all(draft.done for draft in chosen):
            yield from self._redraft([draft for draft in chosen if not draft.done])
            yield from self._judge_apart(chosen)
            chosen = self._up_to_end(chosen)
        yield from self._keep(chosen)

    def _up_to_end(self, drafts: list[Draft]) -> list[Draft]:
        """The slots up to the first whose valid tokens end the text."""
        ends = (n + 1 for n, draft in enumerate(drafts) if draft.done and self.board.is_end(draft.tokens[-1]))
        return drafts[: next(ends, len(drafts))]

    def _judge_apart(self, drafts: list[Draft]) -> Passes:
        """One verification with a group per slot; its cells are the ones to commit at the end."""
        asks, spans = self._judging(drafts)
        groups = [n for n, d in enumerate(drafts) for _ in d.tokens]
        tokens = [t for d in drafts for t in d.tokens]
        positions = [p for d in drafts for p in d.positions]
        reading = yield self._step("completion", tokens, positions, asks, groups)
        assert reading is not None
        for draft, span in zip(drafts, spans, strict=True):
            draft.valid = self._prefix(draft, reading.given_probability[span])

    def _redraft(self, drafts: list[Draft]) -> Passes:
        """Valid prefixes followed by masks, a group per slot: new drafts for every rest, the first token forced."""
        tokens: list[int] = []
        positions: list[int] = []
        groups: list[int] = []
        asks: list[Ask] = []
        for number, draft in enumerate(drafts):
            rest = len(draft.room) - draft.valid
            asks += map(self.draws.ask, range(len(tokens) + draft.valid, len(tokens) + len(draft.room)))
            tokens += [*draft.tokens[: draft.valid], *[self.mask_id] * rest]
            positions += draft.room
            groups += [number] * len(draft.room)
        reading = yield self._step("completion", tokens, positions, asks, groups)
        assert reading is not None
        at = 0
        for draft in drafts:
            rest = len(draft.room) - draft.valid
            span = slice(at, at + rest)
            fresh = self._cut(
                draft.room,
                [*draft.tokens[: draft.valid], *reading.sample[span]],
                [*draft.probabilities[: draft.valid], *reading.sample_probability[span]],
                draft.index,
            )
            draft.tokens, draft.probabilities = fresh.tokens, fresh.probabilities
            draft.valid += 1
            at += rest
            yield Event("draft", draft.positions, draft.tokens, draft.probabilities, draft.index)

    def _keep(self, drafts: list[Draft]) -> Passes:
        """Commits the first slots of the last step, in position order, as far as the text goes."""
        drafts = self._up_to_end(drafts)
        self.row.commit(range(sum(len(draft.tokens) for draft in drafts)))
        for draft in drafts:
            kept = sum(self.board.decide(p, t) for p, t in zip(draft.positions, draft.tokens, strict=True))
            if kept:
                positions, tokens, sure = draft.positions[:kept], draft.tokens[:kept], draft.probabilities[:kept]
                yield Event("committed", positions, tokens, sure, draft.index)

    def _step(
        self, kind: str, tokens: list[int], positions: list[int], asks: list[Ask], groups: list[int] | None = None
    ) -> Step:
        """A step at answer positions."""
        return self.draws.step(kind, tokens, [self.offset + p for p in positions], asks, groups)
