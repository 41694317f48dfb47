"""The published algorithm once more (arXiv 2512.13586, section 3.2), slow and literal, at temperature 0.

No cache, no steps, no board: every prediction is made from its whole context. It differs from the
publication only where DESIGN section 5 says so: an end token drops what is behind it and nothing else,
tokens judged under a rejected draft are judged again, and an uncertain end token isn't the fallback
while earlier positions are open.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from refusion.decoding import DecodeConfig
from refusion.decoding.planner import Planner
from refusion.decoding.seen import Seen
from tests.decoding.fake import MASK, Cell, Predict, measured


@dataclass
class Chosen:
    positions: list[int]
    draft: list[int]
    fixed: int = 0


@dataclass
class Published:
    predict: Predict
    prompt: Sequence[int]
    config: DecodeConfig
    ends: Collection[int]
    text: dict[int, int] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    def run(self) -> list[int]:
        self.storage: list[Cell] = list(enumerate(self.prompt))
        self.target = self.config.max_tokens
        k, b = self.config.slot_size, self.config.block_size
        self.starts: list[int] = []
        for begin in range(0, self.config.max_tokens, b):
            block = range(begin, min(begin + b, self.config.max_tokens))
            slots = [list(block[at : at + k]) for at in range(0, len(block), k)]
            self.starts += [slot[0] for slot in slots]
            while open_slots := [kept for slot in slots if (kept := [p for p in slot if self.is_open(p)])]:
                self.round(open_slots)
        return [self.text[p] for p in range(self.target)]

    def is_open(self, position: int) -> bool:
        return position < self.target and position not in self.text

    def look(self, context: Sequence[Cell]) -> dict[int, float]:
        position, token = context[-1]
        return dict(self.predict(token, position, tuple(context)))

    def masked(self, before: Sequence[Cell], positions: Sequence[int]) -> list[tuple[int, dict[int, float]]]:
        """Every mask's best token and all probabilities; a mask sees those before it."""
        context, found = list(before), []
        for position in positions:
            context.append((len(self.prompt) + position, MASK))
            p = self.look(context)
            best = max(p, key=lambda t: (p[t], -t))
            found.append((best, p))
        return found

    def certainty(self, start: int, p: dict[int, float]) -> float:
        """Of a slot, from its first position and what its first mask says."""
        planner = self.config.planner
        if planner in ("margin", "entropy"):
            return measured(p, planner)
        if planner == "random":
            return Planner(self.config).certainty(self.starts.index(start), Seen(0, 0.0, 0.0, 0, 0.0, 0.0))
        return max(p.values())

    def valid(self, before: Sequence[Cell], slot: Chosen) -> int:
        """How many draft tokens hold: the first always, what was fixed, then all above the threshold."""
        cells = self.cells(slot)
        for at in range(max(slot.fixed, 1), len(cells)):
            if not self.look([*before, *cells[:at]]).get(slot.draft[at], 0.0) > self.config.token_threshold:
                return at
        return len(cells)

    def cells(self, slot: Chosen) -> list[Cell]:
        return [(len(self.prompt) + p, t) for p, t in zip(slot.positions, slot.draft, strict=False)]

    def cut(self, draft: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(draft) if token in self.ends]
        return draft[: ends[0] + 1] if ends else draft

    def round(self, slots: list[list[int]]) -> None:
        self.kinds.append("plan" if self.kinds or not self.prompt else "prompt")
        said = iter(self.masked(self.storage, [p for slot in slots for p in slot]))
        planned = [(slot, [next(said) for _ in slot]) for slot in slots]
        sure = {s[0]: self.certainty(s[0], d[0][1]) for s, d in planned}
        chosen = [(s, d) for s, d in planned if sure[s[0]] > self.config.slot_threshold]
        if not chosen:
            sound = [pair for pair in planned if pair is planned[0] or pair[1][0][0] not in self.ends]
            chosen = [max(sound, key=lambda pair: sure[pair[0][0]])]
        if self.config.planner == "left-to-right":
            chosen = planned[:1]
        drafts = [Chosen(slot, self.cut([token for token, _ in draft])) for slot, draft in chosen]

        self.kinds.append("verify")
        before = list(self.storage)
        whole: list[Chosen] = []
        for slot in drafts:
            slot.fixed = self.valid(before, slot)
            if slot.fixed < len(slot.draft):
                break
            whole.append(slot)
            before += self.cells(slot)
        self.commit(whole if whole else self.complete(drafts))

    def complete(self, drafts: list[Chosen]) -> list[Chosen]:
        if len(drafts) > 1:
            self.kinds.append("completion")
            drafts = self.judged(drafts)
        while any(slot.fixed < len(slot.draft) for slot in drafts):
            self.kinds += ["completion", "completion"]
            for slot in drafts:
                if slot.fixed < len(slot.draft):
                    kept = slot.draft[: slot.fixed]
                    before = [*self.storage, *self.cells(Chosen(slot.positions, kept))]
                    fresh = self.masked(before, slot.positions[slot.fixed :])
                    slot.draft = self.cut(kept + [token for token, _ in fresh])
                    slot.fixed += 1
            drafts = self.judged(drafts)
        return drafts

    def judged(self, drafts: list[Chosen]) -> list[Chosen]:
        """Each slot behind the committed prefix alone; slots behind a valid end token are no longer wanted."""
        for slot in drafts:
            slot.fixed = self.valid(self.storage, slot)
        for number, slot in enumerate(drafts):
            if slot.fixed == len(slot.draft) and slot.draft[-1] in self.ends:
                return drafts[: number + 1]
        return drafts

    def commit(self, slots: list[Chosen]) -> None:
        for slot in slots:
            self.storage += self.cells(slot)
            self.text.update(zip(slot.positions, slot.draft, strict=False))
            if slot.draft[-1] in self.ends:
                self.target = min(self.target, slot.positions[len(slot.draft) - 1] + 1)
                break
        self.text = {p: t for p, t in self.text.items() if p < self.target}
