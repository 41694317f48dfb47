"""GGUF files: every quantisation, each architecture, the tokenizer inside, and damaged files."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from refusion.checkpoint import info, load
from refusion.checkpoint.gguf_file import GgufFile, TensorInfo, _dequantised
from refusion.checkpoint.hf_tokenizer import read_tokenizer
from refusion.errors import CheckpointError

gguf = pytest.importorskip("gguf")


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}), ("llama", {"head_dim": 16, "num_key_value_heads": 1}), ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}), ("llama", {"attention_bias": True, "mlp_bias": True}),
])
def test_each_architecture_gives_the_logits_of_transformers(
    family, changes, tmp_path, tiny, write_gguf, logits, some_tokens
):
    reference = tiny(tmp_path / "hf", family, rope_parameters={"rope_type": "default", "rope_theta": 1234.5}, **changes)
    write_gguf(tmp_path / "m.gguf", reference)
    checkpoint = load(tmp_path / "m.gguf")
    assert difference(logits(checkpoint.transformer, some_tokens), reference(some_tokens).logits) < 1e-5
    assert checkpoint.config == replace(load(tmp_path / "hf").config, eos_token_ids=(2, 0))
    assert checkpoint.config.num_tokens == 340


@torch.no_grad()
@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_quantisation_equals_gguf_s_own_values(kind, tmp_path, tiny, write_gguf):
    reference = tiny(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", reference, kind)
    parameters = dict(load(tmp_path / "m.gguf").transformer.named_parameters())
    weight = reference.state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
    quantisation = gguf.GGMLQuantizationType[kind]
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, quantisation), quantisation)
    assert torch.equal(parameters["layers.1.mlp.down.weight"], torch.from_numpy(wanted))
    # heads must be permuted back exactly, whatever the blocks
    query = reference.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    found = parameters["layers.0.attention.qkv.weight"][:32]
    assert difference(found, query) < {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2}.get(kind, 0.15)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "Q8_0", "Q4_1"])
def test_runs_of_blocks_give_what_one_call_gives(kind, monkeypatch):
    quantisation = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[quantisation]
    raw = np.random.default_rng(0).integers(0, 60, 3 * 5 * size, dtype=np.uint8)
    monkeypatch.setattr("refusion.checkpoint.gguf_file._VALUES_AT_ONCE", 4 * block)
    found = _dequantised(raw, TensorInfo("t", (3, 5 * block), kind, 0, len(raw)))
    wanted = gguf.quants.dequantize(raw.reshape(3, -1), quantisation)
    assert np.array_equal(found.reshape(3, -1), wanted)


def test_a_q4_k_block_worked_out_by_hand():
    # d 1, dmin 2; scales 3 and minimums 1 of every group; low nibbles 5, high nibbles 9
    scales = bytes([3] * 4 + [1] * 4 + [3 | 1 << 4] * 4)
    raw = np.frombuffer(np.array([1, 2], np.float16).tobytes() + scales + bytes([5 | 9 << 4] * 128), np.uint8)
    found = _dequantised(raw, TensorInfo("t", (256,), "Q4_K", 0, 144)).reshape(8, 32)
    assert np.array_equal(found, np.where(np.arange(8)[:, None] % 2, 9 * 3 - 2 * 1, 5 * 3 - 2 * 1) * np.ones((8, 32)))


def test_the_header_equals_gguf_s_own_reader(tmp_path, tiny, write_gguf):
    write_gguf(tmp_path / "m.gguf", tiny(tmp_path / "hf"), "Q8_0")
    ours, theirs = GgufFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        assert ours.tensors[tensor.name].nbytes == tensor.n_bytes
    for key, value in ours.metadata.items():
        assert theirs.get_field(key).contents() == value


@pytest.mark.parametrize(("family", "pre"), [("llama", "smollm"), ("qwen2", "qwen2")])
def test_the_tokenizer_equals_the_original(family, pre, tmp_path, tiny, write_gguf, nasty):
    write_gguf(tmp_path / "m.gguf", tiny(tmp_path / "hf", family), pre=pre)
    ours = load(tmp_path / "m.gguf").tokenizer
    original = read_tokenizer(tmp_path / "hf", {}, {})
    for text in nasty:
        for parse in (True, False):
            assert ours.encode(text, parse_special=parse) == original.encode(text, parse_special=parse)
    talk = [{"role": "user", "content": "x"}]
    assert ours.chat(talk) == original.chat(talk)
    assert (ours.bos_id, ours.pad_id, ours.eos_ids, ours.add_bos) == (0, 0, (2, 0), False)


def test_pre_tokenizers_split_as_the_models_regexes(tmp_path, tiny, write_gguf, nasty):
    """The regexes of the Qwen2 and Llama 3 releases, run by an independent engine over plain text."""
    regex = pytest.importorskip("regex")
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    reference = tiny(tmp_path / "hf")
    patterns = {"qwen2": words + r"\p{N}" + rest, "llama-bpe": words + r"\p{N}{1,3}" + rest, "gpt-2": gpt2}
    for pre, pattern in patterns.items():
        write_gguf(tmp_path / "m.gguf", reference, pre=pre)
        backend = load(tmp_path / "m.gguf").tokenizer._plain
        for text in nasty:
            pieces = [text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text)]
            assert pieces == regex.findall(pattern, text), (pre, text)


def test_llama3_files_start_texts_with_bos_and_qwen2_normalises(tmp_path, tiny, write_gguf):
    reference = tiny(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", reference, pre="llama-bpe")
    assert load(tmp_path / "m.gguf").tokenizer.add_bos
    write_gguf(tmp_path / "m.gguf", reference, pre="llama-bpe", extra={"tokenizer.ggml.add_bos_token": False})
    assert not load(tmp_path / "m.gguf").tokenizer.add_bos
    write_gguf(tmp_path / "m.gguf", reference, pre="qwen2")
    tokenizer = load(tmp_path / "m.gguf").tokenizer
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    write_gguf(tmp_path / "m.gguf", reference, pre="default")
    tokenizer = load(tmp_path / "m.gguf").tokenizer
    assert [piece for piece, _ in tokenizer._plain.pre_tokenizer.pre_tokenize_str("ab12345=c")] == \
        ["ab", "123", "45", "=", "c"]


@torch.no_grad()
def test_rope_scalings(tmp_path, tiny, write_gguf, logits, some_tokens):
    linear = tiny(tmp_path / "a", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    write_gguf(tmp_path / "m.gguf", linear,
               extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    found = logits(load(tmp_path / "m.gguf").transformer, some_tokens)
    assert difference(found, linear(some_tokens).logits) < 1e-5
    yarn = tiny(tmp_path / "b", "qwen3", head_dim=8, rope_parameters={
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4})
    write_gguf(tmp_path / "m.gguf", yarn, extra={
        "qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0,
        "qwen3.rope.scaling.original_context_length": 32})
    found = logits(load(tmp_path / "m.gguf").transformer, some_tokens)
    assert difference(found, yarn(some_tokens).logits) < 1e-5


@torch.no_grad()
def test_llama3_factors_are_found_again(tmp_path, tiny, write_gguf, logits, some_tokens):
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    reference = tiny(tmp_path / "hf", head_dim=64, rope_parameters=rope)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    write_gguf(tmp_path / "m.gguf", reference, tensors={"rope_freqs.weight": factors})
    checkpoint = load(tmp_path / "m.gguf")
    assert checkpoint.config.rope_scaling == load(tmp_path / "hf").config.rope_scaling
    assert difference(logits(checkpoint.transformer, some_tokens), reference(some_tokens).logits) < 1e-5
    write_gguf(tmp_path / "m.gguf", reference, tensors={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(CheckpointError, match="aren't those of Llama 3"):
        load(tmp_path / "m.gguf")


REFUSED = {
    "architecture 'gemma' isn't supported": {"architecture": "gemma"},
    "mixture of experts": {"extra": {"llama.expert_count": 8}},
    "sliding-window": {"extra": {"llama.attention.sliding_window": 128}},
    "partial rotary embeddings \\(4 of 8\\)": {"extra": {"llama.rope.dimension_count": 4}},
    "RoPE scaling 'longrope'": {"extra": {"llama.rope.scaling.type": "longrope"}},
    "soft-capping": {"extra": {"llama.attn_logit_softcapping": 30.0}},
    "tokenizer model 'llama' isn't supported": {"tokenizer_model": "llama"},
    "pre-tokenizer 'tekken' isn't known": {"pre": "tekken"},
    "tensor blk.9.odd.weight is unexpected": {"tensors": {"blk.9.odd.weight": np.zeros((2, 2), np.float32)}},
    "tensor blk.1.ffn_up.weight is missing": {"skip": "model.layers.1.mlp.up_proj.weight"},
    "tensor token_embd.weight is missing": {"skip": "model.embed_tokens.weight"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_supported_is_refused_by_name(words, tmp_path, tiny, write_gguf):
    write_gguf(tmp_path / "m.gguf", tiny(tmp_path / "hf"), **REFUSED[words])
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path / "m.gguf")
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_damaged_files_are_named(tmp_path, tiny, write_gguf):
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny(tmp_path / "hf"), "Q4_0")
    data = file.read_bytes()
    cases = {
        "isn't a GGUF file": b"nonsense" * 10, "can't be read": b"", "ends inside its header": data[:2000],
        "cut short, tensor": data[:-64], "GGUF version 9": data[:4] + struct.pack("<I", 9) + data[8:],
        "header is damaged": data[:8] + struct.pack("<Q", 1 << 60) + data[16:],
    }
    for words, content in cases.items():
        file.write_bytes(content)
        for read in (load, info):
            with pytest.raises(CheckpointError, match=words) as caught:
                read(file)
            assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_any_cut_of_the_header_is_one_sentence(tmp_path, tiny, write_gguf):
    file = tmp_path / "m.gguf"
    write_gguf(file, tiny(tmp_path / "hf"))
    data = file.read_bytes()
    for length in range(0, len(data), max(len(data) // 60, 1)):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            load(file)


def test_a_mask_token_can_be_named(tmp_path, tiny, write_gguf):
    write_gguf(tmp_path / "m.gguf", tiny(tmp_path / "hf"))
    assert load(tmp_path / "m.gguf", mask_token_id=340).config.mask_token_id == 340
    with pytest.raises(CheckpointError, match="outside the vocabulary"):
        load(tmp_path / "m.gguf", mask_token_id=448)


def test_smollm_cuts_digits_one_by_one(tmp_path, tiny, write_gguf):
    write_gguf(tmp_path / "m.gguf", tiny(tmp_path / "hf"))
    text = "ab 123 x"
    cut = load(tmp_path / "m.gguf").tokenizer._plain.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == ["ab", " ", "1", "2", "3", " x"]
