"""Networks written as GGUF, read back by the loader that is checked against llama.cpp's own layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refusion.checkpoint import Checkpoint, gguf
from refusion.checkpoint.default import default_model
from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.hf_config import read_config, write_config
from refusion.checkpoint.weights import empty_transformer, fill
from refusion.errors import ConfigError
from refusion.evaluation.floats import in_floats, type_name
from refusion.evaluation.gguf_writer import holds_weights, same_architecture, write_gguf, written_tokens
from refusion.model.config import RopeScaling
from refusion.model.int8 import quantize_linear_layers
from refusion.model.transformer import Transformer
from tests.conftest import tiny_tokenizer
from tests.engine.tiny import MASK, tiny


def read_back(path: Path) -> Transformer:
    file = GgufFile(path)
    config = gguf.read_config(file)
    gguf.check_tensors(file, config)
    transformer = empty_transformer(config, torch.float32, "cpu")
    fill(transformer, lambda part: gguf._read_part(file, part, permuted=config.family == "llama"))
    return transformer


@pytest.mark.parametrize("changes", [
    {}, {"family": "qwen3", "qk_norm": True, "tie_embeddings": True}, {"family": "qwen2", "qkv_bias": True},
    {"qkv_bias": True, "output_bias": True}, {"rope_scaling": RopeScaling("linear", factor=4.0)},
    {"rope_scaling": RopeScaling("llama3", factor=8.0, original_max_positions=2048)},
])
def test_what_is_written_is_read_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    ours = tiny(**changes)
    path = tmp_path / "m.gguf"
    assert write_gguf(ours, path) == ("F32",)
    theirs = read_back(path)
    rows = written_tokens(ours.config)
    assert rows == MASK and theirs.config.vocab_size == rows
    assert same_architecture(theirs.config, ours.config)
    read = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = parameter[:rows] if name in ("embedding.weight", "head.weight") else parameter
        assert torch.equal(read[name], wanted), name


def test_a_mask_token_inside_the_vocabulary_keeps_its_row(tmp_path: Path) -> None:
    ours = tiny(mask_token_id=5)
    assert written_tokens(ours.config) == ours.config.num_tokens
    write_gguf(ours, tmp_path / "m.gguf")
    assert read_back(tmp_path / "m.gguf").config.vocab_size == ours.config.num_tokens


def test_types_follow_another_file(tmp_path: Path) -> None:
    ours, wide = tiny(), {"intermediate_size": 64}
    kinds = {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q4_1", "blk.0.attn_k.weight": "Q6_K",
             "blk.0.ffn_down.weight": "Q4_1"}
    like: Any = SimpleNamespace(tensors={name: SimpleNamespace(kind=kind) for name, kind in kinds.items()})
    assert write_gguf(ours.to(torch.bfloat16), tmp_path / "m.gguf", like) == ("BF16", "F16", "Q4_1", "Q8_0")
    found = GgufFile(tmp_path / "m.gguf").tensors
    assert [found[name].kind for name in kinds] == ["Q8_0", "Q4_1", "Q8_0", "F16"]  # 48 wide rows hold no whole block
    assert found["blk.1.attn_q.weight"].kind == "BF16" and found["output_norm.weight"].kind == "F32"
    write_gguf(tiny(**wide), tmp_path / "w.gguf", like)
    file = GgufFile(tmp_path / "w.gguf")
    assert file.tensors["blk.0.ffn_down.weight"].kind == "Q4_1"
    exact, rounded = tiny(**wide).embedding.weight[:MASK], file.tensor("token_embd.weight")
    assert 0 < (exact - rounded).abs().max() < 0.02


def test_a_file_is_the_models_own_only_with_all_its_weights(tmp_path: Path) -> None:
    ours = tiny(mask_token_id=None, num_tokens=64)
    write_gguf(ours, tmp_path / "m.gguf")
    file = GgufFile(tmp_path / "m.gguf")
    assert holds_weights(file, ours)
    assert holds_weights(file, tiny(mask_token_id=None, num_tokens=64).to(torch.bfloat16))
    ours.layers[1].mlp.down.weight.data[3, 3] += 1  # type: ignore[index, union-attr]
    assert not holds_weights(file, ours)
    assert not holds_weights(file, tiny(mask_token_id=None, num_tokens=128, vocab_size=128))
    assert not holds_weights(file, tiny(mask_token_id=None, num_tokens=64, num_layers=3))


def test_architectures_are_compared_without_the_vocabulary() -> None:
    base = tiny().config
    assert same_architecture(base, tiny(vocab_size=128, num_tokens=100, mask_token_id=None, eos_token_ids=()).config)
    assert not same_architecture(base, tiny(rope_theta=5000.0).config)
    assert not same_architecture(base, tiny(num_layers=1).config)


def test_other_scalings_are_refused(tmp_path: Path) -> None:
    scaled = tiny(rope_scaling=RopeScaling("yarn", factor=4.0, original_max_positions=64))
    with pytest.raises(ConfigError, match="yarn RoPE scaling"):
        write_gguf(scaled, tmp_path / "m.gguf")


def test_the_tuned_default_model_has_the_default_architecture() -> None:
    """A folder written from the default model and read again: nothing but the vocabulary may differ."""
    original = gguf.read_config(GgufFile(default_model()))
    again = read_config(write_config(original, "bfloat16"), "config.json")
    assert same_architecture(original, again)


@pytest.mark.parametrize("tied", [False, True])
def test_int8_layers_are_written_as_what_they_compute_with(tmp_path: Path, tied: bool) -> None:
    plain = tiny(mask_token_id=None, num_tokens=64, tie_embeddings=tied)
    write_gguf(plain, tmp_path / "plain.gguf")
    ours = quantize_linear_layers(tiny(mask_token_id=None, num_tokens=64, tie_embeddings=tied))
    assert holds_weights(GgufFile(tmp_path / "plain.gguf"), ours)  # rounded as the network is
    assert write_gguf(ours, tmp_path / "m.gguf") == ("F32",)
    theirs = read_back(tmp_path / "m.gguf")
    assert (theirs.head is None) is tied
    tokens, positions = torch.arange(9)[None], torch.arange(9)[None]
    exact, found = (t.project(t(tokens, positions)) for t in (ours, theirs))
    assert torch.nn.functional.cosine_similarity(exact, found, dim=-1).min() > 0.99
    assert (theirs.layers[0].mlp.down.weight - plain.layers[0].mlp.down.weight).abs().max() > 0  # type: ignore


def test_int8_layers_as_floats_make_a_network_of_the_same_weights() -> None:
    plain = tiny()
    kept = in_floats(Checkpoint(plain, tiny_tokenizer(), "x"))
    assert kept.transformer is plain and type_name(plain) == "float32"
    ours = quantize_linear_layers(tiny())
    assert type_name(ours) == "int8 and float32"
    found = in_floats(Checkpoint(ours, tiny_tokenizer(), "x", {"format": "gguf"}))
    assert found.extra == {"format": "gguf"} and type_name(found.transformer) == "float32"
    assert torch.equal(found.transformer.embedding.weight, plain.embedding.weight)
    assert found.transformer.head is not None and plain.head is not None
    gap = (found.transformer.head.weight - plain.head.weight).abs().max()
    assert 0 < gap <= plain.head.weight.abs().max() / 127
