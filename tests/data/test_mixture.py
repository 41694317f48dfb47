"""Mixtures and held-out questions: shares, repeatability, and no question on both sides."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusion.data.mixture import Mixture, Pick
from refusion.data.rows import Conversation, Message
from refusion.data.split import apportion, conversation_key, held_out_keys, question_key, split
from refusion.errors import ConfigError

sizes = st.lists(st.integers(1, 30), min_size=1, max_size=4)
PINNED = [(0, 2, 1), (0, 1, 0), (0, 0, 0), (1, 0, 0), (1, 2, 0), (0, 2, 0)]


def row(question: str, answer: str = "a", system: str | None = None) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)), "f:1").with_system(system)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[Mixture, Mixture]:
    """A mixture and its double."""
    counts = draw(sizes)
    weights, seed = [draw(st.floats(0.1, 10)) for _ in counts], draw(st.integers(0, 5))
    return Mixture([range(count) for count in counts], weights, seed), Mixture(
        [range(c) for c in counts], weights, seed
    )


@given(mixtures(), st.integers(0, 20))
def test_an_epoch_is_the_same_every_time_and_keeps_the_shares(pair: tuple[Mixture, Mixture], number: int) -> None:
    mixture, double = pair
    picks = mixture.epoch(number)
    assert picks == double.epoch(number)
    assert len(picks) == len(mixture) == sum(map(len, mixture.sources))
    counts = Counter(pick.source for pick in picks)
    assert [counts[source] for source in range(len(mixture.shares))] == mixture.shares


@given(mixtures(), st.integers(1, 8))
def test_rows_come_equally_often_and_each_visit_once(pair: tuple[Mixture, Mixture], epochs: int) -> None:
    mixture, _ = pair
    picks = [pick for number in range(epochs) for pick in mixture.epoch(number)]
    assert len(set(picks)) == len(picks)
    for source, rows in enumerate(mixture.sources):
        seen = Counter(pick.row for pick in picks if pick.source == source)
        shown = [seen[at] for at in range(len(rows))]
        assert max(shown) - min(shown) <= 1
        visits = Counter(pick.visit for pick in picks if pick.source == source)
        assert all(count == len(rows) for visit, count in visits.items() if visit < max(visits))


def test_weights_are_shares_of_examples_and_passes_differ() -> None:
    mixture = Mixture([range(100), range(10)], [1, 1], 0)
    assert mixture.shares == [55, 55]
    small = [pick for pick in mixture.epoch(0) if pick.source == 1]
    first, second = ([pick.row for pick in small if pick.visit == visit] for visit in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert mixture.epoch(0) != mixture.epoch(1)
    assert Mixture(mixture.sources, [1, 1], 1).epoch(0) != mixture.epoch(0)


def test_example_ids_are_their_own_and_fixed() -> None:
    assert Pick(0, 7, 3).example == 7
    assert Pick(2, 7, 0).example == 2 * 2**32 + 7
    small, large = Mixture([range(5), range(4)], [1, 1], 0), Mixture([range(9), range(4)], [1, 1], 0)
    ids = [{pick.row: pick.example for pick in mixture.epoch(0) if pick.source == 1} for mixture in (small, large)]
    assert ids[0] == ids[1]


def test_the_order_is_pinned() -> None:
    picks = Mixture([range(3), range(3)], [2, 1], 0).epoch(0)
    assert [(pick.source, pick.row, pick.visit) for pick in picks] == PINNED


@pytest.mark.parametrize("sources, weights", [([], []), ([[1]], []), ([[1], []], [1, 1]), ([[1]], [0.0])])
def test_impossible_mixtures(sources: list, weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="mixture"):
        Mixture(sources, weights, 0)


@given(st.integers(0, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_parts_sum_up_and_stay_near(total: int, weights: list[float]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert all(
        abs(part - total * weight / sum(weights)) < 1 + 1e-6 for part, weight in zip(parts, weights, strict=True)
    )


@given(st.lists(st.lists(st.integers(0, 40), min_size=1), min_size=1, max_size=3), st.integers(0, 30), st.randoms())
def test_no_question_is_on_both_sides(numbers: list[list[int]], amount: int, rng: random.Random) -> None:
    sources = [[row(f"What is {n} plus one?") for n in group] for group in numbers]
    train, held = split(sources, amount, [1.0] * len(sources))
    keys = [{conversation_key(entry) for rows in side for entry in rows} for side in (train, held)]
    assert not keys[0] & keys[1]
    assert sum(map(len, train)) + sum(map(len, held)) == sum(map(len, sources))
    for rows in sources:
        rng.shuffle(rows)
    again, _ = split(sources, amount, [1.0] * len(sources))
    assert [{conversation_key(entry) for entry in rows} for rows in again] == [
        {conversation_key(entry) for entry in rows} for rows in train
    ]


def test_amounts() -> None:
    rows = [row(f"question {n}") for n in range(1000)]
    assert len(held_out_keys(rows, 200)) == 200
    assert held_out_keys(rows, 0) == held_out_keys(rows, 0.0) == set()
    assert 60 < len(held_out_keys(rows, 0.1)) < 140
    assert held_out_keys(rows[:500], 0.1) <= held_out_keys(rows, 0.1)
    assert len(held_out_keys(rows[:3], 10)) == 2
    train, held = split([rows[:500], rows[500:]], 100, [3, 1])
    assert [len(side) for side in held] == [75, 25] and [len(side) for side in train] == [425, 475]


def test_a_question_is_one_whatever_its_case_space_answer_or_system() -> None:
    assert question_key("  What\n is  1+1? ") == question_key("what is 1+1?")
    left, right = row("What IS it?", "a"), row("what  is it?", "b", "be brief")
    assert conversation_key(left) == conversation_key(right)
    train, held = split([[left, row("other")], [right, row("else")]], 0.5, [1, 1])
    sides = [
        any(entry is wanted for rows in side for entry in rows) for wanted in (left, right) for side in (train, held)
    ]
    assert sides[:2] == sides[2:] and sides.count(True) == 2
