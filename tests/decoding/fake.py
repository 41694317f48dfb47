"""A scripted engine: runs one algorithm without a model and holds it to the contract.

Written from DESIGN sections 4 and 5 alone; nothing here calls the real engine, cache or visibility.
A scripted model is a function predict(query token, query position, visible cells in storage order,
the query's own last among its step's) -> {token: probability}.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion.decoding import DecodeConfig, algorithm
from refusion.decoding.contract import Algorithm, Answer, Ask, Event, Reading, Row, Step

Cell = tuple[int, int]
"""(true position, token)"""
Context = tuple[Cell, ...]
Predict = Callable[[int, int, Context], Mapping[int, float]]

MASK, END = 99, 90
PROMPT = (70, 71, 72)
UNDRAWN = -7
"""What stands for a sample nobody asked for at temperature > 0: it must never reach the text."""
KINDS = {"prompt", "plan", "verify", "completion", "fused", "next"}


def visible(
    count: int, groups: Sequence[int] | None, bidirectional: bool, query: int, parents: Sequence[int] | None = None
) -> list[int]:
    """Cells of the step that a query sees."""
    if parents is not None:
        line = [query]
        while parents[line[0]] >= 0:
            assert parents[line[0]] < line[0], "a parent that comes later"
            line.insert(0, parents[line[0]])
        return line
    return [
        other for other in range(count)
        if (groups is None or groups[other] == groups[query]) and (bidirectional or other <= query)
    ]


def quantile(probabilities: Mapping[int, float], temperature: float, top_p: float, uniform: float) -> int:
    """The token at a quantile of the sharpened distribution, likeliest first, cut to the nucleus."""
    sharp = {token: p ** (1 / temperature) for token, p in probabilities.items() if p > 0}
    total = sum(sharp.values())
    ordered = sorted(((p / total, token) for token, p in sharp.items()), key=lambda item: (-item[0], item[1]))
    nucleus: list[Cell] = []
    mass = 0.0
    for p, token in ordered:
        if mass >= top_p:
            break
        nucleus.append((token, p))  # type: ignore[arg-type]
        mass += p
    at, target = 0.0, uniform * mass
    for token, p in nucleus:
        at += p
        if target < at:
            return token
    return nucleus[-1][0]


def measured(probabilities: Mapping[int, float], name: str) -> float:
    """A measure of certainty, by definition."""
    ordered = sorted(probabilities.values(), reverse=True)
    if name == "margin":
        return ordered[0] - (ordered[1] if len(ordered) > 1 else 0.0)
    assert name == "entropy"
    return math.exp(sum(p * math.log(p) for p in ordered if p > 0))


@dataclass
class Pass:
    """One step as it was asked for; positions are the answer's, so prompt cells are negative."""

    kind: str
    tokens: list[int]
    positions: list[int]
    groups: list[int] | None
    asks: list[Ask]
    committed: list[int] = field(default_factory=list)

    @property
    def fed(self) -> list[Cell]:
        """Answer cells that aren't masks."""
        return [(p, t) for p, t in zip(self.positions, self.tokens, strict=True) if t != MASK and p >= 0]

    @property
    def masks(self) -> list[int]:
        return [p for p, t in zip(self.positions, self.tokens, strict=True) if t == MASK]


class FakeRow:
    def __init__(self) -> None:
        self.cells: list[tuple[Cell, Context]] = []
        self.offered: list[tuple[Cell, Context]] | None = None
        self.chosen: list[int] | None = None

    @property
    def committed(self) -> int:
        return len(self.cells)

    def commit(self, cells: Sequence[int]) -> None:
        assert self.offered is not None, "a commit before any step"
        assert self.chosen is None, "two commits after one step"
        self.chosen = list(cells)
        assert all(0 <= cell < len(self.offered) for cell in self.chosen), "a cell that was never fed"
        assert len(set(self.chosen)) == len(self.chosen), "a cell committed twice"

    def settle(self) -> list[int]:
        """Commits take effect: right before the next step."""
        chosen, offered = self.chosen or [], self.offered or []
        self.cells += [offered[cell] for cell in chosen]
        self.offered = self.chosen = None
        return chosen


@dataclass
class Run:
    """All that happened."""

    answer: Answer
    passes: list[Pass]
    events: list[Event]
    cells: list[tuple[Cell, Context]]
    prompt: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return self.answer.tokens

    @property
    def kinds(self) -> list[str]:
        return [p.kind for p in self.passes]

    @property
    def count(self) -> Counter[str]:
        return Counter(self.kinds)

    @property
    def forwards(self) -> int:
        return sum(p.kind != "prompt" for p in self.passes)


