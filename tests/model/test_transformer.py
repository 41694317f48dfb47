"""Passes over a cache against passes without one, for every shape of the attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from refusion.model.cache import Cache
from refusion.model.config import ModelConfig
from refusion.model.transformer import Segment, Transformer
from refusion.model.visibility import attention_mask

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {}, "one key head": {"num_kv_heads": 1}, "no groups": {"num_kv_heads": 4},
    "norms and biases": {"qk_norm": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "tied, wide heads": {"tie_embeddings": True, "head_dim": 16},
}


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(**changes: Any) -> Transformer:
    shape: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "max_positions": 128,
    }
    transformer = Transformer(ModelConfig(**{**shape, **changes})).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for parameter in transformer.parameters():
        parameter.data = (parameter.ndim == 1) + 0.25 * torch.randn(parameter.shape, generator=draw)
    return transformer


@pytest.fixture(params=SHAPES)
def transformer(request: pytest.FixtureRequest) -> Transformer:
    return tiny(**SHAPES[request.param])


def step(
    transformer: Transformer, cache: Cache, feeds: Sequence[tuple[int, list[int], list[int]]],
    groups: Sequence[int] | None = None, bidirectional: bool = False,
) -> list[Tensor]:
    """Logits [T, V] of each row's part; feeds: (row, tokens, positions)."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for row, fed, where in feeds:
        mask = attention_mask(
            cache.lengths[row], len(fed), groups, bidirectional, transformer.config.group_size, torch.float32,
            transformer.device,
        )
        segments.append(Segment(row, len(tokens), len(tokens) + len(fed), mask))
        tokens += fed
        positions += where
    hidden = transformer.step(torch.tensor(tokens), torch.tensor(positions), cache, segments)
    logits = transformer.project(hidden)
    return [logits[segment.start : segment.stop] for segment in segments]


def whole(transformer: Transformer, tokens: list[int], positions: list[int], seen: Tensor | None = None) -> Tensor:
    mask = None if seen is None else seen[None, None]
    return transformer.project(transformer(torch.tensor([tokens]), torch.tensor([positions]), mask))[0]


TOKENS = torch.randint(0, 64, (14,), generator=torch.Generator().manual_seed(1)).tolist()
POSITIONS = [0, 1, 2, 3, 4, 9, 10, 11, 12, 5, 6, 7, 8, 13]


def test_cached_passes_equal_one_without_a_cache(transformer: Transformer) -> None:
    cache = Cache(transformer.config, rows=2, capacity=14)
    found = []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 14)):
        [logits] = step(transformer, cache, [(1, TOKENS[start:stop], POSITIONS[start:stop])])
        cache.commit(1, range(stop - start))
        found.append(logits)
    assert torch.allclose(torch.cat(found), whole(transformer, TOKENS, POSITIONS), atol=1e-5)


def test_uncommitted_cells_leave_no_trace(transformer: Transformer) -> None:
    cache = Cache(transformer.config, rows=1, capacity=20)
    step(transformer, cache, [(0, TOKENS[:5], POSITIONS[:5])])
    cache.commit(0, range(5))
    [first] = step(transformer, cache, [(0, TOKENS[5:9], POSITIONS[5:9])])
    step(transformer, cache, [(0, [1] * 12, list(range(20, 32)))])
    [again] = step(transformer, cache, [(0, TOKENS[5:9], POSITIONS[5:9])])
    assert torch.equal(first, again)


def test_rows_packed_together_equal_rows_alone(transformer: Transformer) -> None:
    feeds = [(0, TOKENS[:3], [0, 1, 2]), (2, TOKENS[3:4], [0]), (1, TOKENS[4:11], list(range(7)))]
    packed, lone = Cache(transformer.config, 3, 16), Cache(transformer.config, 3, 16)
    for _ in range(2):
        together = step(transformer, packed, feeds)
        for feed, found in zip(feeds, together, strict=True):
            [alone] = step(transformer, lone, [feed])
            assert torch.allclose(alone, found, atol=1e-5)
            packed.commit(feed[0], range(len(feed[1])))
            lone.commit(feed[0], range(len(feed[1])))
        feeds = [(row, tokens[::-1], [p + 9 for p in where]) for row, tokens, where in feeds[::-1]]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_groups_in_a_step(transformer: Transformer, bidirectional: bool) -> None:
    cache = Cache(transformer.config, rows=1, capacity=14)
    step(transformer, cache, [(0, TOKENS[:5], POSITIONS[:5])])
    cache.commit(0, range(5))
    groups = [0, 0, 1, 1, 0, 2, 2, 1, 0]
    [found] = step(transformer, cache, [(0, TOKENS[5:], POSITIONS[5:])], groups, bidirectional)
    seen = torch.ones(14, 14, dtype=torch.bool).tril()
    for query in range(9):
        for cell in range(9):
            seen[5 + query, 5 + cell] = groups[query] == groups[cell] and (bidirectional or cell <= query)
    assert torch.allclose(found, whole(transformer, TOKENS, POSITIONS, seen)[5:], atol=1e-5)


def test_the_order_of_storage_is_not_the_order_of_positions(transformer: Transformer) -> None:
    """Two slots that saw the prompt only, kept in four orders: what comes next is the same."""
    groups, last = [0, 0, 0, 1, 1, 1], []
    for order in (range(6), [3, 4, 5, 0, 1, 2], [5, 4, 3, 2, 1, 0], [0, 3, 1, 4, 2, 5]):
        cache = Cache(transformer.config, rows=1, capacity=20)
        step(transformer, cache, [(0, TOKENS[:5], [0, 1, 2, 3, 4])])
        cache.commit(0, range(5))
        step(transformer, cache, [(0, TOKENS[5:11], [5, 6, 7, 11, 12, 13])], groups)
        cache.commit(0, order)
        last += step(transformer, cache, [(0, TOKENS[11:], [8, 9, 10])])
    for other in last[1:]:
        assert torch.allclose(last[0], other, atol=1e-5)


def test_positions_matter(transformer: Transformer) -> None:
    near, far = (whole(transformer, TOKENS[:4], where) for where in ([0, 1, 2, 3], [0, 1, 2, 30]))
    assert torch.equal(near[:3], far[:3]) and not torch.allclose(near[3], far[3], atol=1e-3)


def test_only_distances_matter(transformer: Transformer) -> None:
    shifted = whole(transformer, TOKENS, [p + 40 for p in POSITIONS])
    assert torch.allclose(whole(transformer, TOKENS, POSITIONS), shifted, atol=1e-4)


def test_bfloat16_stays_bfloat16() -> None:
    transformer = tiny().to(torch.bfloat16)
    cache = Cache(transformer.config, rows=1, capacity=8, dtype=torch.bfloat16)
    segments = [Segment(0, 0, 4, attention_mask(0, 4, None, False, 2, torch.bfloat16, transformer.device))]
    hidden = transformer.step(torch.tensor(TOKENS[:4]), torch.arange(4), cache, segments)
    assert hidden.dtype == transformer.project(hidden).dtype == transformer.dtype == torch.bfloat16
    exact = whole(tiny(), TOKENS[:4], [0, 1, 2, 3])
    assert (transformer.project(hidden).float() - exact).abs().max() < 0.1 * exact.abs().max()
