"""`refusion merge`: a base and its adapter to an ordinary Hugging Face folder."""

from __future__ import annotations

from typing import Annotated

import typer

from refusion.cli import options
from refusion.cli.convert import DTYPES
from refusion.errors import ConfigError


def merge(
    folder: Annotated[str, typer.Argument(metavar="OUT", help="New or empty, or a model that is replaced.")],
    adapter: Annotated[str, typer.Option("--adapter", help="A folder of a LoRA adapter (peft), or a hub id.")],
    model: options.Model = "default",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of the weights: {', '.join(DTYPES)}.")] = "bfloat16",
    mask_token_id: options.MaskTokenId = None,
) -> None:
    """Add an adapter to its base and write the model as a Hugging Face folder."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")
    if adapter == "none":
        raise ConfigError("--adapter none leaves nothing to merge; use `refusion convert --adapter none`")

    import torch

    from refusion import checkpoint

    loaded = checkpoint.load(model, dtype=getattr(torch, dtype), mask_token_id=mask_token_id, adapter=adapter)
    typer.echo(str(checkpoint.save(loaded, folder)))
