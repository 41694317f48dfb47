"""ReFusion: a diffusion language model with parallel autoregressive decoding (arXiv 2512.13586).

Names are loaded on first use, so that `import refusion` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refusion.decoding.config import DecodeConfig
    from refusion.errors import RefusionError
    from refusion.generation import Generation, Model, generate, load
    from refusion.training.loop import train
    from refusion.training.recipe import load_recipe

__version__ = "0.1.0"

_HOMES = {
    "DecodeConfig": "refusion.decoding.config",
    "Generation": "refusion.generation",
    "Model": "refusion.generation",
    "RefusionError": "refusion.errors",
    "generate": "refusion.generation",
    "load": "refusion.generation",
    "load_recipe": "refusion.training.recipe",
    "train": "refusion.training.loop",
}

__all__ = [
    "DecodeConfig", "Generation", "Model", "RefusionError", "__version__", "generate", "load", "load_recipe", "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'refusion' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
