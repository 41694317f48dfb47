"""What a loaded checkpoint is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from refusion.checkpoint.tokenizer import Tokenizer
from refusion.model.config import ModelConfig
from refusion.model.transformer import Transformer


@dataclass
class Checkpoint:
    """A network, its tokenizer and where they came from.

    extra: facts of the source that neither part holds; "format" ("huggingface" or "gguf"),
    where the source had one, "generation_config" as it was read, and where one was added, "adapter", its name.
    """

    transformer: Transformer
    tokenizer: Tokenizer
    source: str
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """The architecture, mask token and end tokens of the network."""
        return self.transformer.config
