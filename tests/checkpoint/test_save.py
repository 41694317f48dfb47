"""Saved folders: transformers gives the same logits and ids; a failure leaves the old version."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from refusion.checkpoint import add_mask_token, convert, load, save
from refusion.checkpoint import save as save_function
from refusion.errors import CheckpointError

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4,
        "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@torch.no_grad()
@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LINEAR, "head_dim": 16}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "rope_parameters": YARN, "attention_bias": True}),
])
def test_transformers_reads_the_same_logits_and_ids(family, changes, tmp_path, tiny, logits, some_tokens, nasty):
    original = tiny(tmp_path / "a", family, **changes)
    checkpoint = load(tmp_path / "a")
    assert save(checkpoint, tmp_path / "new" / "b") == (tmp_path / "new" / "b").resolve()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new" / "b", dtype=torch.float32)
    assert type(again) is type(original)
    assert difference(again(some_tokens).logits, original(some_tokens).logits) < 1e-5
    assert again.generation_config.eos_token_id == [2]
    reloaded = load(tmp_path / "new" / "b")
    assert reloaded.config == checkpoint.config
    assert torch.equal(logits(reloaded.transformer, some_tokens), logits(checkpoint.transformer, some_tokens))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "new" / "b")
    for text in nasty:
        assert theirs.encode(text, add_special_tokens=False) == checkpoint.tokenizer.encode(text, parse_special=True)
    talk = [{"role": "user", "content": "Hi 12"}]
    assert theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == \
        reloaded.tokenizer.chat(talk) == checkpoint.tokenizer.chat(talk)
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|endoftext|>", "<|im_end|>", "<|endoftext|>")


@torch.no_grad()
def test_a_mask_token_survives_the_round_trip(tmp_path, tiny, some_tokens):
    tiny(tmp_path / "a", "qwen3", head_dim=8)
    checkpoint = add_mask_token(load(tmp_path / "a"))
    save(checkpoint, tmp_path / "b")
    again = load(tmp_path / "b")
    assert again.config == checkpoint.config
    assert again.tokenizer.mask_id == again.config.mask_token_id == 340
    assert add_mask_token(again).config == checkpoint.config
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["mask_token_id"], config["refusion"]) == (340, {"num_tokens": 341})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert (theirs.mask_token, theirs.mask_token_id, len(theirs)) == ("<|mask|>", 340, 341)
    assert theirs.decode([340], skip_special_tokens=True) == ""
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")(some_tokens)


@torch.no_grad()
def test_shards(tmp_path, tiny, logits, some_tokens, monkeypatch):
    original = tiny(tmp_path / "a", "qwen2")
    monkeypatch.setattr("refusion.checkpoint.saving.MAX_SHARD_BYTES", 30_000)
    save(load(tmp_path / "a"), tmp_path / "b")
    files = sorted(file.name for file in (tmp_path / "b").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 3
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert difference(again(some_tokens).logits, original(some_tokens).logits) < 1e-5
    assert difference(logits(load(tmp_path / "b").transformer, some_tokens), original(some_tokens).logits) < 1e-5
    save(load(tmp_path / "a"), tmp_path / "a")
    monkeypatch.undo()
    save(load(tmp_path / "a"), tmp_path / "a")
    assert [file.name for file in (tmp_path / "a").glob("*.safetensors*")] == ["model.safetensors"]


def test_the_type_of_the_files(tmp_path, tiny):
    tiny(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", torch.bfloat16)
    save(load(tmp_path / "a"), tmp_path / "c", dtype=torch.float16)
    for folder, dtype in (("b", torch.bfloat16), ("c", torch.float16)):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert model.dtype == dtype
    large = (tmp_path / "a" / "model.safetensors").stat().st_size
    assert (tmp_path / "b" / "model.safetensors").stat().st_size < 0.6 * large


@torch.no_grad()
def test_a_gguf_file_becomes_a_folder(tmp_path, tiny, write_gguf, some_tokens):
    original = tiny(tmp_path / "a", "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    write_gguf(tmp_path / "m.gguf", original, pre="llama-bpe")
    convert(tmp_path / "m.gguf", tmp_path / "b", torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert difference(again(some_tokens).logits, original(some_tokens).logits) < 1e-5
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    ours = load(tmp_path / "b").tokenizer
    assert theirs.encode("a 123") == ours.encode("a 123", bos=True) == [0, *ours.encode("a 123")]


def test_settings_of_generation_are_kept(tmp_path, tiny, edit):
    tiny(tmp_path / "a")
    edit(tmp_path / "a" / "generation_config.json", temperature=0.3, eos_token_id=[2, 1])
    save(load(tmp_path / "a"), tmp_path / "b")
    content = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert (content["temperature"], content["eos_token_id"]) == (0.3, [2, 1])


def files_of(folder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def fail_in_the_middle(monkeypatch, error: BaseException) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("refusion.checkpoint.saving.tokenizer_files", stop)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_interrupt_or_a_full_disk_leaves_the_old_version(error, tmp_path, tiny, monkeypatch):
    tiny(tmp_path / "a")
    checkpoint = load(tmp_path / "a")
    before = files_of(tmp_path / "a")
    fail_in_the_middle(monkeypatch, error)
    for folder in ("a", "new"):
        with pytest.raises((KeyboardInterrupt, CheckpointError)) as caught:
            save(checkpoint, tmp_path / folder)
        if isinstance(error, OSError):
            assert "No space left on device" in str(caught.value) and folder in str(caught.value)
    assert files_of(tmp_path / "a") == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_failure_between_the_renames_puts_the_old_version_back(tmp_path, tiny, monkeypatch):
    tiny(tmp_path / "a")
    checkpoint, before = load(tmp_path / "a"), files_of(tmp_path / "a")
    rename, calls = type(tmp_path).rename, []

    def second_fails(self, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", second_fails)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoint, tmp_path / "a")
    assert files_of(tmp_path / "a") == before
    assert os.listdir(tmp_path) == ["a"]


def test_other_files_of_a_model_folder_are_kept_and_old_weights_go(tmp_path, tiny):
    tiny(tmp_path / "a", shard="40KB")
    (tmp_path / "a" / "README.md").write_text("mine")
    (tmp_path / "a" / "state").mkdir()
    (tmp_path / "a" / "chat_template.jinja").write_text("stale")
    save(load(tmp_path / "a"), tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "special_tokens_map.json", "state",
        "tokenizer.json", "tokenizer_config.json"]
    assert load(tmp_path / "a").tokenizer.chat_template == "stale"
    assert os.listdir(tmp_path) == ["a"]


def test_what_is_not_a_model_folder_is_not_touched(tmp_path, tiny):
    tiny(tmp_path / "a")
    checkpoint = load(tmp_path / "a")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="holds other things than a model"):
        save(checkpoint, tmp_path / "home")
    with pytest.raises(CheckpointError, match="is a file"):
        save(checkpoint, tmp_path / "home" / "letter.txt")
    with pytest.raises(CheckpointError, match="couldn't be written"):
        save(checkpoint, tmp_path / "home" / "letter.txt" / "below")
    (tmp_path / "empty").mkdir()
    save_function(checkpoint, str(tmp_path / "empty"))
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_link_to_a_folder_stays_a_link(tmp_path, tiny):
    tiny(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    load(tmp_path / "link")


def test_files_can_be_read_as_others_can(tmp_path, tiny):
    tiny(tmp_path / "a")
    save(load(tmp_path / "a"), tmp_path / "b")
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "b").iterdir()}
    (tmp_path / "x").write_text("")
    assert modes == {(tmp_path / "x").stat().st_mode & 0o777}
