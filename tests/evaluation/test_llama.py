"""The peer llama.cpp: the same token ids and weights, our counts; on a stand-in for its package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import refusion
from refusion.checkpoint import Checkpoint
from refusion.checkpoint.gguf_file import GgufFile
from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError
from refusion.evaluation import llama, peers
from refusion.evaluation.gguf_writer import write_gguf
from refusion.evaluation.peers import check_peer, open_peer
from refusion.generation import Model
from tests.conftest import tiny_tokenizer
from tests.engine.tiny import tiny
from tests.evaluation.fake_llama import Llama, package

PROMPTS = ("1 + 2", "the quick brown fox")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", package())


def gguf_model(path: Path, **changes: Any) -> Model:
    """A model that was read from a GGUF file of its own."""
    transformer = tiny(vocab_size=300, num_tokens=300, eos_token_ids=(0,), **{"mask_token_id": None, **changes})
    write_gguf(transformer, path)
    return Model(Checkpoint(transformer, tiny_tokenizer(), str(path), {"format": "gguf"}))


def test_it_writes_the_same_tokens_from_a_file_of_the_models_weights(tiny_refusion_model: refusion.Model) -> None:
    peer = open_peer("llama.cpp", tiny_refusion_model, 60)
    [engine] = Llama.made
    assert engine.path.is_file() and engine.transformer.config.vocab_size == tiny_refusion_model.config.num_tokens - 1
    assert peer.weights == "the model's weights, written as F32" and peer.note == ""
    config = DecodeConfig(decoder="autoregressive", max_tokens=12)
    for prompt in PROMPTS:
        theirs = peer.answer(tiny_refusion_model.prompt_ids(prompt), config)
        ours = refusion.generate(tiny_refusion_model, prompt, config)[0]
        assert theirs.token_ids == ours.token_ids and theirs.text == ours.text
        assert (theirs.forwards, theirs.finish_reason) == (ours.forwards, ours.finish_reason)
        assert theirs.prompt_tokens == ours.prompt_tokens
        assert 0 < theirs.first_token_seconds <= theirs.seconds
    peer.close()
    assert engine.closed and not engine.path.exists()


def test_how_the_engine_is_made_and_called(tiny_refusion_model: refusion.Model) -> None:
    peer = open_peer("llama.cpp", tiny_refusion_model, 77)
    [engine] = Llama.made
    threads = torch.get_num_threads()
    assert engine.options == {
        "n_ctx": 77, "n_threads": threads, "n_threads_batch": threads, "n_gpu_layers": 0, "verbose": False,
    }
    ids = tiny_refusion_model.prompt_ids(PROMPTS[0])
    for _ in range(2):
        peer.answer(ids, DecodeConfig(max_tokens=3))
    assert engine.calls == [{"temp": 0.0, "repeat_penalty": 1.0}] * 2
    assert engine.computed == [len(ids)] * 2, "the second prompt was read from what the first left behind"


def test_end_tokens_and_stop_strings_end_an_answer(tiny_refusion_model: refusion.Model) -> None:
    peer = open_peer("llama.cpp", tiny_refusion_model, 60)
    ids = tiny_refusion_model.prompt_ids(PROMPTS[0])
    whole = peer.answer(ids, DecodeConfig(max_tokens=12))
    assert whole.finish_reason == "length" and whole.tokens == 12
    third = tiny_refusion_model.tokenizer.decode(whole.token_ids[2:3])
    for stop in (("never there",), (third,)):
        config = DecodeConfig(decoder="autoregressive", max_tokens=12, stop=stop)
        theirs = peer.answer(ids, config)
        ours = refusion.generate(tiny_refusion_model, PROMPTS[0], config)[0]
        assert (theirs.token_ids, theirs.text, theirs.finish_reason) == (ours.token_ids, ours.text, ours.finish_reason)
    ends = tiny_refusion_model.tokenizer.eos_ids
    try:
        tiny_refusion_model.tokenizer.eos_ids = (whole.token_ids[4],)
        found = peer.answer(ids, DecodeConfig(max_tokens=12))
    finally:
        tiny_refusion_model.tokenizer.eos_ids = ends
    at = whole.token_ids.index(whole.token_ids[4])
    assert found.token_ids == whole.token_ids[: at + 1] and found.finish_reason == "stop" and found.forwards == at


def test_a_model_from_a_gguf_file_runs_that_very_file(tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    model = gguf_model(path)
    peer = open_peer("llama.cpp", model, 60)
    assert Llama.made[0].path == path and peer.weights == "the model's own file own.gguf"
    peer.close()
    assert path.is_file()


def test_changed_weights_are_written_in_the_types_of_the_file(tmp_path: Path) -> None:
    model = gguf_model(tmp_path / "own.gguf")
    model.transformer.embedding.weight.data += 1
    peer = open_peer("llama.cpp", model, 60)
    [engine] = Llama.made
    assert engine.path != tmp_path / "own.gguf"
    assert torch.equal(engine.transformer.embedding.weight, model.transformer.embedding.weight)
    assert peer.note == "rounded from float32 to the types of own.gguf"


def test_a_tuned_model_takes_the_types_of_the_default_model_with_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_refusion_model: refusion.Model
) -> None:
    write_gguf(tiny_refusion_model.transformer, tmp_path / "base.gguf")
    monkeypatch.setattr(llama, "default_model", lambda: tmp_path / "base.gguf")
    peer = open_peer("llama.cpp", tiny_refusion_model, 60)
    assert peer.note == "rounded from float32 to the types of base.gguf"
    other = Model(Checkpoint(tiny(), tiny_tokenizer(), "other"))
    assert open_peer("llama.cpp", other, 60).note == ""


def test_tokens_that_our_decoders_never_write_are_not_written_either(tmp_path: Path) -> None:
    free = gguf_model(tmp_path / "free.gguf")
    ids = free.prompt_ids(PROMPTS[0])
    first = open_peer("llama.cpp", free, 60).answer(ids, DecodeConfig(max_tokens=6)).token_ids[0]
    model = gguf_model(tmp_path / "own.gguf", mask_token_id=first)
    theirs = open_peer("llama.cpp", model, 60).answer(ids, DecodeConfig(max_tokens=6))
    config = DecodeConfig(decoder="autoregressive", max_tokens=6)
    assert first not in theirs.token_ids
    assert theirs.token_ids == refusion.generate(model, PROMPTS[0], config)[0].token_ids


def test_a_missing_package_is_said_with_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        check_peer("llama.cpp")
    said = str(error.value)
    assert "the peer llama.cpp isn't installed" in said and "pip install llama-cpp-python" in said
    assert "GGML_AVX512_VNNI=ON" in said


def test_a_package_that_can_not_be_loaded_or_a_model_it_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tiny_refusion_model: refusion.Model
) -> None:
    def refuses(**_: Any) -> None:
        raise ValueError("Failed to load model from file")

    module: Any = sys.modules["llama_cpp"]
    module.Llama = refuses
    with pytest.raises(ConfigError, match="llama.cpp can't run the model's weights, written as F32"):
        open_peer("llama.cpp", tiny_refusion_model, 60)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="llama-cpp-python can't be loaded"):
        open_peer("llama.cpp", tiny_refusion_model, 60)


def test_the_default_models_file_is_recognised() -> None:
    """Found by its name, before its weights are compared."""
    from refusion.checkpoint.default import default_model

    model = Model(Checkpoint(tiny(), tiny_tokenizer(), "default", {"format": "gguf"}))
    origin = llama._origin(model)
    assert isinstance(origin, GgufFile) and origin.path == default_model()
    assert llama._origin(Model(Checkpoint(tiny(), tiny_tokenizer(), "gone.gguf", {"format": "gguf"}))) is None
