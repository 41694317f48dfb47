"""Adding the mask token: its row, its id, its name, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from refusion.checkpoint import add_mask_token, load
from refusion.model.transformer import Attention


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_the_rows_start_as_the_mean_and_the_rest_is_unchanged(tied, tmp_path, tiny, logits, some_tokens):
    tiny(tmp_path, "qwen2", tie_word_embeddings=tied)
    checkpoint = load(tmp_path)
    old = [checkpoint.transformer.embedding.weight.clone()]
    old += [] if checkpoint.transformer.head is None else [checkpoint.transformer.head.weight.clone()]
    before = logits(checkpoint.transformer, some_tokens)
    assert add_mask_token(checkpoint) is checkpoint
    config = checkpoint.config
    assert (config.mask_token_id, config.num_tokens, config.vocab_size) == (340, 341, 448)
    new = [checkpoint.transformer.embedding.weight]
    new += [] if checkpoint.transformer.head is None else [checkpoint.transformer.head.weight]
    for was, now in zip(old, new, strict=True):
        assert now.shape == (448, 32)
        assert torch.equal(now[:340], was[:340])
        assert torch.allclose(now[340:], was[:340].mean(dim=0).expand(108, 32), atol=1e-6)
    after = logits(checkpoint.transformer, some_tokens)
    assert torch.allclose(after[..., :340], before[..., :340], atol=1e-5)
    assert (after[..., 340:] <= after[..., :340].amax(-1, keepdim=True)).all()


def test_a_full_vocabulary_grows_to_a_multiple_of_64(tmp_path, tiny):
    tiny(tmp_path, vocab_size=340)
    checkpoint = add_mask_token(load(tmp_path, dtype=torch.bfloat16))
    assert (checkpoint.config.vocab_size, checkpoint.config.num_tokens) == (384, 341)
    transformer = checkpoint.transformer
    assert transformer.head is not None
    assert transformer.embedding.weight.shape == transformer.head.weight.shape == (384, 32)
    assert transformer.head.out_features == transformer.embedding.num_embeddings == 384
    assert transformer.dtype == torch.bfloat16
    assert transformer.embedding.weight.requires_grad and transformer.embedding.weight.is_leaf
    attentions = [module for module in transformer.modules() if isinstance(module, Attention)]
    assert len(attentions) == 2 and all(attention.config is checkpoint.config for attention in attentions)


def test_it_is_a_control_token_and_adding_twice_does_nothing(tmp_path, tiny):
    tiny(tmp_path)
    checkpoint = add_mask_token(load(tmp_path))
    tokenizer, config, weight = checkpoint.tokenizer, checkpoint.config, checkpoint.transformer.embedding.weight
    assert tokenizer.mask_id == 340 and tokenizer.vocab_size == 341
    assert tokenizer.id_to_token(340) == "<|mask|>"
    assert 340 in tokenizer.special_ids
    assert 340 not in tokenizer.encode("<|mask|>")
    assert tokenizer.encode("<|mask|>", parse_special=True) == [340]
    add_mask_token(checkpoint)
    assert checkpoint.config is config and checkpoint.transformer.embedding.weight is weight
    assert tokenizer.vocab_size == 341


def test_another_name_is_chosen_where_it_is_taken(tmp_path, tiny):
    tiny(tmp_path)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|mask|>"))
    checkpoint = add_mask_token(load(tmp_path))
    assert checkpoint.tokenizer.id_to_token(340) == "<|mask_1|>"
    assert checkpoint.config.mask_token_id == 340


def test_it_can_be_trained(tmp_path, tiny):
    tiny(tmp_path, tie_word_embeddings=True)
    transformer = add_mask_token(load(tmp_path)).transformer
    hidden = transformer(torch.tensor([[340, 5]]), torch.arange(2)[None])
    transformer.project(hidden).square().mean().backward()
    assert transformer.embedding.weight.grad is not None
    assert transformer.embedding.weight.grad[340].abs().sum() > 0
