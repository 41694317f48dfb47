"""The hybrid loss against a hand computation: explicit loops over the naive network's full logits in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from refusion.training.batches import Counts, MicroBatch, micro_batches
from refusion.training.loss import hybrid_loss, linear_cross_entropy
from refusion.training.noise import Noised, noise
from refusion.training.sections import NoiseConfig

MASK, END = 95, 1
CONFIG = NoiseConfig(slot_sizes=(2, 3, 4), past_end_slots=2, past_end_weight=0.5)
SHAPES = [(3, 9), (1, 14), (0, 6), (5, 4), (2, 11)]


def draw(config: NoiseConfig = CONFIG, shapes: Sequence[tuple[int, int]] = SHAPES, first: int = 0) -> list[Noised]:
    found = []
    for at, (prompt, length) in enumerate(shapes):
        ids = torch.randint(2, 95, (prompt + length,), generator=torch.Generator().manual_seed(at)).tolist()
        found.append(noise(ids[:prompt], [*ids[prompt:-1], END], mask_id=MASK, end_id=END, settings=config, seed=5,
                           epoch=0, example=first + at))
    return found


def by_hand(net: Any, examples: Sequence[Noised], shapes: Sequence[tuple[int, int]], config: NoiseConfig, lam: float,
            normalizer: str) -> tuple[Tensor, Tensor, Tensor]:
    """L, L_AR and L_MDM from their definitions; 1/(t L) from t and L, not from the example's weights."""
    zero = torch.zeros((), dtype=torch.float64)
    ar, mdm, labels, shares = zero, zero, 0, 0.0
    for example, (prompt, length) in zip(examples, shapes, strict=True):
        p = (1 - config.min_ratio) * example.ratio + config.min_ratio
        logits = net.logits(torch.from_numpy(example.tokens), torch.from_numpy(example.positions))
        for at in range(len(example.tokens)):
            normal = torch.log(torch.exp(logits[at]).sum())
            if example.ar_labels[at] != -100:
                ar, labels = ar + normal - logits[at, example.ar_labels[at]], labels + 1
            if example.tokens[at] == MASK:
                share = config.past_end_weight if example.positions[at] >= prompt + length else 1.0
                weight = share / (p * length) / len(examples) if normalizer == "ratio" else share
                mdm, shares = mdm + weight * (normal - logits[at, example.mdm_labels[at]]), shares + share
    ar = ar / max(labels, 1)
    mdm = mdm if normalizer == "ratio" else mdm / (shares or 1.0)
    return ar + lam * mdm, ar, mdm


def run(transformer: Any, batches: Sequence[MicroBatch], counts: Counts, *options: Any) -> tuple[float, float, float]:
    """Sum over micro-batches; the gradients are left in the network."""
    transformer.zero_grad()
    parts = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        loss = hybrid_loss(transformer, transformer, batch, counts, *options)
        loss.total.backward()
        parts += torch.stack([loss.total.detach(), loss.ar, loss.mdm]).double()
    total, ar, mdm = parts.tolist()
    return total, ar, mdm


