"""Fills a network tensor by tensor, so that a load never holds the weights twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from refusion.checkpoint.names import Part, table
from refusion.errors import CheckpointError
from refusion.model.config import ModelConfig
from refusion.model.rope import inverse_frequencies
from refusion.model.transformer import Transformer

Read = Callable[[Part], Tensor]
"""Gives a tensor of a file."""
Adapt = Callable[[Transformer, Read], Read]
"""Puts changes between a file and the network that is to be filled from it."""


def empty_transformer(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Transformer:
    """A network whose weights are allocated but not yet set; nothing is initialised at random."""
    with torch.device("meta"):
        transformer = Transformer(config)
    transformer = transformer.to(dtype).to_empty(device=device)
    frequencies, _ = inverse_frequencies(config)
    transformer.frequencies = frequencies.to(device)
    return transformer.eval()


def fill(transformer: Transformer, read: Read, adapt: Adapt | None = None) -> None:
    """Copies what `read` gives for each tensor of the table into its place; shapes were checked before.

    adapt: changes what was read before it is rounded to the network's type.
    """
    read = adapt(transformer, read) if adapt else read
    parts = table(transformer.config)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            start = 0
            for part in parts[name]:
                rows = part.shape[0]
                parameter[start : start + rows].copy_(read(part))
                start += rows


def named_parts(transformer: Transformer) -> Iterator[tuple[str, Part, Tensor]]:
    """For each tensor of the table: our parameter's name, the part, and its rows in the parameter."""
    parameters = dict(transformer.named_parameters())
    for name, parts in table(transformer.config).items():
        start = 0
        for part in parts:
            yield name, part, parameters[name].detach()[start : start + part.shape[0]]
            start += part.shape[0]


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
