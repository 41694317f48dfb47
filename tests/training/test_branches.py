"""Branch noise: what each cell sees, what it is to predict, and that a branch costs as if it stood alone."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion.training.batches import micro_batches
from refusion.training.noise import Noised, noise
from refusion.training.sections import NoiseConfig

MASK, END, FIRST, NONE = 7, 9, 100, -100
configs = st.builds(
    NoiseConfig,
    branch_share=st.just(1.0),
    branch_masks=st.sampled_from([0.2, 1.0, 3.0]),
    branch_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    branch_decay=st.sampled_from([0.5, 1.0]),
)


def draw(prompt: int, length: int, config: NoiseConfig, example: int = 0, ended: bool = True) -> Noised:
    answer = [*range(FIRST, FIRST + length - 1), END]
    return noise(
        range(50, 50 + prompt), answer, mask_id=MASK, end_id=END, settings=config, seed=0, epoch=0, example=example,
        ended=ended,
    )


@given(config=configs, prompt=st.integers(1, 6), length=st.integers(1, 20), example=st.integers(0, 999))
def test_the_answer_is_in_order_and_every_token_of_it_a_label(
    config: NoiseConfig, prompt: int, length: int, example: int
) -> None:
    found = draw(prompt, length, config, example)
    whole = [*range(50, 50 + prompt), *range(FIRST, FIRST + length - 1), END]
    assert found.tokens[: len(whole)].tolist() == whole
    assert found.positions[: len(whole)].tolist() == list(range(len(whole)))
    assert found.ar_labels[: len(whole)].tolist() == [NONE] * (prompt - 1) + whole[prompt:] + [NONE]
    assert (found.tokens[len(whole) :] == MASK).all() and (found.ar_labels[len(whole) :] == NONE).all()


@given(
    config=configs, prompt=st.integers(1, 6), length=st.integers(1, 20), example=st.integers(0, 999),
    ended=st.booleans(),
)
def test_a_branch_continues_the_prefix_it_stands_behind(
    config: NoiseConfig, prompt: int, length: int, example: int, ended: bool
) -> None:
    found = draw(prompt, length, config, example, ended)
    assert found.branch is not None
    answer = [*range(FIRST, FIRST + length - 1), END]
    cuts = sorted({int(cut) for cut in found.branch if cut >= 0})
    for cut in cuts:
        cells = np.flatnonzero(found.branch == cut)
        assert cells.tolist() == list(range(cells[0], cells[-1] + 1))
        assert found.positions[cells].tolist() == list(range(cut, cut + len(cells)))
        places = [cut - prompt + step for step in range(len(cells))]
        assert found.mdm_labels[cells].tolist() == [answer[at] if at < length else END for at in places]
        assert found.depth[cells].tolist() == list(range(1, len(cells) + 1))
        if not ended:
            assert places[-1] < length
        falls = found.mdm_weights[cells] / found.mdm_weights[cells[0]]
        np.testing.assert_allclose(falls, config.branch_decay ** np.arange(len(cells)), rtol=1e-5)
    np.testing.assert_allclose(found.mdm_weights.sum(), 1.0, rtol=1e-5)


def test_cells_see_their_own_branch_and_its_prefix_only() -> None:
    config = NoiseConfig(branch_share=1.0, branch_masks=2.0, branch_sizes=(2, 3))
    examples = [draw(3, 6, config, 1), draw(2, 4, config, 2)]
    (batch,) = micro_batches(examples, 1000)
    assert batch.mask is not None
    for row, found in zip(batch.mask[:, 0], sorted(examples, key=lambda e: -len(e.tokens)), strict=True):
        assert found.branch is not None
        owner = found.branch.tolist()
        for sees in range(len(owner)):
            for seen in range(len(owner)):
                trunk = owner[seen] == -1 and seen < (sees + 1 if owner[sees] == -1 else owner[sees])
                own = owner[seen] == owner[sees] != -1 and seen <= sees
                assert bool(row[sees, seen]) == (trunk or own), (sees, seen)


def test_examples_without_branches_have_no_mask_and_a_share_mixes_both() -> None:
    plain = [draw(3, 8, NoiseConfig(), at) for at in range(20)]
    assert all(found.branch is None for found in plain)
    assert all(batch.mask is None for batch in micro_batches(plain, 64))
    mixed = [draw(3, 8, NoiseConfig(branch_share=0.5), at) for at in range(400)]
    assert 0.4 < np.mean([found.branch is not None for found in mixed]) < 0.6
    pair = [next(e for e in mixed if e.branch is not None), next(e for e in mixed if e.branch is None)]
    (batch,) = micro_batches(pair, 1000)
    assert batch.mask is not None
    rows = [len(e.tokens) for e in sorted(pair, key=lambda e: -len(e.tokens))]
    without = 0 if rows[0] == len(pair[1].tokens) else 1
    size = rows[without]
    assert torch.equal(batch.mask[without, 0, :size, :size], torch.ones(size, size, dtype=torch.bool).tril())