class FakeEngine:
    """Answers one algorithm's steps from a scripted model."""

    def __init__(self, predict: Predict, prompt: Sequence[int], config: DecodeConfig) -> None:
        self.predict, self.prompt, self.config = predict, tuple(prompt), config
        self.row = FakeRow()

    def run(self, start: Callable[[Row], Algorithm]) -> Run:
        generator = start(self.row)
        passes: list[Pass] = []
        events: list[Event] = []
        reading: Reading | None = None
        limit = 4 * self.config.max_tokens + 10
        while True:
            try:
                item = generator.send(reading)
            except StopIteration as end:
                self._settle(passes)
                return Run(end.value, passes, events, self.row.cells, self.prompt)
            reading = None
            if isinstance(item, Event):
                assert len(item.positions) == len(item.tokens) > 0, "an event of nothing"
                events.append(item)
                continue
            assert isinstance(item, Step)
            self._settle(passes)
            assert len(passes) < limit, "the algorithm doesn't get on"
            passes.append(self._note(item))
            reading = self._read(item)

    def _settle(self, passes: list[Pass]) -> None:
        chosen = self.row.settle()
        if passes:
            passes[-1].committed = chosen

    def _note(self, step: Step) -> Pass:
        """Checks a step against the contract."""
        count, lead = len(step.tokens), len(self.prompt)
        assert count and len(step.positions) == count and step.kind in KINDS
        assert step.groups is None or len(step.groups) == count
        assert step.parents is None or (len(step.parents) == count and step.groups is None)
        assert (step.temperature, step.top_p) == (self.config.temperature, self.config.top_p)
        done = {position for (position, _), _ in self.row.cells}
        for token, position in zip(step.tokens, step.positions, strict=True):
            assert 0 <= position < lead + self.config.max_tokens, "a position outside prompt and answer"
            assert position not in done, "a position whose cell is committed is fed again"
            assert position >= lead or token == self.prompt[position], "the prompt isn't at its true positions"
        for query in range(count):
            seen = visible(count, step.groups, step.bidirectional, query, step.parents)
            assert len({step.positions[other] for other in seen}) == len(seen), "a cell sees a position twice"
        if step.parents is None:
            assert len(set(step.positions)) == count, "a position fed twice in a pass"
        assert len({ask.cell for ask in step.ask}) == len(step.ask), "a cell asked about twice"
        for ask in step.ask:
            assert 0 <= ask.cell < count
            assert ask.given != MASK
            assert ask.certainty in (None, self.config.planner), "a measure that the planner doesn't use"
            if step.temperature == 0:
                assert ask.uniform is None, "a draw at temperature 0"
            else:
                drawn = ask.uniform is not None or ask.given is not None or self.config.acceptance == "speculative"
                assert drawn, "a sampled token without a draw"
            assert ask.uniform is None or 0 <= ask.uniform < 1
        groups = None if step.groups is None else list(step.groups)
        return Pass(step.kind, list(step.tokens), [p - lead for p in step.positions], groups, list(step.ask))

    def _read(self, step: Step) -> Reading:
        here = list(zip(step.positions, step.tokens, strict=True))
        before: Context = tuple(cell for cell, _ in self.row.cells)
        contexts: list[Context] = []
        for query in range(len(here)):
            seen = visible(len(here), step.groups, step.bidirectional, query, step.parents)
            contexts.append(before + tuple(here[other] for other in seen))
        self.row.offered = list(zip(here, contexts, strict=True))
        found: list[tuple[int, float, float, int, float]] = []
        for ask in step.ask:
            position, token = here[ask.cell]
            p = self.predict(token, position, contexts[ask.cell])
            assert MASK not in p
            best = max(p, key=lambda t: (p[t], -t))
            sample = best
            if step.temperature > 0:
                sample = UNDRAWN if ask.uniform is None else quantile(p, step.temperature, step.top_p, ask.uniform)
            given = 0.0 if ask.given is None else p.get(ask.given, 0.0)
            found.append((best, p[best], given, sample, p.get(sample, 0.0)))
        columns: list[Any] = [list(column) for column in zip(*found, strict=True)] or [[]] * 5
        certainty: list[float] = []
        if any(ask.certainty for ask in step.ask):
            said = [self.predict(here[a.cell][1], here[a.cell][0], contexts[a.cell]) for a in step.ask]
            certainty = [measured(p, a.certainty) if a.certainty else 0.0 for p, a in zip(said, step.ask, strict=True)]
        return Reading(*columns, certainty)


def check(run: Run, config: DecodeConfig, ends: Collection[int], stopped: bool = False) -> Run:
    """The rules that hold for every decoder and every model.

    stopped: a stop string may have ended the text.
    """
    text, lead = run.tokens, len(run.prompt)
    assert 1 <= len(text) <= config.max_tokens
    assert not any(token in ends for token in text[:-1]), "tokens behind the end token"
    assert MASK not in text and UNDRAWN not in text
    ended = text[-1] in ends
    if not stopped:
        assert ended or len(text) == config.max_tokens, "the text breaks off"
        assert run.answer.finish_reason == ("stop" if ended else "length")
    final = dict(enumerate([*run.prompt, *text]))
    positions = [position for (position, _), _ in run.cells]
    assert len(set(positions)) == len(positions), "a position committed twice"
    for (position, token), context in run.cells:
        assert token == final.get(position, token)
        assert context[-1] == (position, token)
        for seen, what in context:
            assert what != MASK, "a committed cell saw a mask"
            assert what == final.get(seen, what), "a committed cell saw a rejected draft"
        if position >= lead:
            assert context[:lead] == tuple(enumerate(run.prompt))
    decided: dict[int, int] = {}
    for event in run.events:
        if event.kind == "committed":
            for position, token in zip(event.positions, event.tokens, strict=True):
                assert decided.setdefault(position, token) == token and position < config.max_tokens
    assert sum(len(e.positions) for e in run.events if e.kind == "committed") == len(decided), "decided twice"
    assert all(decided[at] == token for at, token in enumerate(text)), "an event tells of another token"
    return run


def decode(
    predict: Predict,
    config: DecodeConfig | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    ends: Sequence[int] = (END,),
    stop_check: Callable[[list[int]], int | None] | None = None,
    **settings: Any,
) -> Run:
    """One answer, checked; settings are DecodeConfig's."""
    config = config or DecodeConfig(**settings)
    start = algorithm(config, prompt, end_ids=ends, mask_id=MASK, stop_check=stop_check)
    run = FakeEngine(predict, prompt, config).run(start)
    return check(run, config, ends, stop_check is not None)
