"""Files <-> models: Hugging Face folders, GGUF files, tokenizers and the default model."""

from refusion.checkpoint.describe import info
from refusion.checkpoint.loading import convert, load
from refusion.checkpoint.mask import add_mask_token
from refusion.checkpoint.saving import save
from refusion.checkpoint.tokenizer import Tokenizer
from refusion.checkpoint.types import Checkpoint

__all__ = ["Checkpoint", "Tokenizer", "add_mask_token", "convert", "info", "load", "save"]
