"""Logits of our network against transformers' on tiny random weights: the independent reference."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from refusion.checkpoint.folder import Weights  # noqa: E402
from refusion.checkpoint.hf_config import read_config  # noqa: E402
from refusion.checkpoint.weights import empty_transformer, fill  # noqa: E402
from refusion.model.cache import Cache  # noqa: E402
from refusion.model.transformer import Segment, Transformer  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 5000.0}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, "beta_fast": 16.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-every-head-its-own-keys": ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama3-rope-and-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama-linear-rope-tied": ("llama", {"tie_word_embeddings": True, "rope_parameters":
                                         {"rope_type": "linear", "factor": 2.5, "rope_theta": 777.0}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3-yarn-mscale-bias": ("qwen3", {"head_dim": 12, "attention_bias": True, "rope_parameters": MSCALE}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def random_reference(family: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{CLASSES[family]}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{CLASSES[family]}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data.ndim == 1)
    model.tie_weights()
    return model


def ours(folder: Path) -> Transformer:
    file = folder / "config.json"
    config = read_config(json.loads(file.read_text()), str(file))
    transformer = empty_transformer(config, torch.float32, "cpu")
    with ExitStack() as stack:
        weights = Weights(folder, stack)
        weights.check(config)
        fill(transformer, weights.read)
    return transformer


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference of logits, over the largest logit."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path, record_property: Any) -> None:
    family, changes = CASES[name]
    reference = random_reference(family, changes)
    reference.save_pretrained(tmp_path)
    transformer = ours(tmp_path)
    tokens = torch.randint(0, 97, (2, 80), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(80).expand(2, 80)
    found = transformer.project(transformer(tokens, positions))
    off = difference(found, reference(tokens).logits)
    record_property("difference", off)
    print(f"{name}: {off:.1e}")
    assert off < 1e-5


@torch.no_grad()
def test_true_positions_are_used_not_storage_order(tmp_path: Path) -> None:
    reference = random_reference("qwen3", {"head_dim": 16})
    reference.save_pretrained(tmp_path)
    tokens = torch.randint(0, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7]])
    transformer = ours(tmp_path)
    found = transformer.project(transformer(tokens, positions))
    assert difference(found, reference(tokens, position_ids=positions).logits) < 1e-5


@torch.no_grad()
def test_steps_over_a_cache_equal_transformers(tmp_path: Path) -> None:
    reference = random_reference("llama", {"rope_parameters": LLAMA3})
    reference.save_pretrained(tmp_path)
    transformer = ours(tmp_path)
    tokens = torch.randint(0, 97, (20,), generator=torch.Generator().manual_seed(2))
    cache = Cache(transformer.config, rows=1, capacity=32)
    hidden = []
    for start, stop in ((0, 9), (9, 10), (10, 20)):
        count = stop - start
        mask = torch.ones(count, stop, dtype=torch.bool).tril(start).repeat(transformer.config.group_size, 1)
        positions = torch.arange(start, stop)
        hidden.append(transformer.step(tokens[start:stop], positions, cache, [Segment(0, 0, count, mask)]))
        cache.commit(0, range(count))
    found = transformer.project(torch.cat(hidden))
    assert difference(found, reference(tokens[None]).logits[0]) < 1e-5
