"""Noise: every property of DESIGN.md section 6, checked on the drawn sequence alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.training.noise import Noised, noise
from refusion.training.sections import NoiseConfig

MASK, END, FIRST = 7, 9, 100
NONE = -100


def draw(prompt: int, length: int, config: NoiseConfig | None = None, **changes: Any) -> Noised:
    """Noise over tokens that tell where they belong: prompt 50.., answer FIRST + place, the last one END."""
    answer = [*range(FIRST, FIRST + length - 1), END]
    arguments: dict[str, Any] = {"seed": 0, "epoch": 0, "example": 0, **changes}
    config = config or NoiseConfig()
    return noise(range(50, 50 + prompt), answer, mask_id=MASK, end_id=END, settings=config, **arguments)


configs = st.builds(
    NoiseConfig,
    slot_sizes=st.lists(st.integers(1, 33), min_size=1, max_size=4).map(tuple),
    min_ratio=st.sampled_from([1e-3, 0.5, 1.0]),
    mask_ratio=st.sampled_from(["uniform", "stratified"]),
    past_end_slots=st.integers(0, 3),
    past_end_weight=st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    fill_last_slot=st.booleans(),
)
showings = st.fixed_dictionaries({
    "seed": st.integers(0, 2**32), "epoch": st.integers(0, 2**32), "example": st.integers(0, 2**63 - 1),
    "border_labels": st.booleans(), "ended": st.booleans(),
})


def cells(found: Noised, prompt: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answer's clean cells and its masked ones in storage order; a place is counted from the answer's start."""
    every = [
        {"token": int(found.tokens[at]), "place": int(found.positions[at]) - prompt, "ar": int(found.ar_labels[at]),
         "mdm": int(found.mdm_labels[at]), "weight": found.mdm_weights[at], "share": found.mdm_shares[at],
         "depth": int(found.depth[at])}
        for at in range(prompt, len(found.tokens))
    ]
    clean = list(itertools.takewhile(lambda cell: cell["token"] != MASK, every))
    assert all(cell["token"] == MASK for cell in every[len(clean) :]), "a clean token behind a mask"
    return clean, every[len(clean) :]


