"""Steps: the same whatever their size, entered anywhere, epoch after epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.data.mixture import Mixture
from refusion.training.encode import Encoded
from refusion.training.noise import Noised
from refusion.training.plan import Place, StepPlan
from refusion.training.sections import NoiseConfig

MASK, END = 7, 9


def rows(source: int, count: int) -> list[Encoded]:
    """Row r of source s has the prompt (100 s + r)."""
    return [Encoded((100 * source + number,), (*range(50, 50 + number % 5), END)) for number in range(count)]


def plan(
    sizes: tuple[int, ...] = (11,), weights: tuple[float, ...] | None = None, batch_tokens: int = 40, seed: int = 1,
    config: NoiseConfig | None = None,
) -> StepPlan:
    sources = [rows(number, size) for number, size in enumerate(sizes)]
    mixture = Mixture(sources, weights or sizes, seed)
    return StepPlan(sources, mixture, settings=config or NoiseConfig(slot_sizes=(2, 4)), seed=seed, mask_id=MASK,
                    end_id=END, batch_tokens=batch_tokens)


def take(source: StepPlan, place: Place, steps: int) -> tuple[list[list[Noised]], list[Place]]:
    found, places = [], [place]
    for _ in range(steps):
        examples, place = source.step(place)
        found.append(examples)
        places.append(place)
    return found, places


def same(first: list[Noised], second: list[Noised]) -> bool:
    return len(first) == len(second) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(first, second, strict=True) for name in Noised.__dataclass_fields__
    )


@settings(max_examples=25)
@given(st.integers(1, 150), st.integers(1, 150))
def test_a_step_s_size_only_cuts_the_one_order(first: int, second: int) -> None:
    def stream(batch_tokens: int) -> list[Noised]:
        source, place, found = plan(batch_tokens=batch_tokens), Place(), []
        while len(found) < 40:
            examples, place = source.step(place)
            found += examples
        return found[:40]

    assert same(stream(first), stream(second))


@settings(max_examples=25)
@given(st.integers(1, 150))
def test_a_step_ends_with_the_example_that_fills_it(batch_tokens: int) -> None:
    steps, _ = take(plan(batch_tokens=batch_tokens), Place(), 5)
    for examples in steps:
        lengths = [len(example.tokens) for example in examples]
        assert sum(lengths[:-1]) < batch_tokens <= sum(lengths)


def test_it_can_be_entered_at_any_place() -> None:
    steps, places = take(plan((11, 5), batch_tokens=30), Place(), 20)
    assert places[-1].epoch >= 2
    for number, place in enumerate(places[:-1]):
        again, after = plan((11, 5), batch_tokens=30).step(place)
        assert same(again, steps[number]) and after == places[number + 1]


def test_an_old_place_gives_the_old_step() -> None:
    source = plan(batch_tokens=30)
    steps, places = take(source, Place(), 12)
    for number in (11, 0, 7, 3):
        assert same(source.step(places[number])[0], steps[number])


def test_epochs_roll_over_and_show_every_row_once() -> None:
    examples = [example for step in take(plan(batch_tokens=25), Place(), 20)[0] for example in step]
    for start in (0, 11, 22):
        prompts = [int(example.tokens[0]) for example in examples[start : start + 11]]
        assert sorted(prompts) == list(range(11))
    orders = {tuple(int(e.tokens[0]) for e in examples[start : start + 11]) for start in (0, 11, 22)}
    assert len(orders) == 3
    # a row is noised anew each time it comes
    ratios = {example.ratio for example in examples[:33]}
    assert len(ratios) == 33


def test_a_small_source_repeats_with_new_noise() -> None:
    examples = [e for step in take(plan((12, 3), (1, 1), batch_tokens=60), Place(), 8)[0] for e in step]
    counts = Counter(int(example.tokens[0]) for example in examples)
    assert min(counts[100 + number] for number in range(3)) >= 4
    ratios = [example.ratio for example in examples if example.tokens[0] == 100]
    assert len(set(ratios)) == len(ratios)


def test_the_seed_changes_order_and_noise() -> None:
    first, second = (take(plan(seed=seed, batch_tokens=200), Place(), 1)[0][0] for seed in (1, 2))
    assert [int(e.tokens[0]) for e in first] != [int(e.tokens[0]) for e in second]
    assert {e.ratio for e in first}.isdisjoint(e.ratio for e in second)


def test_a_row_s_noise_depends_on_its_showing_only() -> None:
    """The other source's size moves its rows, not their noise."""
    ratios = []
    for other in (4, 9):
        steps, _ = take(plan((other, 6), batch_tokens=400), Place(), 1)
        ratios.append({int(e.tokens[0]): e.ratio for e in reversed(steps[0]) if e.tokens[0] >= 100})
    assert all(ratios[0][prompt] == ratio for prompt, ratio in ratios[1].items() if prompt in ratios[0])


@pytest.mark.parametrize("ended", [True, False])
def test_cut_rows_stay_cut(ended: bool) -> None:
    found = plan(config=NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_slots=0)).noised(
        Encoded((1,), (50, 51, 52, 53, 54), ended), 0, 0
    )
    assert len(found.tokens) == (9 if ended else 6)
