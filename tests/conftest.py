"""Settings of all tests: nothing is downloaded, and a busy machine fails no test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# read when the hub's client is imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# examples don't change from run to run in CI, so that a red run is the change's own
settings.register_profile("refusion", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("refusion")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny products are slower on two threads, and on one their sums have one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 300 tokens with an end token (0), a chat template and a mask token's room."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    from refusion.checkpoint import Tokenizer

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog. 1 + 2 = 3\n"] * 5, trainer)
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "
    return Tokenizer(backend, eos_ids=[0], chat_template=template)


@pytest.fixture(scope="session")
def tiny_refusion_model() -> Any:
    """A random two-layer model with a mask token, float32, as refusion.load gives one."""
    import torch

    from refusion.checkpoint import Checkpoint, add_mask_token
    from refusion.generation import Model
    from refusion.model.config import ModelConfig
    from refusion.model.transformer import Transformer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    transformer = Transformer(ModelConfig(
        vocab_size=320, num_tokens=tokenizer.vocab_size, hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=8, max_positions=256, tie_embeddings=True, eos_token_ids=(0,),
    ))
    for parameter in transformer.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1)
    checkpoint = add_mask_token(Checkpoint(transformer, tokenizer, "tiny"))
    checkpoint.transformer.eval().requires_grad_(False)
    return Model(checkpoint)