def assert_gradients(transformer: Any, wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    for name, parameter in transformer.named_parameters():
        if parameter.grad is None:
            assert wanted[name] is None or not wanted[name].any(), name
            continue
        size = max(float(wanted[name].abs().max()), 1e-3)
        assert float((parameter.grad.double() - wanted[name]).abs().max()) < tolerance * size, name


def gradients(transformer: Any) -> dict[str, Tensor]:
    return {name: parameter.grad.double() for name, parameter in transformer.named_parameters()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("normalizer", ["ratio", "mean"])
def test_loss_and_gradients_by_hand(tied: bool, normalizer: str, make_transformer: Any, naive: Any) -> None:
    transformer, examples = make_transformer(tie_embeddings=tied), draw()
    net = naive(transformer)
    wanted = by_hand(net, examples, SHAPES, CONFIG, 0.7, normalizer)
    wanted[0].backward()
    found = run(transformer, micro_batches(examples, 64), Counts.of(examples), 0.7, normalizer)
    assert found == pytest.approx([part.item() for part in wanted], rel=1e-5)
    assert_gradients(transformer, {name: weight.grad for name, weight in net.weights.items()})


@pytest.mark.parametrize("micro_tokens", [1, 17, 40, 70, 10_000])
def test_micro_batches_of_any_size_add_up(micro_tokens: int, make_transformer: Any) -> None:
    transformer, examples = make_transformer(), draw()
    counts = Counts.of(examples)
    whole = run(transformer, micro_batches(examples, 10_000), counts)
    wanted = gradients(transformer)
    assert run(transformer, micro_batches(examples, micro_tokens), counts) == pytest.approx(whole, rel=1e-5)
    assert_gradients(transformer, wanted)


def test_two_devices_add_up(make_transformer: Any) -> None:
    """Each sees its own examples; only the counts are shared."""
    transformer, examples = make_transformer(), draw()
    counts = Counts.of(examples)
    whole = run(transformer, micro_batches(examples, 100), counts)
    shares = [run(transformer, micro_batches(part, 100), counts) for part in (examples[:2], examples[2:])]
    assert [a + b for a, b in zip(*shares, strict=True)] == pytest.approx(whole, rel=1e-5)


def test_padding_has_no_influence(make_transformer: Any) -> None:
    transformer, examples = make_transformer(), draw()
    counts, batch = Counts.of(examples), micro_batches(examples, 10_000)[0]
    before = run(transformer, [batch], counts)
    wanted = gradients(transformer)
    padding = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for at, example in enumerate(sorted(examples, key=lambda e: -len(e.tokens))):
        padding[at, len(example.tokens) :] = True
    assert padding.any()
    batch.tokens[padding] = torch.randint(2, 95, (int(padding.sum()),))
    batch.positions[padding] = torch.randint(0, 100, (int(padding.sum()),))
    assert run(transformer, [batch], counts) == pytest.approx(before, rel=1e-6)
    assert_gradients(transformer, wanted)


@pytest.mark.parametrize("normalizer", ["ratio", "mean"])
def test_everything_masked(normalizer: str, make_transformer: Any, naive: Any) -> None:
    config = NoiseConfig(slot_sizes=(4,), min_ratio=1.0)
    transformer, examples = make_transformer(), draw(config)
    total, ar, mdm = run(transformer, micro_batches(examples, 50), Counts.of(examples), 1.0, normalizer)
    assert ar == 0.0 and total == pytest.approx(mdm)
    net = naive(transformer)
    by_hand(net, examples, SHAPES, config, 1.0, normalizer)[0].backward()
    assert_gradients(transformer, {name: weight.grad for name, weight in net.weights.items()})


@pytest.mark.parametrize("normalizer", ["ratio", "mean"])
def test_nothing_masked(normalizer: str, make_transformer: Any) -> None:
    config, examples = NoiseConfig(slot_sizes=(4,)), []
    for first in range(0, 3000, 5):
        examples += [e for e in draw(config, first=first) if MASK not in e.tokens]
    examples = examples[:4]
    transformer = make_transformer()
    total, ar, mdm = run(transformer, micro_batches(examples, 50), Counts.of(examples), 1.0, normalizer)
    assert mdm == 0.0 and total == pytest.approx(ar) and ar > 0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(transformer).values())


@pytest.mark.parametrize("tied", [True, False])
def test_no_label_at_all(tied: bool, make_transformer: Any) -> None:
    """One clean slot of one token: neither part has anything to learn."""
    config = NoiseConfig(slot_sizes=(1,))
    examples = [e for first in range(0, 200) for e in draw(config, [(3, 1)], first) if MASK not in e.tokens][:1]
    transformer = make_transformer(tie_embeddings=tied)
    assert run(transformer, micro_batches(examples, 50), Counts.of(examples)) == (0.0, 0.0, 0.0)
    for parameter in transformer.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def test_weightless_tokens_past_the_end_teach_nothing(make_transformer: Any, naive: Any) -> None:
    """In both modes: the loss is that of the same sequences with their tails cut off."""
    config = NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_weight=0.0, past_end_slots=2)
    bare = NoiseConfig(slot_sizes=(4,), min_ratio=1.0, past_end_slots=0, fill_last_slot=False)
    transformer = make_transformer()
    for normalizer in ("ratio", "mean"):
        longer, shorter = draw(config), draw(bare)
        assert sum(map(lambda e: len(e.tokens), longer)) > sum(map(lambda e: len(e.tokens), shorter))
        found = run(transformer, micro_batches(longer, 50), Counts.of(longer), 1.0, normalizer)
        wanted = run(transformer, micro_batches(shorter, 50), Counts.of(shorter), 1.0, normalizer)
        assert found == pytest.approx(wanted, rel=1e-5)


