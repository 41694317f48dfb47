"""Which decoder a model can use."""

from __future__ import annotations

import typer

from refusion.decoding.config import DecodeConfig
from refusion.errors import ConfigError


def choose_decoder(asked: str | None, mask_token_id: int | None, model: str) -> str:
    """The decoder to use; a model without a mask token can only be decoded left to right, and a line says so.

    Raises:
        ConfigError: a parallel decoder was asked for and the model has no mask token.
    """
    if mask_token_id is not None:
        return asked or DecodeConfig.decoder
    name = "the default model" if model == "default" else model
    if asked not in (None, "autoregressive"):
        raise ConfigError(
            f"{name} has no mask token, so the decoder {asked} can't fill slots with it; leave the decoder out to "
            "decode left to right, or train the model with `refusion train`"
        )
    typer.echo(f"{name} has no mask token (not a ReFusion model): decoding left to right", err=True)
    return "autoregressive"