@settings(max_examples=200)
@given(st.integers(0, 5), st.integers(1, 70), configs, showings)
def test_every_position_comes_once(prompt: int, length: int, config: NoiseConfig, showing: dict[str, Any]) -> None:
    found = draw(prompt, length, config, **showing)
    k = found.slot_size
    assert k in config.slot_sizes and 0 <= found.ratio < 1
    assert found.tokens[:prompt].tolist() == list(range(50, 50 + prompt))
    assert found.positions[:prompt].tolist() == list(range(prompt))
    for name, value in {"ar_labels": NONE, "mdm_labels": NONE, "mdm_weights": 0, "mdm_shares": 0, "depth": 0}.items():
        assert (getattr(found, name)[:prompt] == value).all()
    clean, masked = cells(found, prompt)
    assert sorted(cell["place"] for cell in clean + masked if cell["place"] < length) == list(range(length))
    clean_slots = {cell["place"] // k for cell in clean}
    assert not clean_slots & {cell["place"] // k for cell in masked if cell["place"] < length}
    # past the end: only behind a masked last slot of a whole answer
    beyond = [cell["place"] for cell in clean + masked if cell["place"] >= length]
    if showing["ended"] and (length - 1) // k not in clean_slots:
        filled = -length % k if config.fill_last_slot else 0
        assert beyond == list(range(length, length + len(beyond)))
        assert len(beyond) in {filled + extra * k for extra in range(config.past_end_slots + 1)}
    else:
        assert not beyond


@settings(max_examples=200)
@given(st.integers(0, 5), st.integers(1, 70), configs, showings)
def test_clean_slots(prompt: int, length: int, config: NoiseConfig, showing: dict[str, Any]) -> None:
    """Each is whole and in order, and its labels stay inside it unless borders are labelled too."""
    found = draw(prompt, length, config, **showing)
    text, k = [*range(FIRST, FIRST + length - 1), END], found.slot_size
    clean, _ = cells(found, prompt)
    for _, group in itertools.groupby(clean, lambda cell: cell["place"] // k):
        slot = [cell["place"] for cell in group]
        start = slot[0] // k * k
        assert slot == list(range(start, min(start + k, length)))
    for cell in clean:
        following = cell["place"] + 1
        labelled = following < length and (following % k > 0 or showing["border_labels"])
        assert cell["token"] == text[cell["place"]]
        assert cell["ar"] == (text[following] if labelled else NONE)
        assert (cell["mdm"], cell["weight"], cell["share"], cell["depth"]) == (NONE, 0, 0, 0)


@settings(max_examples=200)
@given(st.integers(0, 5), st.integers(1, 70), configs, showings)
def test_masks(prompt: int, length: int, config: NoiseConfig, showing: dict[str, Any]) -> None:
    """In position order, each labelled with its own token, past the end with end tokens."""
    found = draw(prompt, length, config, **showing)
    text = [*range(FIRST, FIRST + length - 1), END]
    p = (1 - config.min_ratio) * found.ratio + config.min_ratio
    clean, masked = cells(found, prompt)
    known = {cell["place"] for cell in clean} | {-1}
    places = [cell["place"] for cell in masked]
    assert places == sorted(set(places))
    for cell in masked:
        past = cell["place"] >= length
        share = config.past_end_weight if past else 1.0
        assert cell["mdm"] == (END if past else text[cell["place"]])
        assert cell["ar"] == NONE
        assert cell["share"] == pytest.approx(share)
        assert cell["weight"] == pytest.approx(share / (p * length), rel=1e-5)
        assert cell["depth"] == next(d for d in itertools.count(1) if cell["place"] - d in known)


@settings(max_examples=50)
@given(st.integers(1, 40), configs, showings)
def test_the_same_showing_gives_the_same_noise(length: int, config: NoiseConfig, showing: dict[str, Any]) -> None:
    first = draw(2, length, config, **showing)
    random.seed(1)
    np.random.seed(1)
    second = draw(2, length, config, **showing)
    for name in Noised.__dataclass_fields__:
        assert np.array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("changed", ["seed", "epoch", "example"])
def test_each_part_of_a_showing_changes_the_noise(changed: str) -> None:
    found = [draw(0, 64, None, **{changed: number}) for number in range(20)]
    assert len({each.ratio for each in found}) == 20
    assert len({each.tokens.tobytes() for each in found}) > 12  # a high ratio masks everything


def test_slots_are_masked_with_the_drawn_chance() -> None:
    config = NoiseConfig(slot_sizes=(4,), past_end_slots=0)
    drawn = [draw(0, 40, config, example=number) for number in range(1500)]
    ratios = np.array([found.ratio for found in drawn])
    shares = np.array([(found.tokens == MASK).sum() / 40 for found in drawn])
    for low in np.arange(0, 1, 0.2):
        chosen = (ratios >= low) & (ratios < low + 0.2)
        assert abs(shares[chosen].mean() - ratios[chosen].mean()) < 0.04
    # slots are independent: a binomial's variance, not that of all or nothing
    middle = (ratios > 0.4) & (ratios < 0.6)
    assert 0.5 < shares[middle].var() / (0.25 / 10) < 1.7


def discrepancy(values: list[float]) -> float:
    """Largest distance between the distribution of the values and the uniform one."""
    ordered = np.sort(values)
    steps = np.arange(len(ordered))
    return float(max((ordered - steps / len(ordered)).max(), ((steps + 1) / len(ordered) - ordered).max()))


def test_uniform_ratios_are_uniform() -> None:
    assert discrepancy([draw(0, 1, example=number).ratio for number in range(2000)]) < 0.04


@pytest.mark.parametrize("start", [0, 5, 3 * 2**32 + 11, 2**62])
def test_stratified_ratios_are_even_over_any_run_of_examples(start: int) -> None:
    config = NoiseConfig(mask_ratio="stratified")
    ratios = [draw(0, 1, config, example=start + number).ratio for number in range(100)]
    assert discrepancy(ratios) < 0.04


@pytest.mark.parametrize("start", [0, 2**31])
def test_stratified_ratios_are_even_over_the_epochs_of_an_example(start: int) -> None:
    config = NoiseConfig(mask_ratio="stratified")
    assert discrepancy([draw(0, 1, config, example=17, epoch=start + number).ratio for number in range(50)]) < 0.08


def test_stratified_starts_elsewhere_for_another_seed() -> None:
    config = NoiseConfig(mask_ratio="stratified")
    assert len({round(draw(0, 1, config, seed=seed).ratio, 3) for seed in range(10)}) > 5


def test_every_order_of_clean_slots_is_as_likely() -> None:
    config = NoiseConfig(slot_sizes=(1,), min_ratio=1e-3)
    orders: Counter[tuple[int, ...]] = Counter()
    for number in range(4000):
        found = draw(0, 3, config, example=number)
        if MASK not in found.tokens:
            orders[tuple(found.positions.tolist())] += 1
    total = sum(orders.values())
    assert len(orders) == 6 and total > 600
    assert all(abs(count / total - 1 / 6) < 0.05 for count in orders.values())


def test_slot_sizes_follow_their_weights() -> None:
    config = NoiseConfig(slot_sizes=(2, 4, 8), slot_weights=(3, 0, 1))
    sizes = Counter(draw(0, 4, config, example=number).slot_size for number in range(1000))
    assert sizes[4] == 0 and abs(sizes[2] / 1000 - 0.75) < 0.06


def test_the_number_of_slots_past_the_end_is_even() -> None:
    config = NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_slots=3)
    found = Counter((len(draw(0, 4, config, example=number).tokens) - 4) // 4 for number in range(800))
    assert sorted(found) == [0, 1, 2, 3] and min(found.values()) > 150


def test_all_masked_and_all_clean() -> None:
    everything = draw(3, 10, NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_slots=0))
    assert everything.positions.tolist() == list(range(15)) and (everything.tokens[3:] == MASK).all()
    assert (everything.ar_labels == NONE).all()
    assert everything.mdm_weights[3:].tolist() == pytest.approx([1 / 10] * 12)
    assert everything.depth[3:].tolist() == list(range(1, 13))
    low = min((draw(3, 4, NoiseConfig(slot_sizes=(4,)), example=n) for n in range(200)), key=lambda n: n.ratio)
    assert low.tokens.tolist() == [50, 51, 52, FIRST, FIRST + 1, FIRST + 2, END]
    assert low.ar_labels.tolist() == [NONE, NONE, NONE, FIRST + 1, FIRST + 2, END, NONE]
    assert (low.mdm_labels == NONE).all() and (low.mdm_weights == 0).all()


def test_a_cut_answer_shows_no_end() -> None:
    config = NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_slots=3)
    found = noise([], [11, 12, 13, 14, 15], mask_id=MASK, end_id=END, settings=config, seed=0, epoch=0, example=0,
                  ended=False)
    assert found.mdm_labels.tolist() == [11, 12, 13, 14, 15]


def test_an_empty_answer_is_refused() -> None:
    with pytest.raises(ValueError):
        noise([1], [], mask_id=MASK, end_id=END, settings=NoiseConfig(), seed=0, epoch=0, example=0)
