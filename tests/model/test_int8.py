"""Int8 layers against the same products in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from refusion.model.int8 import Int8Linear, quantize_linear_layers
from tests.engine.tiny import plain_logits, tiny


@pytest.mark.parametrize("count", [1, 3, 17, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_the_rounded_product(count: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(count)
    weight = torch.randn(48, 64, generator=draw) * torch.rand(48, 1, generator=draw)
    bias, x = torch.randn(48, generator=draw), torch.randn(count, 64, generator=draw).to(dtype)
    layer = Int8Linear(weight, bias.to(dtype))
    w, v = weight.double().numpy(), x.double().numpy()
    channel, token = np.abs(w).max(1, keepdims=True) / 127, np.abs(v).max(1, keepdims=True) / 127
    wanted = (np.round(v / token) @ np.round(w / channel).T) * token * channel.T + bias.to(dtype).double().numpy()
    found = layer(x).double().numpy()
    assert np.abs(found - wanted).max() <= (2e-5 if dtype == torch.float32 else 0.02) * np.abs(wanted).max()
    exact = v @ w.T + bias.double().numpy()
    assert np.abs(found - exact).max() < 0.03 * np.abs(exact).max()


def test_rows_do_not_depend_on_one_another_and_zeros_stay_zeros() -> None:
    layer = Int8Linear(torch.randn(32, 16, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(row[None]) for row in x]))
    assert not together[3].any() and layer(x.view(1, 5, 16)).shape == (1, 5, 32)
    assert not Int8Linear(torch.zeros(4, 16))(x).any()


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_network_stays_close(tied: bool) -> None:
    tokens, seen = [3, 14, 15, 9, 26, 5], torch.ones(6, 6, dtype=torch.bool).tril()
    network = tiny(4, tie_embeddings=tied)
    before = plain_logits(network, tokens, range(6), seen)
    quantize_linear_layers(network)
    assert not [m for m in network.modules() if isinstance(m, torch.nn.Linear)]
    after = plain_logits(network, tokens, range(6), seen)
    assert 0 < (after - before).norm() / before.norm() < 0.05
