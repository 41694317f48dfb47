"""Fills a network tensor by tensor, so that a load never holds the weights twice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from refusion.checkpoint.names import Part, table
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig
from refusion.model.rope import inverse_frequencies
from refusion.model.transformer import Transformer


def empty_transformer(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A network whose weights are allocated but not yet set; nothing is initialised at random."""
    with torch.device("meta"):
        transformer = Transformer(config)
    transformer = transformer.to(dtype).to_empty(device=device)
    frequencies, _ = inverse_frequencies(config)
    transformer.frequencies = frequencies.to(device)
    return transformer.eval()


def fill(transformer: Transformer, read: Callable[[Part], Tensor]) -> None:
    """Copies what `read` gives for each tensor of the table into its place; shapes were checked before."""
    parts = table(transformer.config)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            start = 0
            for part in parts[name]:
                rows = part.shape[0]
                parameter[start : start + rows].copy_(read(part))
                start += rows


def check_shape(file: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """
    Raises:
        CheckpointError: the shapes differ.
    """
    if tuple(found) != tuple(wanted):
        raise CheckpointError(
            f"{file}: tensor {name} has shape {list(found)} but the config asks for {list(wanted)}; "
            "the config and the weights don't belong together"
        )