def test_bfloat16_autocast_is_close(make_transformer: Any) -> None:
    transformer, examples = make_transformer(), draw()
    counts, batches = Counts.of(examples), micro_batches(examples, 64)
    exact = run(transformer, batches, counts)
    wanted = gradients(transformer)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(transformer, batches, counts)
    assert found == pytest.approx(exact, rel=0.02)
    for name, gradient in gradients(transformer).items():
        assert F.cosine_similarity(gradient.flatten(), wanted[name].flatten(), dim=0) > 0.99, name
    assert {parameter.grad.dtype for parameter in transformer.parameters()} == {torch.float32}


# ---- the head alone


def head(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    hidden = torch.randn(count, 8, generator=draw, dtype=dtype).requires_grad_()
    weight = torch.randn(13, 8, generator=draw, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 13, (count,), generator=draw), torch.rand(count, generator=draw)


@pytest.mark.parametrize("chunk", [1, 3, 10, 512])
def test_chunks_change_nothing(chunk: int) -> None:
    hidden, weight, labels, scale = head(10)
    total, single = linear_cross_entropy(hidden, weight, labels, scale, chunk)
    (total * 3).backward()
    other = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    losses = F.cross_entropy(other[0] @ other[1].T, labels, reduction="none")
    (3 * (losses * scale).sum()).backward()
    assert torch.allclose(single.double(), losses.detach(), atol=1e-5) and not single.requires_grad
    for mine, theirs in zip((hidden, weight), other, strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, atol=1e-5)  # type: ignore[union-attr]


def test_frozen_parts_get_no_gradient() -> None:
    hidden, weight, labels, scale = head(6)
    linear_cross_entropy(hidden, weight.detach(), labels, scale)[0].backward()
    alone = hidden.grad
    hidden.grad = None
    linear_cross_entropy(hidden, weight, labels, scale)[0].backward()
    assert alone is not None and hidden.grad is not None and torch.equal(alone, hidden.grad)
    weight_alone, weight.grad = weight.grad, None
    linear_cross_entropy(hidden.detach(), weight, labels, scale)[0].backward()
    assert weight_alone is not None and weight.grad is not None and torch.equal(weight_alone, weight.grad)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels, scale)[0].requires_grad


def test_bfloat16_weights_keep_their_type() -> None:
    hidden, weight, labels, scale = head(6, torch.bfloat16)
    total, _ = linear_cross_entropy(hidden, weight, labels, scale)
    total.backward()
    assert total.dtype == torch.float32 and hidden.grad is not None and weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_huge_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1e4, requires_grad=True)
    weight = torch.stack([torch.full((4,), value) for value in (-1e4, 0.0, 1e4)]).requires_grad_()
    total, _ = linear_cross_entropy(hidden, weight, torch.tensor([2, 0]), torch.ones(2))
    total.backward()
    assert torch.isfinite(total) and hidden.grad is not None and bool(torch.isfinite(hidden.grad).all())


# ---- the network as training uses it


def test_attention_is_causal_over_storage_order(make_transformer: Any) -> None:
    """Whatever the positions: a later cell never reaches an earlier one, an earlier one always reaches a later one."""
    transformer = make_transformer()
    tokens = torch.randint(2, 95, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]])  # a later slot stored first
    with torch.no_grad():
        before = transformer(tokens, positions)
        for at in range(12):
            changed, moved = tokens.clone(), positions.clone()
            changed[0, at] = (tokens[0, at] + 1) % 90
            moved[0, at] += 20
            for after in (transformer(changed, positions), transformer(tokens, moved)):
                assert torch.allclose(after[:, :at], before[:, :at], atol=1e-6)
                assert (after[:, at + 1 :] - before[:, at + 1 :]).abs().amax(-1).gt(1e-6).all()


def test_positions_count_relatively_and_truly(make_transformer: Any) -> None:
    transformer = make_transformer()
    tokens = torch.randint(2, 95, (1, 8), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 6, 7, 2, 3, 4, 5]])
    with torch.no_grad():
        there = transformer(tokens, positions)
        assert torch.allclose(transformer(tokens, positions + 40), there, atol=1e-4)
        assert not torch.allclose(transformer(tokens, torch.arange(8)[None]), there, atol=1e-2)


def test_a_lone_layer_sees_its_context_as_a_set(make_transformer: Any) -> None:
    """With true positions the order of finished slots means nothing to a later cell, but for what they saw."""
    transformer = make_transformer(num_layers=1)
    tokens = torch.randint(2, 95, (1, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9)[None]
    order = torch.tensor([0, 5, 6, 7, 1, 2, 3, 4, 8])
    with torch.no_grad():
        plain, moved = transformer(tokens, positions), transformer(tokens[:, order], positions[:, order])
    assert torch.allclose(plain[:, -1], moved[:, -1], atol=1e-5)
