"""The contract between decoding algorithms and whatever runs them.

An algorithm is a generator for ONE sequence:

    reading = yield Step(tokens, positions, ask=...)
    row.commit(cells)
    yield Event(...)

It holds token ids and numbers only, never tensors, and never learns of other sequences.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """What to read at one cell of a step.

    cell: index into the step's tokens.
    given: a token whose probability is wanted too.
    uniform: a number in [0, 1) that selects a sample under the step's temperature and top_p;
        None reads no sample (the best token stands in for it).
    certainty: a measure of the whole distribution that is wanted too: "margin" (best minus second
        best probability) or "entropy" (exp(-H), H in nats: the inverse perplexity).
    """

    cell: int
    given: int | None = None
    uniform: float | None = None
    certainty: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One request for a forward pass, in storage order behind the row's committed cells.

    A query sees every committed cell of its row and those cells of this step that have its
    group and come earlier, itself included; in a bidirectional step, all of its group.
    Where `parents` is given (then `groups` is None), the step is a forest instead: each cell
    names the earlier cell it hangs on (-1 for none) and sees itself and what it descends from.
    kind names the pass for traces: "prompt", "plan", "verify", "completion", "fused", "next".
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    ask: Sequence[Ask] = ()
    groups: Sequence[int] | None = None
    bidirectional: bool = False
    kind: str = "verify"
    temperature: float = 0.0
    top_p: float = 1.0
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a pass returned, aligned with the step's `ask`; probabilities are float32 softmax at temperature 1.

    best, best_probability: the likeliest allowed token.
    given_probability: of the token asked about (0.0 where none was).
    sample, sample_probability: the drawn token and its temperature-1 probability; the best
        token where no draw was asked for.
    certainty: the measure asked for, in [0, 1] (0.0 where none was); empty where no ask of the
        step names one.
    """

    best: Sequence[int]
    best_probability: Sequence[float]
    given_probability: Sequence[float]
    sample: Sequence[int]
    sample_probability: Sequence[float]
    certainty: Sequence[float] = ()


class Row(Protocol):
    """A sequence's place in the engine, as its algorithm sees it."""

    @property
    def committed(self) -> int:
        """Cells committed so far."""
        ...

    def commit(self, cells: Sequence[int]) -> None:
        """Keeps these cells of the last step, in this order; takes effect before the next step."""
        ...


@dataclass(frozen=True, slots=True)
class Event:
    """Something a viewer or a trace wants to know; answer positions count from 0.

    kind: "draft", "accepted", "rejected", "committed" or "finished"; values holds what kind needs.
    """

    kind: str
    positions: Sequence[int] = ()
    tokens: Sequence[int] = ()
    probabilities: Sequence[float] = ()
    slot: int | None = None


@dataclass(slots=True)
class Answer:
    """What an algorithm returns: the tokens up to and including the first end token.

    finish_reason: "stop" (end token or stop string) or "length".
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "length"


Algorithm = Generator[Step | Event, Reading | None, Answer]
