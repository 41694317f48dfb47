"""Adapters against peft: its adapters give the same logits here, ours the same there; all else is refused."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.checkpoint import add_mask_token, load, loading, save
from refusion.checkpoint.adapter import FACTS, SINGLE, Facts, read_adapter, sample, sampled_names, write_adapter
from refusion.checkpoint.weights import named_parts
from refusion.errors import CheckpointError

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NORMS = ["input_layernorm", "post_attention_layernorm", "model.norm"]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def adapted(model: Any, folder: Path, **settings: Any) -> Any:
    """peft's model around a transformers model, its trainable parts shaken, and the adapter saved."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": LINEARS, "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
        torch.manual_seed(5)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
        wrapped.save_pretrained(folder)
    return wrapped


def in_peft(base: Path, adapter: Path) -> Any:
    """An adapter over a base folder, as peft loads it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, adapter).eval()


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes", "settings"), [
    ("llama", {}, {}),
    ("llama", {"tie_word_embeddings": True}, {"modules_to_save": NORMS}),
    ("qwen2", {}, {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    ("qwen2", {}, {"target_modules": ["gate_proj"], "modules_to_save": ["k_proj"]}),
    ("qwen3", {"head_dim": 16}, {"modules_to_save": ["q_norm", "k_norm"]}),
    ("llama", {}, {"use_rslora": True}),
    ("llama", {}, {"rank_pattern": {"q_proj": 3, "layers.1.mlp.up_proj": 5}, "alpha_pattern": {r"0\.mlp\..*": 9}}),
    ("llama", {}, {"target_modules": r".*\.1\..*(q|down)_proj"}),
    ("llama", {}, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]}),
    ("llama", {"tie_word_embeddings": True}, {"trainable_token_indices": [7, 340]}),
    ("llama", {}, {"trainable_token_indices": {"embed_tokens": [340], "lm_head": [3, 340]}}),
    # a tied embedding and its head, changed apart or together
    ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "embed_tokens"]}),
    ("llama", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "lm_head"]}),
    ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"]}),
    ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"tie_word_embeddings": True},
     {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}),
    ("llama", {"tie_word_embeddings": True}, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
], ids=str)
def test_an_adapter_of_peft_gives_the_same_logits(family, changes, settings, tmp_path, tiny, logits, some_tokens):
    model = tiny(tmp_path / "base", family, **changes)
    plain = model(some_tokens).logits
    some_tokens[0, :2] = torch.tensor([7, 340])
    wrapped = adapted(model, tmp_path / "adapter", **settings)
    wanted = wrapped(some_tokens).logits
    assert difference(wanted, plain) > 1e-3
    found = load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert difference(logits(found.transformer, some_tokens), wanted) < 1e-5
    save(found, tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert difference(again(some_tokens).logits, wanted) < 1e-5
    assert load(tmp_path / "merged").config == found.config


def shaken(base: Path, folder: Path, **settings: Any) -> None:
    """An adapter that `write_adapter` wrote for a base that got a mask token, every part of it random."""
    checkpoint = load(base)
    samples = {part.huggingface: view for _, part, view in named_parts(checkpoint.transformer)}
    found = {name: sample(samples[name]) for name in sampled_names(checkpoint.config)}
    mask = add_mask_token(checkpoint).config.mask_token_id
    torch.manual_seed(6)
    tensors: dict[str, torch.Tensor] = {}
    for _, part, view in named_parts(checkpoint.transformer):
        module = part.huggingface.removesuffix(".weight")
        if module.rpartition(".")[2] in LINEARS:
            tensors[f"{module}.lora_A.weight"] = torch.randn(3, view.shape[1]) * 0.1
            tensors[f"{module}.lora_B.weight"] = torch.randn(view.shape[0], 3) * 0.1
        elif any(module.endswith(norm) for norm in NORMS):
            tensors[part.huggingface] = torch.rand(view.shape) + 0.5
    tensors["model.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.randn(1, checkpoint.config.hidden_size)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "target_modules": LINEARS,
              "modules_to_save": NORMS, "trainable_token_indices": {"embed_tokens": [mask]}}
    write_adapter(folder, config, tensors, Facts("the base", (mask, "<|mask|>"), found), **settings)


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_of_ours_gives_the_same_logits_in_peft(tied, tmp_path, tiny, logits, some_tokens):
    tiny(tmp_path / "base", tie_word_embeddings=tied)
    shaken(tmp_path / "base", tmp_path / "adapter")
    found = load(tmp_path / "base", adapter=tmp_path / "adapter")
    mask = found.config.mask_token_id
    assert mask == found.tokenizer.mask_id == 340 and found.config.tie_embeddings is tied
    some_tokens[:, ::3] = mask
    # peft wants a base that has the token; the head's own row of it may differ where it is untied
    save(add_mask_token(load(tmp_path / "base")), tmp_path / "masked")
    wanted = in_peft(tmp_path / "masked", tmp_path / "adapter")(some_tokens).logits
    assert difference(logits(found.transformer, some_tokens), wanted) < 1e-5
    over_masked = load(tmp_path / "masked", adapter=tmp_path / "adapter")
    assert torch.equal(over_masked.transformer.embedding.weight, found.transformer.embedding.weight)


@torch.no_grad()
def test_a_gguf_base_takes_the_same_adapter(tmp_path, tiny, write_gguf, logits, some_tokens):
    model = tiny(tmp_path / "base", tie_word_embeddings=True)
    shaken(tmp_path / "base", tmp_path / "adapter")
    write_gguf(tmp_path / "m.gguf", model)
    found = load(tmp_path / "m.gguf", adapter=tmp_path / "adapter")
    wanted = load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert difference(logits(found.transformer, some_tokens), logits(wanted.transformer, some_tokens)) < 1e-5


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "embed_tokens"]}], ids=str)
def test_the_sum_is_rounded_once(settings, tmp_path, tiny):
    adapted(tiny(tmp_path / "base", tie_word_embeddings=True), tmp_path / "adapter", **settings)
    exact = load(tmp_path / "base", adapter=tmp_path / "adapter").transformer
    half = load(tmp_path / "base", adapter=tmp_path / "adapter", dtype=torch.bfloat16).transformer
    assert half.dtype == torch.bfloat16
    for (name, wanted), found in zip(exact.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(wanted.to(torch.bfloat16), found), name


@pytest.mark.parametrize(("change", "sentence"), [
    ({"peft_type": "IA3"}, "peft_type 'IA3' isn't supported"),
    ({"use_dora": True}, "use_dora isn't supported"),
    ({"bias": "all"}, "bias='all' isn't supported"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changes the base"),
    ({"target_parameters": ["experts"]}, "target_parameters isn't supported"),
    ({"r": 0}, "r must be a whole number above 0, not 0"),
    ({"rank_pattern": {"q_proj": 2.5}}, "rank_pattern.q_proj must be a whole number above 0, not 2.5"),
    ({"alpha_pattern": {"q_proj(": 2}}, "isn't a valid expression"),
    ({"lora_alpha": ...}, "lora_alpha must be a number above 0, not None"),
    ({"modules_to_save": "norm"}, "modules_to_save must be a list of names"),
    ({"trainable_token_indices": {"embed_tokens": ["a"]}}, "trainable_token_indices must hold token ids"),
    ({"r": 2}, r"has shape \[\d+, 3\] where \[\d+, 2\] is needed"),
    ({"trainable_token_indices": {"embed_tokens": [900]}}, "changes token 900, but the base has only 448"),
])
def test_what_the_config_asks_in_vain_is_named(change, sentence, tmp_path, tiny, edit):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    edit(tmp_path / "adapter" / "adapter_config.json", **change)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert "\n" not in str(caught.value) and "adapter" in str(caught.value)


@pytest.mark.parametrize(("tensors", "sentence"), [
    ({"model.layers.0.mlp.experts.lora_A.weight": (3, 32)}, "no place for model.layers.0.mlp.experts.lora_A.weight"),
    ({"model.layers.9.self_attn.q_proj.lora_A.weight": (3, 32)}, "no place for model.layers.9"),
    ({"model.norm.lora_A.weight": (3, 32)}, "no place for model.norm.lora_A.weight"),
    ({"model.layers.0.self_attn.q_proj.lora_B.bias": (32,)}, "no place for .*q_proj.lora_B.bias"),
    ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": (32,)}, "q_proj.lora_magnitude_vector isn't supported"),
    ({"model.layers.0.self_attn.q_proj.lora_A.weight": (3, 32)}, "only half of the low-rank part"),
    ({"model.norm.weight": (31,)}, r"model.norm has shape \[31\] where \[32\] is needed"),
])
def test_tensors_without_a_place_are_named(tensors, sentence, tmp_path, tiny):
    tiny(tmp_path / "base")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
    write_adapter(tmp_path / "a", config, {name: torch.ones(shape) for name, shape in tensors.items()}, Facts())
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path / "base", adapter=tmp_path / "a")


def test_missing_and_damaged_files_are_named(tmp_path, tiny):
    tiny(tmp_path / "base")
    adapter = tmp_path / "adapter"
    shaken(tmp_path / "base", adapter)
    whole = (adapter / SINGLE).read_bytes()
    (adapter / SINGLE).write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=rf"{SINGLE}: is damaged or cut short"):
        load(tmp_path / "base", adapter=adapter)
    (adapter / SINGLE).rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="holds only pickled weights"):
        load(tmp_path / "base", adapter=adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=f"holds no {SINGLE}"):
        load(tmp_path / "base", adapter=adapter)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="holds no adapter_config.json"):
        load(tmp_path / "base", adapter=adapter)
    with pytest.raises(CheckpointError, match="there is no such adapter folder"):
        load(tmp_path / "base", adapter=tmp_path / "nowhere")


def test_a_damaged_file_of_facts_is_named(tmp_path, tiny):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    for content in ('{"mask_token": {"id": "x"}}', '{"samples": [1]}'):
        (tmp_path / "adapter" / FACTS).write_text(content)
        with pytest.raises(CheckpointError, match=f"{FACTS}: isn't what this release writes"):
            load(tmp_path / "base", adapter=tmp_path / "adapter")


def test_another_base_is_refused(tmp_path, tiny):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    other = load(tmp_path / "base")
    with torch.no_grad():
        other.transformer.layers[1].mlp.down.weight *= 1.1  # type: ignore[union-attr, operator]
    save(other, tmp_path / "other")
    with pytest.raises(CheckpointError, match="made for another base than .*other.* load it over its own, the base"):
        load(tmp_path / "other", adapter=tmp_path / "adapter")
    # the same base, rounded, is still the base
    save(load(tmp_path / "base"), tmp_path / "half", dtype=torch.bfloat16)
    assert load(tmp_path / "half", adapter=tmp_path / "adapter").config.mask_token_id == 340


def test_another_mask_token_is_refused(tmp_path, tiny):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"made for the mask token <\|mask\|> \(340\), but .* has 5"):
        load(tmp_path / "base", mask_token_id=5, adapter=tmp_path / "adapter")


def test_a_folder_of_an_adapter_is_no_model(tmp_path, tiny):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="is an adapter, not a model; load its base with this as the adapter"):
        load(tmp_path / "adapter")


def test_several_files(tmp_path, tiny):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "one")
    shaken(tmp_path / "base", tmp_path / "many", max_shard_bytes=3000)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"adapter_model-00001-of-{len(files):05d}.safetensors"
    whole, parts = read_adapter(tmp_path / "one"), read_adapter(tmp_path / "many")
    assert whole.changes.keys() == parts.changes.keys() and whole.facts == parts.facts
    for module, found in whole.changes.items():
        assert all(torch.equal(tensor, parts.changes[module][ending]) for ending, tensor in found.items())
    files[-1].unlink()
    with pytest.raises(CheckpointError, match="the index names this file but it is missing"):
        read_adapter(tmp_path / "many")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupted_write_leaves_what_was_there(error, tmp_path, tiny, monkeypatch):
    tiny(tmp_path / "base")
    shaken(tmp_path / "base", tmp_path / "adapter")
    before = {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()}

    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("refusion.checkpoint.adapter.json.dumps", stop)
    for folder in ("adapter", "new"):
        with pytest.raises((KeyboardInterrupt, CheckpointError)):
            shaken(tmp_path / "base", tmp_path / folder)
    assert {file.name: file.read_bytes() for file in (tmp_path / "adapter").iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["adapter", "base"]
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="holds other things than an adapter"):
        shaken(tmp_path / "base", tmp_path / "adapter")


def test_the_default_model_has_its_adapter_unless_it_is_kept_off(tmp_path, tiny, monkeypatch):
    tiny(tmp_path / "base")
    monkeypatch.setattr(loading, "default_model", lambda: tmp_path / "base")
    monkeypatch.setattr("refusion.checkpoint.default.ADAPTER", tmp_path / "adapter")
    plain = load("default")
    assert plain.config.mask_token_id is None and "adapter" not in plain.extra
    shaken(tmp_path / "base", tmp_path / "adapter")
    added = load("default")
    assert added.config.mask_token_id == 340 and added.extra["adapter"] == "default"
    off = load("default", adapter="none")
    assert off.config == plain.config and "adapter" not in off.extra
    assert load(tmp_path / "base").config == plain.config
    content = json.loads((tmp_path / "adapter" / FACTS).read_text())
    assert content["mask_token"] == {"id": 340, "token": "<|mask|>"} and content["base"] == "the base"
