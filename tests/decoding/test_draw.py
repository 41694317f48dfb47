"""Streams of random numbers: the seed's own for the first prompt of a call, others beside it."""

from __future__ import annotations

import random

import pytest

from refusion.decoding import DecodeConfig, algorithm
from refusion.decoding.draw import Draws
from tests.decoding.fake import END, MASK, PROMPT, FakeEngine, Run, check
from tests.decoding.scripts import hashed


def numbers(seed: int, index: int | None = None, count: int = 5) -> list[float | None]:
    config = DecodeConfig(temperature=1.0, seed=seed)
    draws = Draws(config) if index is None else Draws(config, index)
    return [draws.ask(0).uniform for _ in range(count)]


def run(config: DecodeConfig, index: int) -> Run:
    start = algorithm(config, PROMPT, end_ids=[END], mask_id=MASK, index=index)
    return check(FakeEngine(hashed(2, end=0.0, sharp=1.0), PROMPT, config).run(start), config, [END])


def test_the_first_prompt_has_the_seed_s_own_stream() -> None:
    stream = random.Random("refusion/4")
    assert numbers(4) == numbers(4, 0) == [stream.random() for _ in range(5)]


def test_streams_differ_by_seed_and_by_index() -> None:
    found = [tuple(numbers(seed, index)) for seed in range(5) for index in range(12)]
    assert len(set(found)) == len(found)
    assert numbers(1, 7) == numbers(1, 7)


def test_a_skipped_number_is_the_next_one_of_the_stream() -> None:
    draws = Draws(DecodeConfig(temperature=1.0, seed=4))
    draws.skip()
    assert draws.ask(0).uniform == numbers(4)[1]
    cold = Draws(DecodeConfig(seed=4))
    cold.skip()
    assert cold.ask(3, given=5, certainty="margin").uniform is None


@pytest.mark.parametrize("decoder", ["refusion", "paper", "autoregressive"])
def test_equal_prompts_sample_apart_by_their_place_and_alike_at_temperature_zero(decoder: str) -> None:
    hot = DecodeConfig(decoder=decoder, max_tokens=12, slot_size=4, block_size=8, temperature=1.5, seed=3)
    texts = [tuple(run(hot, index).tokens) for index in range(4)]
    assert len(set(texts)) == 4
    assert tuple(run(hot, 2).tokens) == texts[2]
    cold = DecodeConfig(decoder=decoder, max_tokens=12, slot_size=4, block_size=8, seed=3)
    assert len({tuple(run(cold, index).tokens) for index in range(4)}) == 1
