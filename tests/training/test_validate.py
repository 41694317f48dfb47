"""Validation numbers against loops over the naive network's logits."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from refusion.training.noise import Noised, noise
from refusion.training.sections import NoiseConfig
from refusion.training.validate import validate

MASK, END = 95, 1
CONFIG = NoiseConfig(slot_sizes=(2, 8), past_end_slots=2, past_end_weight=0.5)


def draw(count: int, config: NoiseConfig = CONFIG) -> list[Noised]:
    found = []
    for at in range(count):
        ids = torch.randint(2, 90, (3 + 4 * at + 9,), generator=torch.Generator().manual_seed(at)).tolist()
        found.append(noise(ids[:3], [*ids[3:], END], mask_id=MASK, end_id=END, settings=config, seed=5, epoch=0,
                           example=at))
    return found


def flatter(transformer: Any, example: Noised) -> Noised:
    """Every other label becomes what the network says, or an untrained one would never be right."""
    with torch.no_grad():
        hidden = transformer(torch.from_numpy(example.tokens)[None], torch.from_numpy(example.positions)[None])
        best = transformer.project(hidden[0]).argmax(-1).numpy()
    even = np.arange(len(best)) % 2 == 0
    return dataclasses.replace(
        example,
        ar_labels=np.where(even & (example.ar_labels != -100), best, example.ar_labels),
        mdm_labels=np.where(even & (example.mdm_labels != -100), best, example.mdm_labels),
    )


@pytest.mark.parametrize("normalizer", ["ratio", "mean"])
@pytest.mark.parametrize("micro_tokens", [1, 90])
def test_numbers_by_hand(normalizer: str, micro_tokens: int, make_transformer: Any, naive: Any) -> None:
    transformer = make_transformer(tie_embeddings=True)
    examples = [flatter(transformer, example) for example in draw(6)]
    net, ar, mdm, right_next, by_depth = naive(transformer), [], [], [], {}
    shares = 0.0
    for example in examples:
        with torch.no_grad():
            logits = net.logits(torch.from_numpy(example.tokens), torch.from_numpy(example.positions))
        for at in range(len(example.tokens)):
            losses, best = -torch.log_softmax(logits[at], -1), int(logits[at].argmax())
            if example.ar_labels[at] != -100:
                ar.append(float(losses[example.ar_labels[at]]))
                right_next.append(best == example.ar_labels[at])
            if example.tokens[at] == MASK:
                label, share = int(example.mdm_labels[at]), float(example.mdm_shares[at])
                shares += share
                mdm.append(float(losses[label]) * (float(example.mdm_weights[at]) if normalizer == "ratio" else share))
                by_depth.setdefault(int(example.depth[at]), []).append(best == label)
    found = validate(transformer, transformer, examples, micro_tokens, torch.float32, normalizer)
    assert found.examples == 6
    assert found.ar == pytest.approx(sum(ar) / len(ar), rel=1e-5)
    assert found.mdm == pytest.approx(sum(mdm) / (6 if normalizer == "ratio" else shares), rel=1e-5)
    assert found.right_next == pytest.approx(sum(right_next) / len(right_next))
    assert len(found.right_by_depth) == 16 and max(by_depth) > 16
    for depth, share in enumerate(found.right_by_depth, 1):
        hits = by_depth.get(depth)
        assert share is None if hits is None else share == pytest.approx(sum(hits) / len(hits))
    assert 0 < found.right_next < 1 and any(share and share < 1 for share in found.right_by_depth)


def test_it_changes_nothing(make_transformer: Any) -> None:
    transformer = make_transformer()
    before = copy.deepcopy(transformer.state_dict())
    validate(transformer, transformer, draw(2), 100, torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in transformer.state_dict().items())
    assert all(parameter.grad is None for parameter in transformer.parameters())


def test_one_kind_of_label_alone(make_transformer: Any) -> None:
    transformer = make_transformer()
    found = validate(transformer, transformer, draw(2, NoiseConfig(min_ratio=1.0)), 100, torch.float32)
    assert found.ar == 0 and found.right_next == 0 and found.mdm > 0


def test_bfloat16_is_close(make_transformer: Any) -> None:
    transformer = make_transformer()
    examples = draw(4)
    exact = validate(transformer, transformer, examples, 100, torch.float32)
    rough = validate(transformer, transformer, examples, 100, torch.bfloat16)
    assert (rough.ar, rough.mdm) == (pytest.approx(exact.ar, rel=0.02), pytest.approx(exact.mdm, rel=0.02))
