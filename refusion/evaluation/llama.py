"""The peer llama.cpp, through the package llama-cpp-python: our token ids in, its own loop, our counts."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refusion.checkpoint.default import default_model
from refusion.checkpoint.gguf import read_config
from refusion.checkpoint.gguf_file import GgufFile
from refusion.checkpoint.loading import resolve
from refusion.decoding.config import DecodeConfig
from refusion.errors import CheckpointError, ConfigError
from refusion.evaluation.floats import type_name
from refusion.evaluation.gguf_writer import holds_weights, same_architecture, write_gguf, written_tokens
from refusion.evaluation.peers import PEERS, counted
from refusion.generation import Generation, Model, first_stop


class LlamaPeer:
    """llama.cpp on the model's own GGUF file, or on one written from its weights."""

    def __init__(self, model: Model, positions: int) -> None:
        try:
            llama_cpp: Any = importlib.import_module("llama_cpp")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError(
                f"llama-cpp-python can't be loaded ({' '.join(str(error).split())}); build it again with "
                f"{PEERS['llama.cpp'][1]}"
            ) from None
        self._model = model
        threads = torch.get_num_threads()
        on_gpu = model.transformer.device.type == "cuda" and bool(llama_cpp.llama_supports_gpu_offload())
        with ExitStack() as stack:
            file, rows, self.weights, self.note = _file(model, stack)
            try:
                self._llama: Any = llama_cpp.Llama(
                    model_path=str(file), n_ctx=positions, n_threads=threads, n_threads_batch=threads,
                    n_gpu_layers=-1 if on_gpu else 0, verbose=False,
                )
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"llama.cpp can't run {self.weights} ({error}); leave the peer out") from None
            stack.callback(self._llama.close)
            self._stack = stack.pop_all()
        self.uses_torch = False
        if model.transformer.device.type == "cuda" and not on_gpu:
            self.note = "; ".join(filter(None, (self.note, "llama.cpp ran on the CPU, built without GPU")))
        self._options: dict[str, Any] = {"temp": 0.0, "repeat_penalty": 1.0}
        banned = _banned(model, rows)
        if banned:
            self._options["logits_processor"] = [partial(_without, banned)]

    def answer(self, prompt_ids: Sequence[int], config: DecodeConfig) -> Generation:
        """As Peer.answer."""
        ends, stop = set(self._model.tokenizer.eos_ids), config.stop
        check = partial(first_stop, stop=stop, decode=self._model.tokenizer.decode) if stop else None
        self._llama.reset()  # or the beginning that it shares with the last prompt wouldn't be computed again
        answer: list[int] = []
        first = 0.0
        began = time.perf_counter()
        for token in self._llama.generate(list(prompt_ids), **self._options):
            answer.append(int(token))
            if len(answer) == 1:
                first = time.perf_counter() - began
            if token in ends or len(answer) == config.max_tokens or (check is not None and check(answer) is not None):
                break
        seconds = time.perf_counter() - began
        return counted(self._model, answer, len(prompt_ids), stop, seconds, first)

    def close(self) -> None:
        """As Peer.close; the file that was written goes too."""
        self._stack.close()


def _file(model: Model, stack: ExitStack) -> tuple[Path, int, str, str]:
    """The file to run, its rows of the vocabulary, its weights in words and a note.

    The file that the model was read from where the model is still what it holds; else one written from the
    model's weights, in the types of that file, or of the default model where the architecture is its own.
    """
    origin = _origin(model)
    if origin is not None and holds_weights(origin, model.transformer):
        return origin.path, model.config.vocab_size, f"the model's own file {origin.path.name}", ""
    like = origin or _default(model)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refusion-")))
    kinds = write_gguf(model.transformer, folder / "model.gguf", like)
    note = f"rounded from {type_name(model.transformer)} to the types of {like.path.name}" if like else ""
    words = f"the model's weights, written as {' and '.join(kinds)}"
    return folder / "model.gguf", written_tokens(model.config), words, note


def _origin(model: Model) -> GgufFile | None:
    """The GGUF file that the model was read from."""
    if model.checkpoint.extra.get("format") != "gguf":
        return None
    try:
        return GgufFile(resolve(model.checkpoint.source))
    except CheckpointError:  # moved since
        return None


def _default(model: Model) -> GgufFile | None:
    """The default model's file, if the model has its architecture."""
    try:
        file = GgufFile(default_model())
        return file if same_architecture(read_config(file), model.config) else None
    except CheckpointError:  # not installed
        return None


def _banned(model: Model, rows: int) -> list[int]:
    """Ids that our decoders never write, among the rows of the peer's vocabulary."""
    config = model.config
    return [token for token in range(rows) if token == config.mask_token_id or token >= config.num_tokens]


def _without(banned: list[int], ids: Any, scores: Any) -> Any:
    scores[banned] = float("-inf")
    return scores
