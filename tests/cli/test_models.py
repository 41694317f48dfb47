"""`refusion info` and `refusion convert` on a tiny model with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from refusion import checkpoint
from refusion.checkpoint import Checkpoint, Tokenizer
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of 2 layers, its 258 tokens bytes and two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(["<end>", "<pad>"])
    config = ModelConfig(
        vocab_size=258, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
        max_positions=64, tie_embeddings=True, eos_token_ids=(256,),
    )
    torch.manual_seed(0)
    model = Checkpoint(Transformer(config), Tokenizer(backend, eos_ids=(256,)), "made here", {"format": "huggingface"})
    return checkpoint.save(model, tmp_path / "tiny")


def test_info_for_a_person(call, folder):
    result = call("info", folder)
    assert result.exit_code == 0, result.output
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["path"] == str(folder) and lines["format"] == "huggingface" and lines["family"] == "llama"
    assert lines["layers"] == "2" and lines["heads"] == "2, of keys and values 1"
    parameters = sum(p.numel() for p in checkpoint.load(folder).transformer.parameters())
    assert lines["parameters"] == f"{parameters:,}"
    assert "<end> (256)" in result.stdout and "not yet a ReFusion model" in result.stdout


def test_info_as_json(call, folder):
    facts = json.loads(call("info", folder, "--json").stdout)
    assert facts["config"]["num_layers"] == 2 and facts["mask_token"] is None
    assert all(tensor["dtype"] == "F32" for tensor in facts["tensors"])


def test_convert_writes_the_type_asked_for(call, folder, tmp_path):
    result = call("convert", folder, tmp_path / "half")
    assert result.exit_code == 0 and Path(result.stdout.strip()) == tmp_path / "half"
    facts = checkpoint.info(tmp_path / "half")
    assert set(facts["dtypes"]) == {"BF16"} and facts["mask_token"] is None
    assert call("convert", folder, tmp_path / "full", "--dtype", "float32").exit_code == 0
    old, new = checkpoint.load(folder).transformer, checkpoint.load(tmp_path / "full").transformer
    for (name, before), after in zip(old.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(before, after), name


def test_convert_adds_a_mask_token(call, folder, tmp_path):
    assert call("convert", folder, tmp_path / "masked", "--add-mask", "--dtype", "float32").exit_code == 0
    result = call("info", tmp_path / "masked")
    assert "<|mask|> (258)" in result.stdout
    assert checkpoint.load(tmp_path / "masked").config.mask_token_id == 258


def test_convert_names_the_mask_token_of_a_model_that_has_one(call, folder, tmp_path):
    assert call("convert", folder, tmp_path / "named", "--mask-token-id", 257).exit_code == 0
    assert checkpoint.info(tmp_path / "named")["mask_token"] == {"id": 257, "token": "<pad>"}


def test_errors_are_one_line(call, folder, tmp_path, failing):
    assert "there is no such folder" in failing(call("info", "./nowhere"), 1)
    assert "unknown dtype 'int3'" in failing(call("convert", folder, tmp_path / "x", "--dtype", "int3"), 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "holds other things than a model" in failing(call("convert", folder, tmp_path / "full"), 1)
    assert "FOLDER" in failing(call("convert", folder), 2)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
