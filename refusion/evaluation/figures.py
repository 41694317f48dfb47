"""What was measured, answer by answer -> one row of figures for each decoder and peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from refusion.evaluation.questions import Question
from refusion.generation import Generation

BASELINE = "autoregressive"
"""The row that ratios refer to."""
_MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """One question answered by one row's decoder or peer: its text, the verdict and what it cost.

    correct: None where the question has no answer to compare with. memory: peak in bytes; None: not known.
    """

    question: Question
    name: str
    decoder: str
    generation: Generation
    memory: int | None = None

    @property
    def correct(self) -> bool | None:
        return self.question.is_right(self.generation.text)

    def to_dict(self) -> dict[str, Any]:
        """The object that `refusion bench --samples` writes."""
        return {"name": self.name, "decoder": self.decoder, "prompt": self.question.prompt,
                "answer": self.question.answer, "correct": self.correct, "source": self.question.source,
                **self.generation.to_dict()}


@dataclass(frozen=True)
class Batch:
    """Questions answered together: wall seconds, and the peak in bytes (None: not known)."""

    samples: Sequence[Sample]
    seconds: float
    memory: int | None = None


@dataclass
class Measured:
    """Everything measured, by row: batches for the scores, and answers written alone for the speed."""

    batches: dict[str, list[Batch]] = field(default_factory=dict)
    alone: dict[str, list[Sample]] = field(default_factory=dict)

    def complete(self) -> Measured:
        """What every row has done: the same questions for each, whenever the run was broken off."""
        return Measured(_even(self.batches), _even(self.alone))

    def __bool__(self) -> bool:
        return any(self.batches.values()) or any(self.alone.values())


def _even(lists: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    least = min(map(len, lists.values()), default=0)
    return {name: values[:least] for name, values in lists.items()}


def figures(name: str, measured: Measured) -> dict[str, Any]:
    """Score, cost, speed and memory of one row; None for what wasn't measured.

    Scores and tokens are over the batches, or over the answers written alone where there are no batches.
    """
    batches, alone = measured.batches.get(name, []), measured.alone.get(name, [])
    scored = [sample for batch in batches for sample in batch.samples] or alone
    wall = sum(batch.seconds for batch in batches)
    found = _score(scored)
    found["batch_tps"] = found["tokens"] / wall if wall > 0 else None
    found |= _speed([sample.generation for sample in alone])
    found |= _ratio(alone, measured.alone.get(BASELINE, []))
    found["batch_peak_memory_mb"] = _megabytes([batch.memory for batch in batches])
    peak = _megabytes([sample.memory for sample in alone])
    found["peak_memory_mb"] = found["batch_peak_memory_mb"] if not alone else peak
    return found


def _score(scored: Sequence[Sample]) -> dict[str, Any]:
    """Over all answers: sums, not means of means."""
    answers = [sample.generation for sample in scored]
    verdicts = [verdict for sample in scored if (verdict := sample.correct) is not None]
    tokens, forwards = sum(g.tokens for g in answers), sum(g.forwards for g in answers)
    return {
        "problems": len(scored),
        "scored": len(verdicts),
        "exact_match": sum(verdicts) / len(verdicts) if verdicts else None,
        "tokens": tokens,
        "forwards": forwards,
        "tpf": tokens / forwards if forwards else 0.0,
        "at_length_limit": sum(g.finish_reason == "length" for g in answers),
        "empty": sum(not g.text.strip() for g in answers),
    }


def _speed(alone: Sequence[Generation]) -> dict[str, Any]:
    speeds = [g.tps for g in alone]
    return {
        "timed": len(alone),
        "tps": statistics.median(speeds) if speeds else None,
        "tps_quartiles": quartiles(speeds),
        "first_token_seconds": statistics.median(g.first_token_seconds for g in alone) if alone else None,
    }


def _ratio(alone: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """Relative to left-to-right on the same questions, question by question."""
    pairs = zip(alone, base, strict=False)
    ratios = [mine.generation.tps / its.generation.tps for mine, its in pairs if its.generation.tps > 0]
    return {"tps_ratio": statistics.median(ratios) if ratios else None, "tps_ratio_quartiles": quartiles(ratios)}


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third; None without values."""
    if len(values) < 2:
        return [values[0], values[0]] if values else None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _megabytes(peaks: Sequence[int | None]) -> float | None:
    known = [peak for peak in peaks if peak is not None]
    return round(max(known) / _MIB, 1) if known else None
