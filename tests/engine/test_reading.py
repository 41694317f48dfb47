"""Sampling against brute force, and its distribution against the one it claims."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.decoding import DecodeConfig, algorithm
from refusion.decoding.contract import Ask, Reading, Step
from refusion.engine import Engine
from refusion.engine.reading import Asked, draw, read, split_readings
from tests.engine.tiny import END, MASK, tiny

LOGITS = st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=12)
TEMPERATURES, NUCLEI = st.sampled_from([0.1, 0.7, 1.0, 2.5]), st.sampled_from([0.05, 0.5, 0.9, 1.0])


def brute_force(logits: list[float], uniform: float, temperature: float, top_p: float) -> tuple[int, float]:
    """The token at a quantile, and how near the quantile is to a border (where float32 may differ)."""
    scores = np.array(logits, dtype=np.float64) / temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept, mass, near = [], 0.0, 1.0
    for token in order:
        near = min(near, abs(mass - top_p))
        if mass >= top_p:
            break
        kept.append(token)
        mass += p[token]
    at = 0.0
    chosen = None
    for token in kept:
        at += p[token]
        near = min(near, abs(at - uniform * mass))
        if chosen is None and uniform * mass < at:
            chosen = token
    return int(kept[-1] if chosen is None else chosen), near


@settings(max_examples=150)
@given(LOGITS, st.floats(0, 1, exclude_max=True), TEMPERATURES, NUCLEI)
def test_a_draw_equals_brute_force(logits: list[float], uniform: float, temperature: float, top_p: float) -> None:
    wanted, near = brute_force(logits, uniform, temperature, top_p)
    [found] = draw(torch.tensor([logits]), [uniform], [temperature], [top_p]).tolist()
    assert found == wanted or near < 1e-5


def test_rows_keep_their_own_settings() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(4, 1)
    found = draw(logits, [0.99, 0.99, 0.0, 0.99], [1.0, 100.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.1]).tolist()
    assert found == [0, 0, 3, 3]
    single = [draw(logits[:1], [u], [t], [p]).item() for u, t, p in
              zip([0.99, 0.99, 0.0, 0.99], [1.0, 100.0, 1.0, 1.0], [1.0, 1.0, 1.0, 0.1], strict=True)]
    assert single == found


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_distribution_is_the_one_it_claims(top_p: float) -> None:
    """Chi-square over 20,000 draws at temperature 0.7; 99.9 % of honest samplers stay below the limit."""
    logits, temperature, count = [1.0, 0.2, -0.5, 0.9, -2.0, 0.0], 0.7, 20_000
    uniform = np.random.default_rng(0).random(count).tolist()
    rows = torch.tensor([logits]).expand(count, -1)
    seen = Counter(draw(rows, uniform, [temperature] * count, [top_p] * count).tolist())
    p = np.exp(np.array(logits) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9)) + 1]
    wanted = {int(token): count * p[token] / p[kept].sum() for token in kept}
    assert set(seen) == set(wanted) and len(wanted) == (6 if top_p == 1.0 else 3)
    statistic = sum((seen[token] - expected) ** 2 / expected for token, expected in wanted.items())
    assert statistic < {6: 20.5, 3: 13.8}[len(wanted)]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 50.0, 49.0, float("-inf")]])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert draw(logits, [uniform], [temperature], [1.0]).tolist() == [1]


def test_the_ends_of_the_unit_interval() -> None:
    """A uniform that rounds to 1 in float32 must not fall behind the nucleus or on a banned token."""
    logits = torch.tensor([[0.0, 0.0, 0.0, float("-inf")]])
    assert draw(logits, [1 - 2**-53], [1.0], [1.0]).tolist() == [2]
    assert draw(logits, [1 - 2**-53], [1.0], [0.5]).tolist() == [1]
    assert draw(logits, [0.0], [1.0], [1e-9]).tolist() == [0]


def test_read_takes_what_each_ask_wants() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 9.0], [3.0, 0.0, 1.0, 9.0], [0.0, 1.0, 2.0, 9.0]])
    banned = torch.tensor([False, False, False, True])
    cold = Step([5, 6], [0, 1], [Ask(1, given=2), Ask(0, uniform=0.9)])
    hot = Step([7], [0], [Ask(0, given=3, uniform=0.999)], temperature=1.0)
    asked = Asked.of([cold, hot], [0, 2])
    assert asked.cells == [1, 0, 2] and asked.given == [2, -1, 3]
    assert asked.drawn == [2], "at temperature 0 a uniform draws nothing"
    first, second = split_readings(read(logits, asked, banned).tolist(), [cold, hot])
    total = sum(math.exp(x) for x in (0, 1, 2))
    assert first.best == [1, 0] and first.sample == [1, 0]
    assert first.best_probability == pytest.approx([math.exp(2) / total, math.exp(3) / (math.exp(3) + 1 + math.e)])
    assert first.given_probability == pytest.approx([math.exp(1) / total, 0.0])
    assert second.best == [2] and second.sample == [0]
    assert second.sample_probability == pytest.approx([1 / total]) and second.given_probability == [0.0]
    assert all(isinstance(token, int) for token in (*first.best, *second.sample))


def test_probabilities_are_float32_whatever_the_model_s_type() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    asked = Asked.of([Step([1], [0], [Ask(0, given=t) for t in range(500)])], [0])
    table = read(logits.expand(500, -1), asked, torch.zeros(500, dtype=torch.bool))
    assert table[2].sum().item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(table[2], logits[0].float().softmax(-1).double())


def test_big_token_ids_survive_the_one_table() -> None:
    vocabulary = 200_000
    logits = torch.zeros(1, vocabulary)
    logits[0, -1] = 5.0
    asked = Asked.of([Step([1], [0], [Ask(0)])], [0])
    [reading] = split_readings(read(logits, asked, torch.zeros(vocabulary, dtype=torch.bool)).tolist(),
                               [Step([1], [0], [Ask(0)])])
    assert reading.best == [vocabulary - 1]


def certainty(logits: torch.Tensor, banned: torch.Tensor, names: list[str | None]) -> Reading:
    """The reading of one step that asks for these measures, a cell each."""
    step = Step(range(len(names)), range(len(names)), [Ask(n, certainty=name) for n, name in enumerate(names)])
    [reading] = split_readings(read(logits, Asked.of([step], [0]), banned).tolist(), [step])
    return reading


@settings(max_examples=100)
@given(st.lists(st.floats(-8, 8, width=16), min_size=3, max_size=12), st.integers(0, 2))
def test_measures_of_certainty_equal_numpy(logits: list[float], ban: int) -> None:
    banned = [False] * len(logits)
    banned[-1] = ban > 0
    reading = certainty(torch.tensor([logits, logits, logits]), torch.tensor(banned), ["margin", None, "entropy"])
    scores = np.array(logits[: len(logits) - (ban > 0)], dtype=np.float64)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    second, best = np.sort(p)[-2:]
    assert list(reading.certainty) == pytest.approx([best - second, 0.0, np.exp((p * np.log(p)).sum())], abs=1e-5)
    assert 0 <= reading.certainty[0] <= 1 and 0 < reading.certainty[2] <= 1


def test_measures_at_their_ends() -> None:
    """A certain token gives 1, n equal ones 1/n and no margin; banned ones count for nothing."""
    sure, even = [0.0, 200.0, 0.0, 0.0, 300.0], [1.0, 1.0, 1.0, 1.0, 300.0]
    banned = torch.tensor([False, False, False, False, True])
    reading = certainty(torch.tensor([sure, sure, even, even]), banned, ["margin", "entropy", "margin", "entropy"])
    assert list(reading.certainty) == pytest.approx([1.0, 1.0, 0.0, 0.25])


def test_who_asks_for_no_certainty_pays_for_none_and_reads_none() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    banned = torch.zeros(3, dtype=torch.bool)
    plain = Step([5, 6], [0, 1], [Ask(1, given=2), Ask(0)])
    curious = Step([7], [0], [Ask(0, certainty="margin")])
    alone = read(logits[:2], Asked.of([plain], [0]), banned)
    assert alone.shape == (5, 2), "no column that nobody asked for"
    together = read(logits, Asked.of([plain, curious], [0, 2]), banned)
    assert together.shape == (6, 3) and torch.equal(together[:5, :2], alone)
    first, second = split_readings(together.tolist(), [plain, curious])
    assert first == split_readings(alone.tolist(), [plain])[0] and first.certainty == ()
    assert len(second.certainty) == 1 and second.certainty[0] > 0


@pytest.mark.parametrize("decoder", ["refusion", "paper"])
def test_planners_of_every_kind_share_a_batch(decoder: str) -> None:
    """Each row writes what it writes alone, whatever its neighbours want to read."""
    transformer = tiny(1, sharp=3.0)
    prompts = [[3, 14, 15], [9], [26, 5, 35, 8], [3, 14, 15], [7, 7]]
    configs = [
        DecodeConfig(decoder, 14, 4, 8, slot_threshold=0.3, token_threshold=0.15, draft_threshold=0.1, planner=planner)
        for planner in ("margin", "confidence", "entropy", "random", "left-to-right")
    ]
    starts = [algorithm(c, p, end_ids=[END], mask_id=MASK) for c, p in zip(configs, prompts, strict=True)]
    engine = Engine(transformer, rows=5)
    tickets = [engine.admit(start) for start in starts]
    found = {done.ticket: (done.answer, done.forwards) for done in engine.run()}
    for ticket, config, prompt in zip(tickets, configs, prompts, strict=True):
        one = Engine(transformer, rows=1)
        one.admit(algorithm(config, prompt, end_ids=[END], mask_id=MASK))
        [alone] = one.run()
        assert (alone.answer, alone.forwards) == found[ticket]
