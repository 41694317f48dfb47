"""From hidden states to the few numbers that were asked for, in one transfer to the host.

A asks of a packed step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from refusion.decoding.contract import Reading, Step

SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Asked:
    """The asks of several rows' steps, packed: cells index the packed tokens, drawn and measured the asks."""

    cells: list[int]
    given: list[int]
    uniform: list[float]
    temperature: list[float]
    top_p: list[float]
    drawn: list[int]
    measured: dict[str, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(steps: Sequence[Step], starts: Sequence[int]) -> Asked:
        """starts: each step's first token in the packed order."""
        asked = Asked([], [], [], [], [], [])
        for step, start in zip(steps, starts, strict=True):
            for ask in step.ask:
                if ask.uniform is not None and step.temperature > 0:
                    asked.drawn.append(len(asked.cells))
                    asked.uniform.append(ask.uniform)
                    asked.temperature.append(step.temperature)
                    asked.top_p.append(step.top_p)
                if ask.certainty is not None:
                    asked.measured.setdefault(ask.certainty, []).append(len(asked.cells))
                asked.cells.append(start + ask.cell)
                asked.given.append(-1 if ask.given is None else ask.given)
        return asked


def read(logits_AV: Tensor, asked: Asked, banned: Tensor) -> Tensor:
    """float64 [5, A]: best token and its probability, the given token's probability, sample and its probability.

    A sixth row is the certainty, where any ask wants it. Probabilities are float32 softmax at
    temperature 1 over the tokens that aren't banned.
    """
    scores = logits_AV.float().masked_fill(banned, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    best_probability, best = probabilities.max(dim=-1)
    given = torch.tensor(asked.given, device=scores.device)
    given_probability = probabilities.gather(1, given.clamp(min=0).unsqueeze(1)).squeeze(1)
    given_probability = given_probability.masked_fill(given < 0, 0.0)
    sample, sample_probability = best, best_probability
    if asked.drawn:
        rows = torch.tensor(asked.drawn, device=scores.device)
        drawn = draw(scores[rows], asked.uniform, asked.temperature, asked.top_p)
        sample = best.index_copy(0, rows, drawn)
        sample_probability = probabilities.gather(1, sample.unsqueeze(1)).squeeze(1)
    table = [best, best_probability, given_probability, sample, sample_probability]
    if asked.measured:
        table.append(certainty(probabilities, asked.measured))
    return torch.stack([row.double() for row in table])


def certainty(probabilities_AV: Tensor, measured: Mapping[str, Sequence[int]]) -> Tensor:
    """What each ask wants to know of its distribution (Ask.certainty), [A] in [0, 1]; 0 where it wants nothing.

    measured: the asks of each measure.
    """
    found = probabilities_AV.new_zeros(len(probabilities_AV))
    for name, asks in measured.items():
        rows = torch.tensor(asks, device=found.device)
        found = found.index_copy(0, rows, _MEASURES[name](probabilities_AV[rows]))
    return found


def _margin(probabilities_AV: Tensor) -> Tensor:
    best, second = probabilities_AV.topk(2, dim=-1).values.unbind(-1)
    return best - second


def _inverse_perplexity(probabilities_AV: Tensor) -> Tensor:
    return torch.special.entr(probabilities_AV).sum(dim=-1).neg().exp()


_MEASURES = {"margin": _margin, "entropy": _inverse_perplexity}


def draw(
    scores_AV: Tensor, uniform: Sequence[float], temperature: Sequence[float], top_p: Sequence[float]
) -> Tensor:
    """Tokens [A] at the quantile `uniform` of the distribution at a temperature, cut to the nucleus top_p.

    The nucleus is the smallest set of likeliest tokens whose probability reaches top_p. Tokens
    are ordered by probability, so the same number gives the same token whatever the batch.
    """
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=scores_AV.device).unsqueeze(1)

    # the best score is 0 first: a temperature near 0 then gives -inf for the others, never inf
    shifted = scores_AV - scores_AV.max(dim=-1, keepdim=True).values
    probabilities = (shifted / column(temperature).clamp(min=SMALLEST)).softmax(dim=-1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(dim=-1)
    kept = ordered.masked_fill(cumulative - ordered >= column(top_p), 0.0)
    cumulative = kept.cumsum(dim=-1)
    target = column(uniform) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1
    return tokens.gather(1, place.clamp(max=last)).squeeze(1)


def split_readings(table: Sequence[Sequence[float]], steps: Sequence[Step]) -> list[Reading]:
    """The packed table [5][A], or [6][A] with certainty, cut into one reading per step."""
    readings, at = [], 0
    for step in steps:
        span = slice(at, at + len(step.ask))
        best, best_p, given_p, sample, sample_p, *more = (row[span] for row in table)
        # what a row reads doesn't depend on what its neighbours ask for
        measured = more[0] if more and any(ask.certainty is not None for ask in step.ask) else ()
        readings.append(Reading([int(t) for t in best], best_p, given_p, [int(t) for t in sample], sample_p, measured))
        at += len(step.ask)
    return readings
