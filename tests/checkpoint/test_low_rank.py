"""Extraction against numpy's singular values, against the tuned network and against peft."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refusion.checkpoint import Checkpoint, add_mask_token, load, low_rank, save
from refusion.checkpoint.adapter import write_adapter
from refusion.checkpoint.low_rank import Extraction, extract, factor, root_of, second_moments
from refusion.errors import CheckpointError, ConfigError


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tune(checkpoint: Checkpoint, only: str = "", scale: float = 0.05) -> Checkpoint:
    """The same checkpoint with every parameter changed, or those with `only` in their names."""
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in checkpoint.transformer.named_parameters():
            if only in name:
                parameter += scale * torch.randn_like(parameter)
    return checkpoint


def write(found: Extraction, folder: Path) -> Path:
    return write_adapter(folder, found.config, found.tensors, found.facts)


# --- one matrix

@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (30, 30)])
@pytest.mark.parametrize("rank", [1, 5, 24])
def test_the_error_is_that_of_eckart_and_young(shape, rank):
    delta = drawn(*shape)
    b, a = factor(delta, rank)
    assert b.shape == (shape[0], rank) and a.shape == (rank, shape[1])
    values = np.linalg.svd(delta.numpy(), compute_uv=False)
    assert (delta - b @ a).norm().item() == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), abs=1e-9)


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_the_error_at_the_inputs_is_that_of_eckart_and_young(shape):
    delta = drawn(*shape)
    inputs = drawn(shape[1], 500, seed=1) * torch.logspace(-2, 1, shape[1], dtype=torch.float64).unsqueeze(1)
    root = root_of(inputs @ inputs.T / 500)
    b, a = factor(delta, 8, root)
    values = np.linalg.svd((delta @ root).numpy(), compute_uv=False)
    best = np.sqrt((values[8:] ** 2).sum())
    assert ((delta - b @ a) @ root).norm().item() == pytest.approx(best, rel=1e-9)
    plain_b, plain_a = factor(delta, 8)
    lost, plainly = ((delta - b @ a) @ inputs).norm(), ((delta - plain_b @ plain_a) @ inputs).norm()
    assert lost < 0.8 * plainly
    assert (delta - b @ a).norm() > (delta - plain_b @ plain_a).norm()


def test_wide_matrices_are_decomposed_at_random_and_nearly_as_well(monkeypatch):
    delta = drawn(200, 300)
    monkeypatch.setattr(low_rank, "EXACT_WIDTH", 100)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    b, a = factor(delta, 10)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(factor(delta, 10)[1], a)
    values = np.linalg.svd(delta.numpy(), compute_uv=False)
    assert (delta - b @ a).norm().item() == pytest.approx(np.sqrt((values[10:] ** 2).sum()), rel=1e-3)


def test_a_matrix_of_lower_rank_or_of_none_is_held_exactly():
    delta = drawn(20, 2) @ drawn(2, 30, seed=1)
    for given in (delta, delta.T, torch.zeros(20, 30, dtype=torch.float64)):
        b, a = factor(given, 6)
        assert torch.isfinite(b).all() and torch.isfinite(a).all()
        assert torch.allclose(b @ a, given, atol=1e-9)
    assert factor(delta, 99)[0].shape == (20, 20)


def test_both_factors_are_of_one_size():
    b, a = factor(drawn(30, 50) * 1e-5, 4)
    assert torch.allclose(b.norm(dim=0), a.norm(dim=1))
    assert (b.half().double() @ a.half().double() - b @ a).norm() < 1e-2 * (b @ a).norm()


# --- whole networks

@torch.no_grad()
@pytest.mark.parametrize(("family", "changes", "embedding_rank"), [
    ("llama", {"tie_word_embeddings": True}, 32),
    ("llama", {}, 32),
    ("qwen2", {}, 0),
    ("qwen3", {"head_dim": 16}, 0),
])
def test_at_full_rank_the_adapter_is_the_tuned_network(
    family, changes, embedding_rank, tmp_path, tiny, logits, some_tokens
):
    tiny(tmp_path / "base", family, **changes)
    # biases and a low-rank embedding can't go together; without the latter the embedding stays as it is
    tuned = tune(add_mask_token(load(tmp_path / "base")), "" if embedding_rank else "layers.")
    mask = tuned.config.mask_token_id
    assert mask is not None
    tuned.transformer.embedding.weight[mask] += 1
    found = extract(load(tmp_path / "base"), tuned, 96, embedding_rank=embedding_rank, dtype=torch.float32)
    assert all(one.error < 1e-5 for one in found.matrices)
    write(found, tmp_path / "adapter")
    again = load(tmp_path / "base", adapter=tmp_path / "adapter")
    some_tokens[:, ::3] = mask
    assert again.config == tuned.config
    assert difference(logits(again.transformer, some_tokens), logits(tuned.transformer, some_tokens)) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes", "embedding_rank"), [
    ("llama", {"tie_word_embeddings": True}, 0),
    ("llama", {"tie_word_embeddings": True}, 3),
    ("llama", {}, 3),
    ("qwen2", {}, 0),
])
def test_peft_reads_what_was_extracted(family, changes, embedding_rank, tmp_path, tiny, logits, some_tokens):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tiny(tmp_path / "base", family, **changes)
    tuned = tune(add_mask_token(load(tmp_path / "base")), "" if embedding_rank else "layers.")
    write(extract(load(tmp_path / "base"), tuned, 6, embedding_rank=embedding_rank), tmp_path / "adapter")
    save(add_mask_token(load(tmp_path / "base")), tmp_path / "masked")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "masked", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    some_tokens[:, ::3] = tuned.config.mask_token_id or 0
    found = load(tmp_path / "base", adapter=tmp_path / "adapter").transformer
    assert difference(logits(found, some_tokens), wrapped(some_tokens).logits) < 1e-5


def test_the_report_says_what_is_lost(tmp_path, tiny):
    tiny(tmp_path / "base", tie_word_embeddings=True)
    tuned = tune(add_mask_token(load(tmp_path / "base")))
    found = extract(load(tmp_path / "base"), tuned, 4)
    write(found, tmp_path / "adapter")
    base, again = (load(tmp_path / "base", adapter=a) for a in ("none", tmp_path / "adapter"))
    one = next(m for m in found.matrices if m.module == "model.layers.1.mlp.down_proj")
    before, after, wanted = (c.transformer.layers[1].mlp.down.weight for c in (base, again, tuned))  # type: ignore
    assert one.rank == 4 and one.weighted is None
    assert one.error == pytest.approx(((wanted - after).norm() / (wanted - before).norm()).item(), rel=1e-4)
    means = found.mean_errors()
    assert means["down_proj"][0] == pytest.approx(
        np.mean([m.error for m in found.matrices if m.kind == "down_proj"]))
    assert 0.3 < means["mean"][0] < 1
    # the embedding is left out but for the mask token's row
    assert means["embed_tokens"][0] > 0.9 and torch.equal(
        again.transformer.embedding.weight[340], tuned.transformer.embedding.weight[340])
    assert torch.equal(again.transformer.embedding.weight[:340], base.transformer.embedding.weight[:340])
    stored = sum(file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors"))
    assert found.nbytes < stored < found.nbytes + 20_000


def test_inputs_seen_by_the_network_weigh_more(tmp_path, tiny, some_tokens):
    tiny(tmp_path / "base")
    tuned = tune(add_mask_token(load(tmp_path / "base")))
    rows = [(row.tolist(), list(range(24))) for row in some_tokens]
    moments = second_moments(tuned.transformer, rows)
    names = {f"layers.{n}.{part}" for n in (0, 1) for part in ("attention.qkv", "attention.out", "mlp.gate_up",
                                                               "mlp.down")}
    assert moments.keys() == names
    with torch.no_grad():
        x = tuned.transformer.layers[0].attention_norm(tuned.transformer.embedding(some_tokens))  # type: ignore
    x = x.flatten(0, 1)
    assert torch.allclose(moments["layers.0.attention.qkv"], x.T @ x / 48, atol=1e-5)
    plain = extract(load(tmp_path / "base"), tuned, 4, dtype=torch.float32)
    weighed = extract(load(tmp_path / "base"), tuned, 4, dtype=torch.float32, moments=moments)
    root = root_of(moments["layers.0.attention.qkv"])
    name = "model.layers.0.self_attn.q_proj"
    delta = (tuned.transformer.layers[0].attention.qkv.weight  # type: ignore[union-attr, operator]
             - load(tmp_path / "base").transformer.layers[0].attention.qkv.weight)[:32].double()  # type: ignore
    lost = [((delta - (e.tensors[f"{name}.lora_B.weight"] @ e.tensors[f"{name}.lora_A.weight"]).double()) @ root).norm()
            / (delta @ root).norm() for e in (plain, weighed)]
    assert lost[1] < 0.95 * lost[0]
    told = next(one for one in weighed.matrices if one.module == name)
    assert told.weighted == pytest.approx(lost[1].item(), rel=1e-4)
    means = weighed.mean_errors()["mean"]
    assert means[1] is not None and means[1] < means[0]


def test_kinds_that_are_alike_are_left_out(tmp_path, tiny):
    tiny(tmp_path / "base", tie_word_embeddings=True)
    tuned = tune(load(tmp_path / "base"), "attention.out")
    found = extract(load(tmp_path / "base"), tuned, 4)
    assert found.config["target_modules"] == ["o_proj"] and found.config["modules_to_save"] is None
    assert "trainable_token_indices" not in found.config and found.facts.mask is None
    assert {name.split(".")[4] for name in found.tensors} == {"o_proj"}


def test_a_rank_above_the_smaller_side_is_cut(tmp_path, tiny):
    tiny(tmp_path / "base")
    found = extract(load(tmp_path / "base"), tune(load(tmp_path / "base")), 20)
    assert found.config["r"] == 20 and found.config["rank_pattern"] == {"k_proj": 16, "v_proj": 16}


def refusal(base: Any, tuned: Any, *args: Any, **settings: Any) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        extract(base, tuned, *args, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_does_not_fit_is_refused(tmp_path, tiny):
    tiny(tmp_path / "base")
    tiny(tmp_path / "wide", intermediate_size=96)
    tiny(tmp_path / "qwen", "qwen2")
    base, wide = load(tmp_path / "base"), load(tmp_path / "wide")
    sentence = refusal(base, wide, 4)
    assert "has the shape" in sentence and "give the base that it was tuned from" in sentence
    assert "has the shape" in refusal(base, load(tmp_path / "qwen"), 4)
    assert "nothing to extract" in refusal(base, load(tmp_path / "base"), 4)
    assert "rank is 0" in refusal(base, tune(load(tmp_path / "base")), 0)
    tuned = tune(load(tmp_path / "base", mask_token_id=5))
    masked = add_mask_token(load(tmp_path / "base"))
    assert "has the mask token 5" in refusal(masked, tuned, 4)
    biased = tune(load(tmp_path / "qwen"))
    assert "leave embedding_rank at 0" in refusal(load(tmp_path / "qwen"), biased, 4, embedding_rank=2)
    with pytest.raises(ConfigError, match="no row to measure"):
        second_moments(base.transformer, [])


def test_the_name_of_the_base_is_no_path(tmp_path, tiny):
    tiny(tmp_path / "base")
    tuned = tune(load(tmp_path / "base"))
    assert extract(load(tmp_path / "base"), tuned, 2).facts.base == "base"
    named = replace(load(tmp_path / "base"), source="org/base")
    found = extract(named, tuned, 2)
    assert found.facts.base == "org/base" and found.config["base_model_name_or_path"] == "org/base"
