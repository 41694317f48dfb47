"""Planners: which slots each one chooses, against certainties computed by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.decoding import DecodeConfig
from refusion.decoding.config import PLANNERS
from refusion.decoding.planner import Planner
from refusion.decoding.seen import Seen
from tests.decoding.fake import MASK, Run, decode, measured
from tests.decoding.scripts import Text, hashed, left_to_right

TEXT = list(range(1, 33))
NOTHING = Seen(0, 0.0, 0.0, 0, 0.0, 0.0)

TWO = {5: 0.92, 50: 0.08}
"""confidence 0.92, margin 0.84, entropy 0.757"""
MANY = {9: 0.6, **{100 + n: 0.01 for n in range(40)}}
"""confidence 0.6, margin 0.59, entropy 0.117"""
SURE = {13: 0.95, 51: 0.05}
"""confidence 0.95, margin 0.90, entropy 0.820"""
FIRST = {4: TWO, 8: MANY, 12: SURE}


def slots(run: Run, at: int) -> list[int]:
    """Slots of 4 that a pass feeds from their first position on."""
    return [position // 4 for position, _ in run.passes[at].fed if position % 4 == 0]


def refusion(plan: Mapping[int, Any], **settings: Any) -> Run:
    base = {"slot_size": 4, "block_size": 16, "max_tokens": 16, "plan_size": 32, "branch_size": 0}
    return decode(Text(TEXT, plan=plan), **{**base, **settings})


def paper(plan: Mapping[int, Any], **settings: Any) -> Run:
    return refusion(plan, decoder="paper", **settings)


def test_the_certainties_of_these_tests() -> None:
    for p, margin, entropy in ((TWO, 0.84, 0.7567), (MANY, 0.59, 0.1166), (SURE, 0.90, 0.8199)):
        assert sum(p.values()) == pytest.approx(1.0)
        assert measured(p, "margin") == pytest.approx(margin)
        assert measured(p, "entropy") == pytest.approx(entropy, abs=1e-4)
    # -0.92 ln 0.92 - 0.08 ln 0.08 = 0.0767 + 0.2021 nats
    assert measured(TWO, "entropy") == pytest.approx(math.exp(-0.0767 - 0.2021), abs=1e-4)


@pytest.mark.parametrize(("planner", "threshold", "chosen"), [
    ("confidence", 0.8, [0, 1, 3]), ("confidence", 0.93, [0, 3]), ("confidence", 0.55, [0, 1, 2, 3]),
    ("margin", 0.8, [0, 1, 3]), ("margin", 0.85, [0, 3]), ("margin", 0.58, [0, 1, 2, 3]), ("margin", 0.91, [0]),
    ("entropy", 0.8, [0, 3]), ("entropy", 0.75, [0, 1, 3]), ("entropy", 0.11, [0, 1, 2, 3]), ("entropy", 0.83, [0]),
    ("left-to-right", 0.8, [0, 1]), ("left-to-right", 0.93, [0]), ("left-to-right", 0.55, [0, 1, 2, 3]),
])
def test_slots_that_refusion_verifies_first(planner: str, threshold: float, chosen: list[int]) -> None:
    """The leftmost slot always; the others by certainty, in left-to-right order only without a gap."""
    run = refusion(FIRST, planner=planner, slot_threshold=threshold)
    assert slots(run, 1) == chosen and run.tokens == TEXT[:16]


@pytest.mark.parametrize(("planner", "threshold", "chosen"), [
    ("confidence", 0.93, [0, 3]), ("margin", 0.85, [0, 3]), ("margin", 0.58, [0, 1, 2, 3]),
    # slot 0 has 0.97 and nine tokens of 0.0033: margin 0.967, entropy 0.818
    ("entropy", 0.75, [0, 1, 3]), ("entropy", 0.819, [3]),
    ("left-to-right", 0.0, [0]), ("left-to-right", 0.8, [0]),
])
def test_slots_that_paper_verifies_first(planner: str, threshold: float, chosen: list[int]) -> None:
    run = paper(FIRST, planner=planner, slot_threshold=threshold)
    assert slots(run, 1) == chosen and run.tokens == TEXT[:16]


@pytest.mark.parametrize(("planner", "order"), [
    ("confidence", [0, 2, 1]), ("margin", [1, 0, 2]), ("entropy", [2, 0, 1]), ("left-to-right", [0, 1, 2]),
])
def test_the_published_fallback_is_the_best_by_the_planner_s_own_measure(planner: str, order: list[int]) -> None:
    """Certainties (confidence, margin, entropy): .56 .16 .44; .50 .45 .16; .52 .04 .50."""
    plan = {
        0: {1: 0.56, 50: 0.40, 51: 0.04}, 4: {5: 0.5, **{100 + n: 0.05 for n in range(10)}}, 8: {9: 0.52, 50: 0.48},
    }
    run = paper(plan, max_tokens=12, block_size=12, planner=planner, slot_threshold=1.0)
    assert [one.positions[0] // 4 for one in run.passes if one.kind == "verify"] == order


def numbers(seed: int, count: int = 8) -> list[float]:
    planner = Planner(DecodeConfig(planner="random", seed=seed))
    return [planner.certainty(slot, NOTHING) for slot in range(count)]


def test_random_certainties_depend_on_seed_and_slot_alone() -> None:
    assert numbers(3) == numbers(3, 20)[:8] and numbers(3) != numbers(4)
    many = numbers(0, 2000)
    assert all(0 <= one < 1 for one in many) and len(set(many)) == 2000
    assert sum(many) / 2000 == pytest.approx(0.5, abs=0.03)
    sure = Planner(DecodeConfig(planner="random", seed=3, temperature=1.0, max_tokens=4, decoder="paper"))
    assert sure.certainty(5, Seen(1, 0.9, 0.0, 1, 0.9, 0.5)) == numbers(3)[5], "whatever the plan says"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_order_is_that_of_the_numbers(seed: int) -> None:
    """Two blocks of four slots; every block has numbers of its own."""
    run = paper({}, max_tokens=32, planner="random", seed=seed, slot_threshold=1.0)
    mine = numbers(seed)
    first, second = (sorted(block, key=lambda slot: -mine[slot]) for block in (range(4), range(4, 8)))
    assert [one.positions[0] // 4 for one in run.passes if one.kind == "verify"] == first + second
    assert run.tokens == TEXT


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_refusion_takes_the_slots_whose_number_exceeds_the_threshold(seed: int) -> None:
    mine = numbers(seed, 4)
    threshold = sorted(mine[1:])[1]
    run = refusion(FIRST, planner="random", seed=seed, slot_threshold=threshold)
    best = max(range(1, 4), key=lambda slot: mine[slot])
    assert slots(run, 1) == [0, best] and run.tokens == TEXT[:16]


@pytest.mark.parametrize("decoder", ["refusion", "paper"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_only_a_slot_s_first_mask_is_measured_and_only_where_asked(planner: str, decoder: str) -> None:
    run = refusion(FIRST, decoder=decoder, planner=planner, branch_size=3, slot_threshold=0.6, max_tokens=22)
    asked = [(one.positions[a.cell], one.tokens[a.cell]) for one in run.passes for a in one.asks if a.certainty]
    assert all(token == MASK and position % 4 == 0 for position, token in asked)
    assert bool(asked) == (planner in ("margin", "entropy"))


MODELS = st.builds(
    hashed, st.integers(0, 10**6), loose=st.sampled_from([0.0, 0.6, 0.95]), end=st.sampled_from([0.0, 0.05]),
    sharp=st.sampled_from([1.0, 3.0, 8.0]),
)


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=40)
@given(
    model=MODELS, length=st.integers(1, 24), slot=st.integers(1, 6), more=st.integers(0, 12), seed=st.integers(0, 9),
    threshold=st.sampled_from([0.0, 0.3, 0.6, 0.9]), stale=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_no_planner_costs_more_passes_than_left_to_right(
    planner: str, model: Any, length: int, slot: int, more: int, seed: int, threshold: float, stale: float
) -> None:
    run = decode(
        model, planner=planner, max_tokens=length, slot_size=slot, block_size=slot + more, slot_threshold=threshold,
        seed=seed, stale_factor=stale,
    )
    assert run.forwards <= len(run.tokens) - 1


@settings(max_examples=60)
@given(
    model=MODELS, length=st.integers(1, 24), slot=st.integers(1, 6), more=st.integers(0, 12),
    threshold=st.sampled_from([0.0, 0.3, 0.9]), stale=st.sampled_from([0.0, 0.5, 1.0]),
    draft=st.sampled_from([0.0, 0.3]),
)
def test_from_left_to_right_every_token_is_judged_and_none_is_written_early(
    model: Any, length: int, slot: int, more: int, threshold: float, stale: float, draft: float
) -> None:
    """At any slot_threshold: storage order is the text's, and greedy acceptance gives the verifier's own text."""
    run = decode(
        model, planner="left-to-right", acceptance="greedy", max_tokens=length, slot_size=slot,
        block_size=slot + more, slot_threshold=threshold, stale_factor=stale, draft_threshold=draft,
    )
    positions = [position for (position, _), _ in run.cells]
    assert positions == list(range(len(positions)))
    assert run.tokens == left_to_right(model, length)
