"""Who sees whom, against the sentence of DESIGN section 4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refusion.model.visibility import attention_mask, visible


@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=9), grouped=st.booleans(), bidirectional=st.booleans())
def test_a_query_sees_its_group_up_to_itself(groups: list[int], grouped: bool, bidirectional: bool) -> None:
    count = len(groups)
    seen = visible(count, groups if grouped else None, bidirectional)
    for query in range(count):
        for cell in range(count):
            together = not grouped or groups[query] == groups[cell]
            assert bool(seen[query, cell]) == (together and (bidirectional or cell <= query))


@given(
    committed=st.integers(0, 5), groups=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    bidirectional=st.booleans(), group_size=st.integers(1, 3),
)
def test_the_mask_hides_cells_of_the_step_only(
    committed: int, groups: list[int], bidirectional: bool, group_size: int
) -> None:
    count = len(groups)
    mask = attention_mask(committed, count, groups, bidirectional, group_size, torch.float32, torch.device("cpu"))
    seen = visible(count, groups, bidirectional)
    if seen.all():
        assert mask is None
        return
    assert mask is not None and mask.shape == (group_size * count, committed + count)
    for head in range(group_size):
        part = mask[head * count : (head + 1) * count]
        assert (part[:, :committed] == 0).all()
        assert torch.equal(part[:, committed:] == 0, seen)
        assert torch.isneginf(part[:, committed:][~seen]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mask_has_the_model_s_type(dtype: torch.dtype) -> None:
    mask = attention_mask(2, 3, None, False, 2, dtype, torch.device("cpu"))
    assert mask is not None and mask.dtype == dtype


def test_one_token_hides_nothing() -> None:
    assert attention_mask(7, 1, None, False, 3, torch.float32, torch.device("cpu")) is None
    assert attention_mask(7, 4, None, True, 3, torch.float32, torch.device("cpu")) is None


@given(data=st.data(), count=st.integers(1, 9))
def test_in_a_forest_a_cell_sees_its_line_only(data: st.DataObject, count: int) -> None:
    parents = [data.draw(st.integers(-1, cell - 1)) for cell in range(count)]
    seen = visible(count, None, False, parents)
    for query in range(count):
        line, at = set(), query
        while at >= 0:
            line.add(at)
            at = parents[at]
        assert {cell for cell in range(count) if seen[query, cell]} == line
