"""`refusion convert`: any loadable model to a Hugging Face folder."""

from __future__ import annotations

from typing import Annotated

import typer

from refusion.cli import options
from refusion.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="As --model of generate.")],
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="New or empty, or a model that is replaced.")],
    dtype: Annotated[str, typer.Option("--dtype", help=f"Of the weights: {', '.join(DTYPES)}.")] = "bfloat16",
    add_mask: Annotated[
        bool, typer.Option("--add-mask", help="Add the mask token that ReFusion needs, where there is none.")
    ] = False,
    mask_token_id: options.MaskTokenId = None,
    adapter: options.Adapter = None,
) -> None:
    """Write a model as a Hugging Face folder."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of {', '.join(DTYPES)}")

    import torch

    from refusion import checkpoint

    kind = getattr(torch, dtype)
    loaded = checkpoint.load(source, dtype=kind, mask_token_id=mask_token_id, adapter=adapter)
    if add_mask:
        checkpoint.add_mask_token(loaded)
    written = checkpoint.save(loaded, folder)
    typer.echo(str(written))
