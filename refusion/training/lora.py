"""Low-rank training: frozen weights, trained differences of them, kept as peft keeps them.

y = W x + (alpha / r) B A x with frozen W (LoRA, arXiv 2106.09685), on every linear layer of every block, and the
mask token's embedding row. A fused layer has an A and a B for each of its parts, so that a file holds them under the
parts' own names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from refusion.checkpoint import Checkpoint, add_mask_token
from refusion.checkpoint.adapter import EMBEDDING, LORA_A, LORA_B, ROWS, Adapter, Facts, facts_of, write_adapter
from refusion.checkpoint.adapter_config import lora_config
from refusion.checkpoint.hub import is_hub_id
from refusion.checkpoint.names import table
from refusion.training.sections import LoraConfig


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained difference of rank R for each of its P parts.

    weight [O, I], bias [O] or None: frozen. a [P*R, I], b [O, R]: float32, trained; b starts at 0.
    rows: the outputs of each part, in their order.
    """

    def __init__(
        self, base: nn.Linear, rows: tuple[int, ...], rank: int, alpha: float, random: torch.Generator
    ) -> None:
        super().__init__()
        self.weight, self.bias = base.weight.requires_grad_(False), base.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.rows, self.rank, self.scale = rows, rank, alpha / rank
        device, bound = base.weight.device, 1 / math.sqrt(base.in_features)
        a = torch.empty(len(rows) * rank, base.in_features).uniform_(-bound, bound, generator=random)
        self.a = nn.Parameter(a.to(device))
        self.b = nn.Parameter(torch.zeros(sum(rows), rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.a.to(x.dtype))
        b = (self.b * self.scale).to(x.dtype)
        if len(self.rows) == 1:
            return F.linear(x, self.weight, self.bias) + F.linear(low, b)
        parts = zip(low.split(self.rank, dim=-1), b.split(self.rows), strict=True)
        return F.linear(x, self.weight, self.bias) + torch.cat([F.linear(h, part) for h, part in parts], dim=-1)


class MaskRowEmbedding(nn.Module):
    """A frozen embedding of which one row, the mask token's, is trained; row: float32 [E]."""

    def __init__(self, base: nn.Embedding, mask_id: int) -> None:
        super().__init__()
        self.weight, self.mask_id = base.weight.requires_grad_(False), mask_id
        self.row = nn.Parameter(base.weight[mask_id].detach().float().clone())

    def forward(self, tokens: Tensor) -> Tensor:
        found = F.embedding(tokens, self.weight)
        return torch.where((tokens == self.mask_id).unsqueeze(-1), self.row.to(found.dtype), found)


def add_lora(checkpoint: Checkpoint, settings: LoraConfig, seed: int) -> Facts:
    """Gives a base a mask token, freezes it and puts trained differences into it, in place.

    Returns what their adapter has to note of the base.
    """
    facts = facts_of(checkpoint)
    mask_id = add_mask_token(checkpoint).config.mask_token_id
    assert mask_id is not None
    facts = replace(facts, mask=(mask_id, checkpoint.tokenizer.id_to_token(mask_id) or ""))
    transformer = checkpoint.transformer.requires_grad_(False)
    random = torch.Generator().manual_seed(seed)
    for name, parts in table(checkpoint.config).items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not module.startswith("layers.") or len(parts[0].shape) != 2:
            continue
        parent, _, leaf = module.rpartition(".")
        owner = transformer.get_submodule(parent)
        rows = tuple(part.shape[0] for part in parts)
        setattr(owner, leaf, LoraLinear(getattr(owner, leaf), rows, settings.rank, settings.alpha, random))
    transformer.embedding = MaskRowEmbedding(transformer.embedding, mask_id)  # type: ignore[assignment]
    return facts


def write_lora(
    checkpoint: Checkpoint, settings: LoraConfig, facts: Facts, folder: Path, *, dtype: torch.dtype = torch.float32,
    max_shard_bytes: int | None = None,
) -> Path:
    """Writes the trained differences as an adapter that `--adapter` and peft load; returns the folder.

    Raises:
        CheckpointError: the folder is something else, or can't be written.
    """
    tensors: dict[str, Tensor] = {}
    for module, a, b in _differences(checkpoint):
        tensors |= {f"{module}.{LORA_A}": a.detach().to(dtype), f"{module}.{LORA_B}": b.detach().to(dtype)}
    embedding: Any = checkpoint.transformer.embedding
    tensors[f"{EMBEDDING}.{ROWS}"] = embedding.row.detach()[None]
    config = lora_config(
        settings.rank, settings.alpha, targets=sorted({module.rpartition(".")[2] for module, _, _ in
                                                       _differences(checkpoint)}),
        rows=[embedding.mask_id], base=checkpoint.source if is_hub_id(checkpoint.source) else None,
    )
    return write_adapter(folder, config, tensors, facts, max_shard_bytes=max_shard_bytes)


@torch.no_grad()
def read_lora(checkpoint: Checkpoint, settings: LoraConfig, base: Facts, adapter: Adapter) -> None:
    """Puts an adapter's tensors into the trained differences of a network, to go on from there.

    Raises:
        CheckpointError: it is of another base or rank, lacks a tensor, or holds more than can be trained on.
    """
    if adapter.facts.mask is not None and adapter.facts.mask != base.mask:
        raise adapter.fail("has another mask token than the base that is trained; give its own base")
    embedding: Any = checkpoint.transformer.embedding
    places = {f"{module}.{end}": part for module, a, b in _differences(checkpoint)
              for end, part in ((LORA_A, a), (LORA_B, b))}
    places[f"{EMBEDDING}.{ROWS}"] = embedding.row[None]
    found = {f"{module}.{end}": tensor for module, parts in adapter.changes.items() for end, tensor in parts.items()}
    odd = sorted(found.keys() ^ places.keys())
    if odd:
        raise adapter.fail(f"training can't go on from it: {odd[0]} is {'missing' if odd[0] in places else 'too much'}")
    for name, place in places.items():
        if found[name].shape != place.shape:
            raise adapter.fail(
                f"{name} has shape {list(found[name].shape)} where lora.rank needs {list(place.shape)}; "
                "give lora the values that the adapter has"
            )
        module = name.removesuffix(f".{LORA_B}")
        factor = 1.0 if module == name else adapter.config.scale(module) * settings.rank / settings.alpha
        place.copy_(found[name].to(place) * factor)


def _differences(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Hugging Face's name of each module with a trained difference, and views of its A [R, I] and B [O, R]."""
    for name, parts in table(checkpoint.config).items():
        module, _, kind = name.rpartition(".")
        found = checkpoint.transformer.get_submodule(module) if kind == "weight" else None
        if not isinstance(found, LoraLinear):
            continue
        blocks = zip(parts, found.a.split(found.rank), found.b.split(found.rows), strict=True)
        for part, a, b in blocks:
            yield part.huggingface.removesuffix(".weight"), a, b
