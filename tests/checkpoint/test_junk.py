"""Whatever stands in a file, a load gives a model or one CheckpointError, never another exception."""

from __future__ import annotations

import json

import numpy as np
import pytest

from refusion.checkpoint import info, load, save
from refusion.errors import CheckpointError

JUNK = [None, True, -1, 0, 3, 2.5, 1e300, 10**40, "x", "", [], ["x"], [1, None], {}, {"content": 1}, {"a": []}, [[1]]]
FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"]
FURTHER = {
    "config.json": ["rope_scaling", "rope_theta", "rope_parameters", "layer_types", "architectures", "auto_map",
                    "refusion", "mask_token_id", "quantization_config", "partial_rotary_factor",
                    "original_max_position_embeddings"],
    "tokenizer_config.json": ["mask_token", "unk_token", "added_tokens_decoder"],
    "special_tokens_map.json": ["bos_token", "eos_token"],
}


@pytest.mark.parametrize("name", FILES)
def test_any_value_of_any_key(name, tmp_path, tiny):
    tiny(tmp_path)
    file = tmp_path / name
    content = json.loads(file.read_text()) if file.exists() else {}
    for key in [*content, *FURTHER.get(name, [])]:
        for junk in JUNK:
            if key in ("num_hidden_layers", "vocab_size") and isinstance(junk, (int, float)) and junk > 1e9:
                continue
            file.write_text(json.dumps({**content, key: junk}))
            try:
                info(tmp_path)
            except CheckpointError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_any_value_in_the_rotary_settings(kind, tmp_path, tiny, edit):
    tiny(tmp_path)
    good = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 32, "attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}
    for key in good:
        for junk in JUNK:
            edit(tmp_path / "config.json", rope_parameters={**good, key: junk})
            try:
                load(tmp_path)
            except CheckpointError as error:
                assert "\n" not in str(error)


def test_any_byte_of_a_gguf_header(tmp_path, tiny, write_gguf):
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny(tmp_path / "hf"), "Q8_0")
    data = bytearray(file.read_bytes())
    header = data.index(b"token_embd.weight") + 2000
    generator = np.random.default_rng(0)
    places = [*generator.integers(4, 1000, 150).tolist(), *generator.integers(1000, header, 100).tolist()]
    for place in places:
        old = data[place]
        data[place] = int(generator.integers(256))
        file.write_bytes(data)
        try:
            info(file)
        except CheckpointError as error:
            assert "\n" not in str(error)
        data[place] = old


def test_any_byte_of_a_safetensors_header(tmp_path, tiny):
    tiny(tmp_path)
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    generator = np.random.default_rng(0)
    for place in generator.integers(0, 1500, 150).tolist():
        old = data[place]
        data[place] = int(generator.integers(256))
        file.write_bytes(data)
        try:
            load(tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error)
        data[place] = old


def test_any_junk_in_a_shard_index(tmp_path, tiny):
    tiny(tmp_path, shard="40KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"]))
    for junk in JUNK:
        for changed in ({**content, "weight_map": junk}, {"weight_map": {**content["weight_map"], first: junk}}):
            index.write_text(json.dumps(changed))
            try:
                save(load(tmp_path), tmp_path / "again")
            except CheckpointError as error:
                assert "\n" not in str(error)
