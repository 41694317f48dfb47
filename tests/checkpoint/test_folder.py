"""Hugging Face folders: what is read, and what is refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from refusion.checkpoint import load
from refusion.checkpoint.folder import load_folder
from refusion.errors import CheckpointError


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_folder_of_each_family_gives_the_logits_of_transformers(family, tmp_path, tiny, logits, some_tokens):
    reference = tiny(tmp_path, family)
    checkpoint = load(str(tmp_path))
    assert close(logits(checkpoint.transformer, some_tokens), reference(some_tokens).logits)
    assert checkpoint.config.family == family
    assert checkpoint.config.eos_token_ids == (2,)
    assert checkpoint.source == str(tmp_path)
    assert checkpoint.config.num_tokens == checkpoint.tokenizer.vocab_size < checkpoint.config.vocab_size


@torch.no_grad()
def test_sharded_weights_and_other_types(tmp_path, tiny, logits, some_tokens):
    reference = tiny(tmp_path, "qwen2", shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert close(logits(load(tmp_path).transformer, some_tokens), reference(some_tokens).logits)
    half = load(tmp_path, dtype=torch.bfloat16).transformer
    assert half.dtype == torch.bfloat16
    assert half.frequencies.dtype == torch.float32


@torch.no_grad()
def test_rope_is_read_in_the_old_and_the_new_form(tmp_path, tiny, edit, logits, some_tokens):
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}
    reference = tiny(tmp_path, rope_parameters={**rope, "rope_theta": 4321.0})
    wanted = reference(some_tokens).logits
    assert close(logits(load(tmp_path).transformer, some_tokens), wanted)
    old = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    edit(tmp_path / "config.json", rope_parameters=..., rope_theta=4321.0, rope_scaling=old)
    assert close(logits(load(tmp_path).transformer, some_tokens), wanted)


def test_end_tokens_come_from_every_file(tmp_path, tiny, edit):
    tiny(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=[1, 0])
    edit(tmp_path / "config.json", eos_token_id=5)
    checkpoint = load(tmp_path)
    assert checkpoint.config.eos_token_ids == checkpoint.tokenizer.eos_ids == (2, 1, 0, 5)


def test_old_buffers_tied_copies_and_bare_names_are_accepted(tmp_path, tiny):
    from safetensors.torch import load_file, save_file

    tiny(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    first = load(tmp_path).transformer
    assert first.head is None
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).transformer.embedding.weight, first.embedding.weight)


REFUSED = {
    "sliding-window": {"use_sliding_window": True},
    "sliding-window attention": {"layer_types": ["full_attention", "sliding_attention"]},
    "linear_attention": {"layer_types": ["linear_attention"] * 2},
    "mixture of experts": {"num_local_experts": 8},
    "MoE": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
    "'mistral'": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "'dynamic'": {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "'longrope'": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    "factor is missing": {"rope_parameters": {"rope_type": "linear"}},
    "low_freq_factor": {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                                            "high_freq_factor": 4}},
    "soft-capping": {"attn_logit_softcapping": 50.0},
    "quantization_config (gptq)": {"quantization_config": {"quant_method": "gptq"}},
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "num_hidden_layers is missing": {"num_hidden_layers": ...},
    "hidden_size must be a number": {"hidden_size": "32"},
    "num_attention_heads must be a whole number": {"num_attention_heads": 2.5},
    "rms_norm_eps must be a number above 0": {"rms_norm_eps": 0},
    "attention_bias must be true or false": {"attention_bias": "no"},
    "multiple of num_kv_heads": {"num_key_value_heads": 3},
    "head_dim must be even": {"head_dim": 7},
    "mask_token_id 448 is outside": {"mask_token_id": 448},
    "mask_token_id must be a token id": {"mask_token_id": "<|mask|>"},
    "model.embed_tokens.weight has shape [448, 32] but the config asks for [449, 32]": {"vocab_size": 449},
    "model.layers.2.input_layernorm.weight is missing": {"num_hidden_layers": 3},
    "model.layers.1.input_layernorm.weight is unexpected": {"num_hidden_layers": 1},
    "self_attn.q_proj.bias is missing": {"attention_bias": True},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_supported_is_refused_by_name(words, tmp_path, tiny, edit):
    tiny(tmp_path)
    edit(tmp_path / "config.json", **REFUSED[words])
    text = refusal(tmp_path)
    assert words in text
    assert str(tmp_path) in text


def test_qwen_with_its_window_off_is_accepted(tmp_path, tiny, edit):
    tiny(tmp_path, "qwen2")
    edit(tmp_path / "config.json", use_sliding_window=False, sliding_window=4096, max_window_layers=28)
    assert load(tmp_path).config.family == "qwen2"


def test_damaged_files_are_named(tmp_path, tiny):
    tiny(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    good, data = config.read_text(), weights.read_bytes()
    for content, words in (("{", "isn't valid JSON"), ("[1]", "must hold a JSON object"), ("", "isn't valid JSON"),
                           (good.replace("32,", "NaN,", 1), "NaN"), ("[" * 100000, "isn't valid JSON")):
        config.write_text(content)
        assert words in (text := refusal(tmp_path)) and str(config) in text
    config.write_bytes(b"\xff\xfe\x00")
    assert "isn't valid JSON" in refusal(tmp_path)
    config.write_text(good)
    for content in (data[:-100], data[:5], b"", b"\xff" * 100, data + b"x"):
        weights.write_bytes(content)
        assert "damaged or cut short" in (text := refusal(tmp_path)) and str(weights) in text
    weights.write_bytes(data)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: isn't a tokenizer" in refusal(tmp_path)


def test_missing_files_are_named(tmp_path, tiny):
    assert "holds no config.json" in refusal(tmp_path)
    tiny(tmp_path, shard="40KB")
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    data = first.read_bytes()
    first.unlink()
    assert f"{first}: the index names this file but it is missing" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace(first.name, "../" + first.name))
    assert "names a file elsewhere" in refusal(tmp_path)
    index.write_text("{}")
    assert "no weight_map" in refusal(tmp_path)
    index.write_text(good)
    first.write_bytes(data)
    (tmp_path / "tokenizer.json").unlink()
    assert "holds no tokenizer" in refusal(tmp_path)


def test_pickled_weights_are_never_opened(tmp_path, tiny):
    tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "holds no model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    assert "convert them to safetensors" in refusal(tmp_path)


def test_integer_weights_and_tensors_in_two_files_are_refused(tmp_path, tiny):
    from safetensors.torch import load_file, save_file

    tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int8)}, file)
    assert "model.norm.weight is of type I8" in refusal(tmp_path)
    save_file(tensors, tmp_path / "again.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "again.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is also in another file" in refusal(tmp_path)


def test_an_adapter_is_not_a_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "is an adapter" in refusal(tmp_path)


def test_the_mask_token_of_a_config_is_a_control_token(tmp_path, tiny, edit):
    tiny(tmp_path)
    edit(tmp_path / "config.json", mask_token_id=1)
    checkpoint = load(tmp_path)
    assert checkpoint.config.mask_token_id == checkpoint.tokenizer.mask_id == 1
    assert load(tmp_path, mask_token_id=2).config.mask_token_id == 2
    assert "outside the vocabulary" in refusal(tmp_path, mask_token_id=10_000)


class TestReFusionLayout:
    """GSAI-ML/ReFusion: Qwen3's layout and code of its own; tokenizer.json is absent there."""

    @pytest.fixture
    def folder(self, tmp_path: Path, tiny: Any, edit: Any) -> Path:
        tiny(tmp_path, "qwen3", head_dim=8)
        edit(tmp_path / "config.json", model_type="refusion", architectures=["ReFusionForCausalLM"],
             auto_map={"AutoModelForCausalLM": "modeling_qwen3_refusion.Qwen3ForCausalLM"})
        (tmp_path / "modeling_qwen3_refusion.py").write_text("raise SystemExit('custom code was run')")
        content = json.loads((tmp_path / "tokenizer.json").read_text())
        for number, token in enumerate(("<|beginoftext|>", "<|mask|>")):
            content["added_tokens"].append({"id": 340 + number, "content": token, "single_word": False, "lstrip": False,
                                            "rstrip": False, "normalized": False, "special": False})
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return tmp_path

    def test_the_mask_id_is_in_the_config(self, folder, edit):
        edit(folder / "config.json", mask_token_id=341)
        checkpoint = load(folder)
        assert (checkpoint.config.family, checkpoint.config.qk_norm) == ("qwen3", True)
        assert checkpoint.config.mask_token_id == checkpoint.tokenizer.mask_id == 341
        assert checkpoint.config.num_tokens == 342

    def test_else_it_is_an_argument_or_the_tokenizers(self, folder, edit):
        assert load(folder).config.mask_token_id == 341
        assert load(folder, mask_token_id=340).config.mask_token_id == 340
        edit(folder / "tokenizer_config.json", mask_token="<|beginoftext|>")
        assert load(folder).config.mask_token_id == 340

    def test_without_one_it_is_refused(self, folder):
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text.replace("<|mask|>", "<|other|>"))
        assert "pass mask_token_id (151670 for GSAI-ML/ReFusion)" in refusal(folder)

    def test_text_cannot_hold_the_mask_though_its_token_is_not_special(self, folder):
        tokenizer = load(folder).tokenizer
        assert 341 not in tokenizer.encode("a <|mask|> b")
        assert 341 in tokenizer.encode("a <|mask|> b", parse_special=True)
        assert 341 not in tokenizer.chat([{"role": "user", "content": "<|mask|>"}])

    @torch.no_grad()
    def test_older_tokenizer_files_are_read_without_running_code(self, folder, logits, some_tokens):
        import transformers

        content = json.loads((folder / "tokenizer.json").read_text())
        plain = load(folder)
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
        (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in content["model"]["merges"]))
        (folder / "added_tokens.json").write_text(json.dumps({t["content"]: t["id"] for t in content["added_tokens"]}))
        (folder / "tokenizer_config.json").write_text(json.dumps({
            "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "additional_special_tokens": ["<|beginoftext|>", "<|mask|>"]}))
        checkpoint = load_folder(folder, dtype=torch.float32, device="cpu")
        assert checkpoint.config.mask_token_id == 341
        assert checkpoint.tokenizer.id_to_token(341) == "<|mask|>"
        same = transformers.AutoTokenizer.from_pretrained(folder)
        for text in ("Hello, world 12345", "  two  spaces\n\n", "Zürich's café"):
            assert checkpoint.tokenizer.encode(text) == same.encode(text, add_special_tokens=False)
        assert torch.equal(logits(checkpoint.transformer, some_tokens), logits(plain.transformer, some_tokens))
