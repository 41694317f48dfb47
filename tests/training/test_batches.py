"""Micro-batches lose nothing, pad harmlessly and don't depend on the order they are given in."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refusion.training.batches import Counts, MicroBatch, micro_batches
from refusion.training.noise import Noised, noise
from refusion.training.sections import NoiseConfig

NONE = -100
FILLS = {"tokens": 0, "positions": 0, "ar_labels": NONE, "mdm_labels": NONE, "mdm_weights": 0, "mdm_shares": 0,
         "depth": 0}


def examples(shapes: list[tuple[int, int]], **changes: Any) -> list[Noised]:
    config = NoiseConfig(**{"slot_sizes": (2, 4), "past_end_weight": 0.5, **changes})
    return [
        noise(range(50, 50 + prompt), [*range(100, 99 + length), 9], mask_id=7, end_id=9, settings=config, seed=1,
              epoch=0, example=number)
        for number, (prompt, length) in enumerate(shapes)
    ]


def rows(batch: MicroBatch) -> list[tuple[bytes, ...]]:
    """Each row without its padding, which is checked to be a tail of nothing."""
    found = []
    for at in range(len(batch.tokens)):
        real = int((batch.tokens[at] != 0).sum())
        for name, fill in FILLS.items():
            assert (getattr(batch, name)[at, real:] == fill).all()
        found.append(tuple(getattr(batch, name)[at, :real].numpy().tobytes() for name in FILLS))
    return found


shapes = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30)), min_size=1, max_size=12)


@settings(max_examples=40)
@given(shapes, st.integers(1, 200), st.randoms())
def test_rows_come_through_whole(sizes: list[tuple[int, int]], micro_tokens: int, shuffler: Any) -> None:
    given_examples = examples(sizes)
    batches = micro_batches(given_examples, micro_tokens)
    found = [row for batch in batches for row in rows(batch)]
    wanted = [tuple(getattr(e, name).tobytes() for name in FILLS) for e in given_examples]
    assert sorted(found) == sorted(wanted)
    for batch in batches:
        assert batch.tokens.numel() <= micro_tokens or len(batch.tokens) == 1
        assert {getattr(batch, name).dtype for name in ("tokens", "positions", "ar_labels", "mdm_labels", "depth")} == {
            torch.int64
        }
        assert batch.mdm_weights.dtype == batch.mdm_shares.dtype == torch.float32
    shuffler.shuffle(given_examples)
    again = micro_batches(given_examples, micro_tokens)
    assert [batch.tokens.tolist() for batch in again] == [batch.tokens.tolist() for batch in batches]


@settings(max_examples=30)
@given(shapes)
def test_counts(sizes: list[tuple[int, int]]) -> None:
    found = examples(sizes)
    counts = Counts.of(found)
    cells = [(e, at) for e in found for at in range(len(e.tokens))]
    assert counts.examples == len(sizes)
    assert counts.tokens == len(cells)
    assert counts.ar_labels == sum(1 for e, at in cells if e.ar_labels[at] != NONE)
    masks = sum(1 for e, at in cells if e.tokens[at] == 7)
    assert counts.mdm_labels == masks
    past = sum(
        int((e.positions[e.tokens == 7] >= prompt + length).sum())
        for e, (prompt, length) in zip(found, sizes, strict=True)
    )
    assert np.isclose(counts.mdm_shares, masks - past / 2)


def test_moving_a_batch_keeps_every_field() -> None:
    batch = micro_batches(examples([(2, 9), (1, 5)]), 100)[0]
    moved = batch.to(torch.device("cpu"))
    assert all(torch.equal(getattr(moved, name), getattr(batch, name)) for name in FILLS)
