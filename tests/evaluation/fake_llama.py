"""A stand-in for the package llama-cpp-python: its interface over our own reading of the GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from refusion.checkpoint import gguf
from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.weights import empty_transformer, fill


class Llama:
    """Greedy, from left to right, without a cache; it remembers how it was made and called.

    Like the original it keeps the last prompt's cells, so that only `reset` makes the next one be computed wholly.
    """

    made: list[Llama]

    def __init__(self, model_path: str, **options: Any) -> None:
        self.path, self.options, self.calls = Path(model_path), options, []
        self.kept, self.computed, self.closed = [], [], False
        file = GgufFile(self.path)
        config = gguf.read_config(file)
        self.transformer = empty_transformer(config, torch.float32, "cpu")
        fill(self.transformer, lambda part: gguf._read_part(file, part, permuted=config.family == "llama"))
        Llama.made.append(self)

    def reset(self) -> None:
        self.kept = []

    @torch.inference_mode()
    def generate(self, tokens: list[int], **options: Any) -> Iterator[int]:
        self.calls.append(options)
        assert isinstance(tokens, list) and all(isinstance(token, int) for token in tokens)
        shared = next((at for at, (a, b) in enumerate(zip(self.kept, tokens, strict=False)) if a != b), 0)
        self.computed.append(len(tokens) - shared)
        tokens = list(tokens)
        while True:
            assert len(tokens) <= self.options["n_ctx"], "the context is too small"
            positions = torch.arange(len(tokens))[None]
            hidden = self.transformer(torch.tensor([tokens]), positions)
            scores = self.transformer.project(hidden[:, -1])[0].float().numpy()
            for change in options.get("logits_processor", ()):
                scores[:] = change(tokens, scores)
            tokens.append(int(scores.argmax()))
            self.kept = tokens
            yield tokens[-1]

    def close(self) -> None:
        self.closed = True


def package(gpu: bool = False) -> ModuleType:
    """The module to put into sys.modules as `llama_cpp`."""
    module: Any = ModuleType("llama_cpp")
    module.__spec__ = ModuleSpec("llama_cpp", None)
    Llama.made = []
    module.Llama = Llama
    module.llama_supports_gpu_offload = lambda: gpu
    return module
